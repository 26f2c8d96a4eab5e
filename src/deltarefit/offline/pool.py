"""Work on all cores within a memory budget: threads, because the kernels, zstd and file reads release the GIL."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from deltarefit.errors import RejectedError
from deltarefit.offline.grid import UNIT_NBYTES

__all__ = ["MIN_MEMORY_NBYTES", "SILENT", "Meter", "Settings", "Workers", "scratch"]

InputT = TypeVar("InputT")
ResultT = TypeVar("ResultT")

UNIT_COST = 8
"""Memory for one thread, in units: two buffers of a slice, coded planes, planes joined, their frames, the payload, and one more
waiting to be written. A dense unit needs most of this, a sparse one next to nothing."""
FOLD_COST = 16
"""The same while folding, where positions are held as 8-byte integers."""
MIN_MEMORY_NBYTES = FOLD_COST * UNIT_NBYTES
"""One thread, one unit."""


class Meter(Protocol):
    """Where work says how far it is. Called from one thread."""

    def start(self, stage: str, total: int) -> None:
        """A stage begins, of ``total`` bytes."""

    def advance(self, amount: int) -> None:
        """So many more bytes are done."""


class _Silent:
    def start(self, stage: str, total: int) -> None: ...

    def advance(self, amount: int) -> None: ...


SILENT: Meter = _Silent()


@dataclass(frozen=True, slots=True)
class Settings:
    """How much of the machine one command may use.

    Raises:
        RejectedError: a value is out of range.
    """

    memory_nbytes: int = 2**30
    """Bound on buffers. On top come the interpreter and about 2 KB per tensor."""
    num_threads: int = 0
    """0: one per core that this process may use."""

    def __post_init__(self) -> None:
        if self.memory_nbytes < MIN_MEMORY_NBYTES:
            raise RejectedError(f"memory: {self.memory_nbytes} bytes; expected at least {MIN_MEMORY_NBYTES >> 20}MiB")
        if not 0 <= self.num_threads <= 1024:
            raise RejectedError(f"threads: {self.num_threads}; expected 0 (one per core) to 1024")

    def workers(self, unit_cost: int = UNIT_COST) -> int:
        """How many units may be in flight."""
        wanted = self.num_threads or len(os.sched_getaffinity(0))
        return max(1, min(wanted, self.memory_nbytes // (unit_cost * UNIT_NBYTES)))


class Workers:
    """Threads that take units of work in order and give results in the same order. Use as a context manager."""

    def __init__(self, settings: Settings, unit_cost: int = UNIT_COST) -> None:
        num_threads = settings.workers(unit_cost)
        # A finished unit that waits for an earlier one must not leave its thread idle.
        self._in_flight = 2 * num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="deltarefit")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def map(self, work: Callable[[InputT], ResultT], inputs: Iterable[InputT]) -> Iterator[ResultT]:
        """``work`` of each input, in order. At most two inputs per thread are taken ahead, so memory stays bounded.

        The first exception, in input order, is raised; later inputs are then not begun.
        """
        running: deque[Future[ResultT]] = deque()
        for value in inputs:
            if len(running) == self._in_flight:
                yield running.popleft().result()
            running.append(self._pool.submit(work, value))
        while running:
            yield running.popleft().result()


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[int, NDArray[np.uint8]] = {}


_scratch = _Scratch()


def scratch(number: int, num_words: int, word_dtype: np.dtype[Any]) -> NDArray[Any]:
    """This thread's buffer of that number, as so many uninitialised words; what it held before is overwritten.

    Fresh memory of this size would cost as much in page faults as reading the file does.
    """
    nbytes = num_words * word_dtype.itemsize
    buffer = _scratch.buffers.get(number)
    if buffer is None or buffer.size < nbytes:
        buffer = _scratch.buffers[number] = np.empty(nbytes, np.uint8)
    return buffer[:nbytes].view(word_dtype)
