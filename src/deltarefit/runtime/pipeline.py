"""A stage of an owner's pipeline: work on a thread of its own, behind a queue that is bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Self, TypeVar

from deltarefit.errors import RejectedError

__all__ = ["Pipeline"]

JobT = TypeVar("JobT")


class Pipeline(Generic[JobT]):
    """Runs jobs on one background thread, in order of submission, at most ``depth`` of them waiting."""

    def __init__(self, work: Callable[[JobT], None], depth: int) -> None:
        if depth < 1:
            raise RejectedError(f"pipeline depth {depth}: expected at least 1")
        self._work = work
        self._depth = depth
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deltarefit-send")
        self._running: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, job: JobT) -> None:
        """Start a job, after waiting for room; raises what an earlier one raised."""
        if len(self._running) >= self._depth:
            self._running.popleft().result()
        self._running.append(self._pool.submit(self._work, job))

    def finish(self) -> None:
        """Wait for all jobs; raises what one of them raised."""
        while self._running:
            self._running.popleft().result()
