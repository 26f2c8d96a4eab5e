"""The run's key: one rule for what it may be, for reading it from a file, and for telling two keys apart without showing one.

A key is 16 to 64 bytes. In a file of printable text, line ends at its end do not count; any other file is the key, byte for
byte. So what an editor or ``openssl rand -hex 32`` writes and what ``secrets.token_bytes`` gives are both taken for
what they are.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from deltarefit.errors import RejectedError

__all__ = ["KEY_NBYTES", "check_key", "key_print", "key_trouble", "read_key"]

KEY_NBYTES = (16, 64)
"""Shortest and longest key; 64 is BLAKE2b's own limit."""
_LINE_END = b"\r\n"
_TEXT = frozenset(range(0x20, 0x7F)) | frozenset(b"\t\r\n")
_MOST_READ = 4096
_PERSON = b"deltarefit/key/1"
"""BLAKE2b personalisation: no payload's or message's digest may pass for a fingerprint."""
_ADVICE = "make one with 'openssl rand -hex 32' or secrets.token_bytes(32)"


def check_key(key: bytes | None) -> None:
    """Raise RejectedError unless it is no key, or one that ``read_key`` could return. Texts never show it."""
    if key is None:
        return
    if not isinstance(key, bytes):
        raise RejectedError(f"run key: expected bytes, got a {type(key).__name__}; {_ADVICE}")
    low, high = KEY_NBYTES
    if not low <= len(key) <= high:
        raise RejectedError(f"run key: {len(key)} bytes, expected {low} to {high}; {_ADVICE}")
    if len(_without_line_end(key)) != len(key):
        raise RejectedError(
            "run key: it is text with a line end, expected the text alone; read its file with deltarefit.read_key"
        )


def read_key(path: str | os.PathLike[str]) -> bytes:
    """The run's key from a file: all of its bytes, without line ends at the end if it is text.

    Raises:
        RejectedError: the file cannot be read, or holds none; the text never shows what it holds.
    """
    try:
        with Path(path).open("rb") as file:
            key = _without_line_end(file.read(_MOST_READ))
    except (OSError, ValueError) as error:
        raise RejectedError(f"key file {path}: expected a file with the run's key: {error}") from error
    low, high = KEY_NBYTES
    if not low <= len(key) <= high:
        found = f"{len(key)} bytes" if len(key) < _MOST_READ - len(_LINE_END) else f"more than {high} bytes"
        raise RejectedError(f"key file {path}: {found}, line ends of a text not counted; expected {low} to {high}; {_ADVICE}")
    return key


def key_print(key: bytes | None) -> str:
    """A fingerprint that participants may show openly: 16 hex digits, the same for the same key; empty without one."""
    if not key:
        return ""
    return hashlib.blake2b(b"which key", digest_size=8, key=key, person=_PERSON).hexdigest()


def key_trouble(here: str, there: str, who: str) -> str:
    """Why this participant and ``who`` cannot understand each other, from their keys' fingerprints; empty if they can."""
    if here == there:
        return ""
    theirs, ours = (f"the one with fingerprint {one}" if one else "none" for one in (there, here))
    return (
        f"{who} has another run key than this side: {theirs}, here {ours}; give every participant of the run the same, by key= "
        "or --key-file"
    )


def _without_line_end(data: bytes) -> bytes:
    return data.rstrip(_LINE_END) if _TEXT.issuperset(data) else data
