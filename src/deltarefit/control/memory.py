"""The control record in the memory of one process: for tests, and the plain twin of the other backends."""

from __future__ import annotations

import threading

from deltarefit.control.store import ABSENT, Tag, check_nbytes

__all__ = ["MemoryRecordStore"]


class MemoryRecordStore:
    """Nothing survives the process."""

    def __init__(self, place: str = "memory") -> None:
        self._place = place
        self._lock = threading.Lock()
        self._data: bytes | None = None
        self._revision = 0

    @property
    def place(self) -> str:
        return self._place

    def read(self) -> tuple[bytes | None, Tag]:
        with self._lock:
            return self._data, self._tag()

    def swap(self, tag: Tag, new: bytes) -> bool:
        check_nbytes(self._place, len(new))
        with self._lock:
            if tag != self._tag():
                return False
            self._data = bytes(new)
            self._revision += 1
            return True

    def _tag(self) -> Tag:
        return ABSENT if self._data is None else Tag(str(self._revision))
