"""Numbers of bytes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

from deltarefit.errors import RejectedError

__all__ = ["parse_nbytes"]

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
_NBYTES = re.compile(r"\s*([0-9]{1,24}(?:\.[0-9]{1,24})?)\s*([A-Za-z]*)\s*")


def parse_nbytes(text: str | int) -> int:
    """Bytes from ``4096``, ``"256MiB"``, ``"256M"`` (the same) or ``"1.5 GB"``; a part of a byte is dropped.

    Raises:
        RejectedError: not a number with a known unit.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _NBYTES.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2].upper() not in _UNITS:
        raise RejectedError(f"size {text!r}: expected a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 256MiB")
    return int(Fraction(match[1]) * _UNITS[match[2].upper()])
