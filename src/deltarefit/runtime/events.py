"""One event stream: every stage of a refit reports when it ran, for whom and how many bytes it handled.

The report, and later JSON lines and traces, are made from it; nothing else measures time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec

from deltarefit.runtime.clock import Clock

__all__ = ["STAGES", "EventLog", "StageEvent", "union_s"]

STAGES = ("prepare", "scan", "encode", "send", "fetch", "apply", "verify", "flush", "commit", "baseline", "finish", "stop")
"""In the order in which a refit passes through them. ``stop`` only occurs after a failure."""


class StageEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage ran once, somewhere."""

    stage: str
    where: str
    """``coordinator``, ``owner <n>`` or ``receiver <id>``."""
    attempt: str
    t0_s: float
    """Seconds on the monotonic clock of the process that reports."""
    t1_s: float
    nbytes: int = 0
    payload: str = ""


class EventLog:
    """Collects events of one process; listeners hear each one as it happens. Safe from any thread."""

    def __init__(self, clock: Clock, where: str) -> None:
        self._clock = clock
        self._where = where
        self._lock = threading.Lock()
        self._events: list[StageEvent] = []
        self._listeners: list[Callable[[StageEvent], None]] = []

    def subscribe(self, listener: Callable[[StageEvent], None]) -> None:
        with self._lock:
            self._listeners.append(listener)

    def add(self, event: StageEvent) -> None:
        with self._lock:
            self._events.append(event)
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener(event)

    @contextmanager
    def stage(self, stage: str, attempt: str, *, nbytes: int = 0, payload: str = "") -> Iterator[None]:
        """Record the time spent in the body, also when it raises."""
        t0_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            self.add(StageEvent(stage, self._where, attempt, t0_s, self._clock.monotonic_s(), nbytes, payload))

    def drain(self) -> list[StageEvent]:
        """Hand over and forget what was collected so far."""
        with self._lock:
            events, self._events = self._events, []
        return events


def union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of time intervals (paper C: lower bounds are unions, so overlap counts once)."""
    total_s = 0.0
    end_s = float("-inf")
    for t0_s, t1_s in sorted(intervals):
        if t1_s > end_s:
            total_s += t1_s - max(t0_s, end_s)
            end_s = t1_s
    return total_s
