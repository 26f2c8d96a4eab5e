"""The engines' side of a relay: payloads appear as files in the node's directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Self

from deltarefit.errors import PayloadInvalidError, PayloadMissingError, RejectedError, TransportError
from deltarefit.ids import AttemptId, PayloadId
from deltarefit.transport import keys
from deltarefit.transport.base import MAX_PAYLOAD_NBYTES, Clock, check_payload, check_size
from deltarefit.transport.relay.shelf import payload_path, readers_directory, taken_path, wanted_path

__all__ = ["RelaySource"]

_FIRST_POLL_S = 0.001
_MAX_POLL_S = 0.02


class RelaySource:
    """A ``PayloadSource`` that waits for the node's relay to bring a payload. A context manager.

    While it is open the relay keeps each payload until this engine has fetched it, if there is room; after that a payload may
    be gone, so a second fetch may find it missing.
    """

    def __init__(
        self, directory: Path, reader: str, *, clock: Clock, wait_s: float = 60.0, max_nbytes: int = MAX_PAYLOAD_NBYTES
    ) -> None:
        """Read from a relay's ``directory`` as engine ``reader``, waiting at most ``wait_s`` for each payload.

        Payloads of more than ``max_nbytes`` are refused with RejectedError before anything of them is read.

        Raises:
            RejectedError: another engine of that name is at work, or the directory cannot be used.
        """
        self._directory = directory
        self._reader = reader
        self._clock = clock
        self._wait_s = wait_s
        self._max_nbytes = max_nbytes
        folder = readers_directory(directory)
        path = folder / Path(keys.member(reader)).name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise RejectedError(f"relay directory {directory}: {error}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise RejectedError(f"relay directory {directory}: an engine named {reader} reads there already") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the relay forget this engine. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def fetch(self, payload_id: PayloadId, *, nbytes: int, digest: str) -> bytes:
        """See ``PayloadSource``; waits for a payload that has not arrived yet."""
        path = payload_path(self._directory, payload_id)
        data = self._read(path, payload_id, nbytes)
        if data is None:
            data = self._wait(path, payload_id, nbytes)
        check_payload(payload_id, data, nbytes=nbytes, digest=digest)
        with contextlib.suppress(OSError):
            taken_path(path, self._reader).touch(0o600)
        return data

    def arrived(self, payload_id: PayloadId, *, is_wanted: bool = False) -> int | None:
        """Its length if the relay has brought it whole, else None.

        One that ``is_wanted`` is taken in by the relay even if its shelf is full, from now until it was taken.
        """
        path = payload_path(self._directory, payload_id)
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_size
        if is_wanted:
            with contextlib.suppress(OSError):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                wanted_path(path).touch(0o600)
        return None

    def received_nbytes(self, attempt: AttemptId) -> int:
        """Of the attempt's payloads that lie here now, whole or not: whoever watches this sees whether anything moves."""
        folder = self._directory / Path(keys.payload_prefix(attempt)).relative_to(keys.ATTEMPTS)
        total = 0
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    total += entry.stat().st_size
        return total

    def take(self, payload_id: PayloadId, *, nbytes: int) -> bytes:
        """The bytes of a payload that arrived, for receivers that learn its digest only later; else as ``fetch``.

        Raises:
            PayloadMissingError: it is not here, or not any more.
        """
        path = payload_path(self._directory, payload_id)
        data = self._read(path, payload_id, nbytes)
        if data is None:
            raise PayloadMissingError(f"{payload_id}: it is not at this node's relay any more")
        with contextlib.suppress(OSError):
            taken_path(path, self._reader).touch(0o600)
            wanted_path(path).unlink(missing_ok=True)
        return data

    def _wait(self, path: Path, payload_id: PayloadId, nbytes: int) -> bytes:
        wanted = wanted_path(path)
        end_s = self._clock.monotonic_s() + self._wait_s
        poll_s = _FIRST_POLL_S
        try:
            while (data := self._read(path, payload_id, nbytes)) is None:
                if self._clock.monotonic_s() >= end_s:
                    raise PayloadMissingError(f"{payload_id}: it did not arrive at this node's relay within {self._wait_s:g} s")
                with contextlib.suppress(OSError):
                    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    wanted.touch(0o600)
                self._clock.sleep(poll_s)
                poll_s = min(2 * poll_s, _MAX_POLL_S)
            return data
        finally:
            with contextlib.suppress(OSError):
                wanted.unlink(missing_ok=True)
                for folder in (path.parent, path.parent.parent):
                    folder.rmdir()  # only if nothing else is there

    def _read(self, path: Path, payload_id: PayloadId, nbytes: int) -> bytes | None:
        check_size(payload_id, nbytes, self._max_nbytes)
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno()).st_size
                if found != nbytes:
                    raise PayloadInvalidError(f"{payload_id}: expected {nbytes} bytes, the relay brought {found}")
                return file.read(nbytes)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TransportError(f"{payload_id}: {path} cannot be read: {error}") from error
