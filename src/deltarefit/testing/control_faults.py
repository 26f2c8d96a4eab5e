"""Record stores that misbehave as told, and a process that races for a record. For tests of control planes.

``FaultyRecordStore`` wraps any store. Run as a program this module is one racer::

    python -m deltarefit.testing.control_faults count 5 '{"kind": "sqlite", "path": "/tmp/x/control.db"}'

adds one to a counter five times by compare-and-set, and prints each value it stored.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from deltarefit.control import (
    ABSENT,
    EtcdRecordStore,
    ObjectRecordStore,
    RecordStore,
    SqliteRecordStore,
    SwapUncertainError,
    Tag,
)
from deltarefit.errors import RejectedError, TransportError

__all__ = ["FaultyRecordStore", "SwapFault", "add_one", "open_record"]


class SwapFault(Enum):
    """What happens to one swap."""

    LOSE_REQUEST = "the store never hears of it; the caller is told nothing"
    LOSE_REPLY = "it takes effect or not; the caller is told nothing"
    REFUSE = "the store never hears of it and says no, as AWS may under concurrent writes (HTTP 409)"
    REFUSE_AFTER = "it takes effect and the store says no, as happens when a client repeats a request whose reply was lost"
    HOLD = "it is kept back until ``release``, and the caller is told nothing"


class FaultyRecordStore:
    """Wraps a store; each swap takes the next planned fault, if any. Counts how often a fault struck."""

    def __init__(self, inner: RecordStore) -> None:
        self._inner = inner
        self._planned: deque[SwapFault | None] = deque()
        self._held: list[tuple[Tag, bytes]] = []
        self._lock = threading.Lock()
        self._is_cut = False
        self.fired = 0
        """How many faults struck."""
        self.before_swap: Callable[[], object] | None = None
        """Called before each swap reaches the store: a place for another writer to come first."""

    @property
    def place(self) -> str:
        return self._inner.place

    def plan(self, *faults: SwapFault | None) -> None:
        """The next swaps go like this, in turn; None is a swap that works."""
        self._planned.extend(faults)

    def cut(self, is_cut: bool = True) -> None:
        """The store is out of reach altogether, for reads too."""
        self._is_cut = is_cut

    def release(self) -> list[bool]:
        """Let the held swaps arrive now; what the store said to each."""
        held, self._held = self._held, []
        return [self._inner.swap(tag, new) for tag, new in held]

    def read(self) -> tuple[bytes | None, Tag]:
        if self._is_cut:
            raise TransportError(f"{self.place}: cut off")
        return self._inner.read()

    def swap(self, tag: Tag, new: bytes) -> bool:
        if self._is_cut:
            raise SwapUncertainError(f"{self.place}: cut off")
        if self.before_swap is not None:
            self.before_swap()
        with self._lock:
            fault = self._planned.popleft() if self._planned else None
            self.fired += fault is not None
        if fault is None:
            return self._inner.swap(tag, new)
        if fault is SwapFault.REFUSE:
            return False
        if fault is SwapFault.REFUSE_AFTER:
            self._inner.swap(tag, new)
            return False
        if fault is SwapFault.LOSE_REPLY:
            self._inner.swap(tag, new)
        elif fault is SwapFault.HOLD:
            self._held.append((tag, new))
        raise SwapUncertainError(f"{self.place}: no reply ({fault.value})")


def open_record(recipe: dict[str, Any]) -> RecordStore:
    """Open a record from values that travel to another process."""
    if recipe["kind"] == "sqlite":
        return SqliteRecordStore(recipe["path"], busy_timeout_s=30.0)
    if recipe["kind"] == "s3":
        from obstore.store import S3Store

        store = S3Store(recipe["bucket"], config=recipe["options"], client_options={"allow_http": True})
        return ObjectRecordStore(store, recipe["key"])
    if recipe["kind"] == "etcd":
        return EtcdRecordStore(recipe["endpoints"], recipe["key"])
    raise RejectedError(f"record recipe {recipe['kind']!r}: expected sqlite, s3 or etcd")


def add_one(store: RecordStore, pause: Callable[[], object] = lambda: None, max_tries: int = 5000) -> int:
    """Add one to the number that the record holds (0 if it does not exist); the number stored."""
    for _ in range(max_tries):
        data, tag = store.read()
        number = int(data or b"0") + 1
        if store.swap(ABSENT if data is None else tag, b"%d" % number):
            return number
        pause()
    raise TransportError(f"{store.place}: no swap went through in {max_tries} tries")


def main(arguments: list[str]) -> int:
    """``count N RECIPE``: add one N times; prints each number as soon as it is stored."""
    verb, count, recipe = arguments
    if verb != "count":
        raise RejectedError(f"racer: {verb!r}, expected count")
    store = open_record(json.loads(recipe))
    waiting = threading.Event()
    dice = random.Random(recipe + count)
    for _ in range(int(count)):
        number = add_one(store, lambda: waiting.wait(dice.random() * 0.05))
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
