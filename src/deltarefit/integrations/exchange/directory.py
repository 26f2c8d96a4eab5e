"""A directory on the node through which the driver hands bytes to ranks and ranks hand results back.

Engines' weight-update calls carry small texts and return little, so payloads go by file (written once, mapped by every rank)
and each rank answers with a file of its own, renamed into place when complete. Names are made here from numbers, never taken
from a message, so nothing outside the directory can be read or written.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from deltarefit.errors import AttemptFailedError, RejectedError, TransportError
from deltarefit.runtime.messages import Failure

__all__ = ["Exchange", "RankReply", "create_directory"]

_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MEMORY_MIN_NBYTES = 2**30
"""Containers often have 64 MiB of shared memory, too little for a payload; then the temporary directory is used."""
_MAX_REPLY_NBYTES = 2**30
_REPLY = re.compile(r"reply-([0-9]+)-([0-9]+)of([0-9]+)\.msgpack")


class RankReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank answers to one operation."""

    session: str
    number: int
    rank: int
    world_size: int
    failure: Failure | None
    result: msgspec.Raw
    """Msgpack of the operation's result; of nil if it failed."""


def create_directory(parent: Path | None = None) -> Path:
    """A new private directory (mode 0700), in shared memory where there is enough of it.

    The engine's processes must run on this node, as this user or as root, and see the same path.
    """
    if parent is None and _has_room(_SHARED_MEMORY):
        parent = _SHARED_MEMORY
    return Path(tempfile.mkdtemp(prefix="deltarefit-engine-", dir=parent))


def _has_room(directory: Path) -> bool:
    if not (directory.is_dir() and os.access(directory, os.W_OK)):
        return False
    return shutil.disk_usage(directory).free >= _SHARED_MEMORY_MIN_NBYTES


class Exchange:
    """One driver's directory, seen from either side. Numbers count the operations of a session."""

    def __init__(self, directory: Path, session: str) -> None:
        """Raises RejectedError unless ``directory`` is an absolute path of a directory that only its owner can write."""
        if not directory.is_absolute() or not directory.is_dir():
            raise RejectedError(
                f"exchange directory {directory}: expected an absolute path of a directory on the engine's node; "
                "driver and engine must share a file system"
            )
        if directory.stat().st_mode & 0o022:
            raise RejectedError(f"exchange directory {directory}: others can write to it; expected mode 0700")
        self.directory = directory
        self.session = session

    # --- the driver's side ---------------------------------------------------------------------------------------

    def put(self, number: int, data: bytes | memoryview | Path) -> None:
        """Store an operation's input once for all ranks; a path is linked if it can be, else copied.

        Raises:
            TransportError: the file system refused, for example because it is full.
        """
        target = self._input(number)
        try:
            if isinstance(data, Path):
                self._link(data, target)
            else:
                target.write_bytes(data)
        except OSError as error:
            target.unlink(missing_ok=True)
            raise TransportError(
                f"storing operation {number}'s input under {self.directory}: {error}; pass a directory with more room"
            ) from error

    @staticmethod
    def _link(source: Path, target: Path) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)

    def collect(self, number: int) -> tuple[RankReply, ...]:
        """All ranks' replies to one operation, in rank order.

        Raises:
            AttemptFailedError: a rank did not reply, or replied nonsense.
        """
        found = [
            match for path in self.directory.iterdir() if (match := _REPLY.fullmatch(path.name)) and int(match[1]) == number
        ]
        replies = {int(match[2]): self._read_reply(self.directory / match[0], number) for match in found}
        expected = max((reply.world_size for reply in replies.values()), default=1)
        if set(replies) != set(range(expected)):
            raise AttemptFailedError(
                f"operation {number}: ranks {sorted(replies)} of {expected} replied in {self.directory}; expected all of them. "
                "Every rank must run on this node and see this directory"
            )
        return tuple(replies[rank] for rank in sorted(replies))

    def _read_reply(self, path: Path, number: int) -> RankReply:
        nbytes = path.stat().st_size
        if nbytes > _MAX_REPLY_NBYTES:
            raise AttemptFailedError(f"{path}: reply of {nbytes} bytes; expected at most {_MAX_REPLY_NBYTES}")
        try:
            reply = msgspec.msgpack.decode(path.read_bytes(), type=RankReply)
        except msgspec.DecodeError as error:
            raise AttemptFailedError(f"{path}: not a reply: {error}") from error
        if (reply.session, reply.number) != (self.session, number):
            raise AttemptFailedError(
                f"{path}: answers operation {reply.number} of {reply.session}; expected {number} of {self.session}"
            )
        return reply

    def clear(self, number: int) -> None:
        """Forget an operation's files."""
        self._input(number).unlink(missing_ok=True)
        for path in self.directory.glob(f"reply-{number}-*"):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete the directory and everything in it."""
        shutil.rmtree(self.directory, ignore_errors=True)

    # --- the rank's side -----------------------------------------------------------------------------------------

    def get(self, number: int) -> memoryview:
        """An operation's input, mapped read-only: all ranks of a node share one copy.

        Raises:
            RejectedError: there is no such input.
        """
        path = self._input(number)
        try:
            with path.open("rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    return memoryview(b"")
                return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        except OSError as error:
            raise RejectedError(f"operation {number}: no input in {self.directory}: {error}") from error

    def reply(self, number: int, rank: int, world_size: int, result: Any, failure: Failure | None = None) -> None:
        """Write this rank's answer, complete or not at all."""
        body = RankReply(self.session, number, rank, world_size, failure, msgspec.Raw(msgspec.msgpack.encode(result)))
        path = self.directory / f"reply-{number}-{rank}of{world_size}.msgpack"
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.msgpack.encode(body))
        partial.replace(path)

    def _input(self, number: int) -> Path:
        return self.directory / f"input-{number}"
