"""A relay's payloads, as files that the engines of its node read, and the rule of who gets in.

Payloads lie in a directory, usually on ``/dev/shm``, laid out as the run's store is. A payload is offered, waits, is admitted
when there is room, grows, and becomes a whole file under its own name. What was admitted is always taken, so a connection is
never stopped in the middle: slowing down means to admit later. Room is made by payloads that are whole at every relay below
and that every engine here has taken. One payload that an engine waits for is admitted beyond the limit: else later payloads
of fast owners could fill all the room and stop the one that must be applied first (paper B.1).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from deltarefit.errors import TransportError
from deltarefit.ids import AttemptId, PayloadId
from deltarefit.transport import keys
from deltarefit.transport.relay.link import StreamKey

__all__ = ["Held", "Shelf", "payload_path", "readers_directory", "taken_path", "wanted_path"]

_LOG = logging.getLogger(__name__)


def payload_path(directory: Path, payload_id: PayloadId) -> Path:
    """Where a whole payload lies."""
    return directory / Path(keys.payload(payload_id)).relative_to(keys.ATTEMPTS)


def wanted_path(path: Path) -> Path:
    """Exists while an engine waits for that payload."""
    return path.with_name(path.name + ".wanted")


def taken_path(path: Path, reader: str) -> Path:
    """Exists once that engine has read the payload."""
    return path.with_name(f"{path.name}.taken-{reader}")


def readers_directory(directory: Path) -> Path:
    """Holds one file per engine, which the engine keeps locked while it lives."""
    return directory / "readers"


class _Descriptor:
    """Closes its file when nobody refers to it any more: a number closed earlier could be reused under a reader's hands."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.number)


class Held:
    """One payload on the shelf; a ``PayloadBuffer`` once it is admitted."""

    def __init__(self, directory: Path, payload_id: PayloadId, nbytes: int) -> None:
        self.payload_id = payload_id
        self.path = payload_path(directory, payload_id)
        self.whole = False
        self.delivered = False
        """Whole here and at every relay below."""
        self._nbytes = nbytes
        self._received = 0
        self._descriptor: _Descriptor | None = None
        self._writing = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def received(self) -> int:
        return self._received

    @property
    def admitted(self) -> bool:
        return self._descriptor is not None

    @property
    def stream(self) -> StreamKey:
        return self.payload_id.attempt, int(self.payload_id.owner)

    def admit(self) -> None:
        """Open the file; go on with what an earlier life of this relay left. Raises ``OSError``."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size == self._nbytes:
            self._descriptor, self._received, self.whole = _Descriptor(self.path), self._nbytes, True
            return
        descriptor = _Descriptor(self._half)
        left = os.fstat(descriptor.number).st_size  # bytes are only ever appended, so all up to here are good
        if left > self._nbytes:
            os.ftruncate(descriptor.number, 0)
            left = 0
        self._descriptor, self._received = descriptor, left

    def write(self, byte_offset: int, data: memoryview) -> None:
        """Append; bytes that are here already are skipped.

        Raises:
            TransportError: there is a gap, or they go beyond the end.
            OSError: no room on the device, or the like.
        """
        with self._writing:
            descriptor = self._descriptor
            if descriptor is None or byte_offset > self._received or byte_offset + len(data) > self._nbytes:
                raise TransportError(
                    f"{self.payload_id}: got bytes {byte_offset} to {byte_offset + len(data)}, "
                    f"expected them from byte {self._received} on, within {self._nbytes}"
                )
            rest = data[self._received - byte_offset :]
            position = self._received
            while rest:
                written = os.pwrite(descriptor.number, rest, position)
                rest, position = rest[written:], position + written
            self._received = max(self._received, position)

    def finish(self) -> bool:
        """Give the file its own name once all bytes are here; returns whether that happened now. Raises ``OSError``."""
        with self._writing:
            if self.whole or self._descriptor is None or self._received != self._nbytes:
                return False
            self._half.replace(self.path)
            self.whole = True
            return True

    def read_into(self, byte_offset: int, view: memoryview) -> None:
        """See ``PayloadBuffer``."""
        descriptor = self._descriptor
        if descriptor is None:
            raise OSError("it is not on the shelf")
        while view:
            got = os.preadv(descriptor.number, [view], byte_offset)
            if got == 0:
                raise OSError("its file is shorter than it was")
            view, byte_offset = view[got:], byte_offset + got

    def close(self) -> None:
        """Let go of the file, so that its room is free once it is removed."""
        self._descriptor = None

    @property
    def _half(self) -> Path:
        return self.path.with_name(self.path.name + ".part")


class Shelf:
    """All payloads of one relay. Called with the relay's lock held, except ``Held.write`` and ``Held.read_into``."""

    def __init__(self, directory: Path, max_nbytes: int) -> None:
        self.directory = directory
        self.max_nbytes = max_nbytes
        self._held: dict[PayloadId, Held] = {}
        self._waiting: dict[PayloadId, Held] = {}
        self._had: dict[PayloadId, int] = {}

    @property
    def nbytes(self) -> int:
        """Of everything admitted, whole or not."""
        return sum(held.nbytes for held in self._held.values() if held.admitted)

    @property
    def is_waiting(self) -> bool:
        """Whether an offer waits for room."""
        return bool(self._waiting)

    def get(self, payload_id: PayloadId) -> Held | None:
        """What is held of a payload, admitted or waiting."""
        return self._held.get(payload_id)

    def had(self, payload_id: PayloadId, nbytes: int) -> bool:
        """Whether a payload of that length was delivered, taken by every engine, and removed to make room."""
        return self._had.get(payload_id) == nbytes

    def of(self, stream: StreamKey) -> Iterator[Held]:
        """Everything admitted of a stream, in order."""
        yield from (
            self._held[key] for key in sorted(self._held) if self._held[key].stream == stream and self._held[key].admitted
        )

    def offer(self, payload_id: PayloadId, nbytes: int) -> Held:
        """Let a payload wait for room."""
        held = self._held[payload_id] = self._waiting[payload_id] = Held(self.directory, payload_id, nbytes)
        return held

    def admit(self) -> Iterator[Held]:
        """Give room to waiting payloads, in the declared order, and yield those admitted. An ``OSError`` leaves one waiting."""
        for held in sorted(self._waiting.values(), key=lambda each: each.payload_id):
            if not self._make_room(held.nbytes) and not wanted_path(held.path).exists():
                continue
            held.admit()
            del self._waiting[held.payload_id]
            yield held

    def remove(self, which: Callable[[Held], bool]) -> list[Held]:
        """Take payloads off the shelf and free what is theirs."""
        removed = [held for held in self._held.values() if which(held)]
        for held in removed:
            self._discard(held)
        return removed

    def attempts(self) -> frozenset[AttemptId]:
        """Of which anything lies here, also from an earlier life of this relay."""
        return frozenset(
            AttemptId(path.name)
            for path in self.directory.iterdir()
            if path.is_dir() and path != readers_directory(self.directory)
        )

    def remove_attempt(self, attempt: AttemptId) -> None:
        """Leave nothing of that attempt, markers of engines included."""
        self.remove(lambda held: held.payload_id.attempt == attempt)
        self._had = {key: nbytes for key, nbytes in self._had.items() if key.attempt != attempt}
        shutil.rmtree(self.directory / Path(keys.attempt_prefix(attempt)).relative_to(keys.ATTEMPTS), ignore_errors=True)

    def _discard(self, held: Held) -> None:
        self._held.pop(held.payload_id, None)
        self._waiting.pop(held.payload_id, None)
        held.close()
        for path in (held.path, held.path.with_name(held.path.name + ".part")):
            path.unlink(missing_ok=True)

    def _make_room(self, nbytes: int) -> bool:
        used = self.nbytes
        if used == 0 or used + nbytes <= self.max_nbytes:
            return True
        readers = self._readers()
        done = [held for held in self._held.values() if held.whole and held.delivered]
        for held in sorted(done, key=lambda each: each.payload_id):
            if readers and all(taken_path(held.path, reader).exists() for reader in readers):
                self._discard(held)
                self._had[held.payload_id] = held.nbytes
                used -= held.nbytes
                if used == 0 or used + nbytes <= self.max_nbytes:
                    return True
        return False

    def _readers(self) -> list[str]:
        """Engines that live; the kernel dropped the locks of those that died."""
        alive: list[str] = []
        folder = readers_directory(self.directory)
        for path in folder.iterdir() if folder.exists() else ():
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    _LOG.info("engine %s is gone", path.name)
                except BlockingIOError:
                    alive.append(path.name)
                finally:
                    os.close(descriptor)
        return alive
