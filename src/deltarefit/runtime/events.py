"""One event stream: every stage of a refit reports when it ran, for whom and how many bytes it handled.

The report, and later JSON lines and traces, are made from it; nothing else measures time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec

from deltarefit.runtime.clock import Clock

__all__ = ["STAGES", "EventLog", "StageEvent", "union_s"]

_LOG = logging.getLogger(__name__)
STAGES = (
    "prepare", "scan", "encode", "send", "recheck", "fetch", "decode", "apply", "verify", "flush", "commit", "baseline",
    "finish", "stop", "pause",
)  # fmt: skip
"""In the order in which a refit passes through them. ``recheck`` is an owner's proof, while payloads are on their way, that its
candidate has not changed; ``verify`` is a receiver's that it holds it. ``stop`` only occurs after a failure. ``pause`` is the
time during which a receiver's request gate was closed, and overlaps the others."""


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
        self._failure_listeners: list[Callable[[str, str], None]] = []

    def subscribe(self, listener: Callable[[StageEvent], None]) -> None:
        with self._lock:
            self._listeners.append(listener)

    def subscribe_failures(self, listener: Callable[[str, str], None]) -> None:
        """``listener(attempt, reason)`` hears of every attempt that failed here."""
        with self._lock:
            self._failure_listeners.append(listener)

    def failed(self, attempt: str, reason: str) -> None:
        """An attempt failed here; say so in the log, and to those who asked."""
        _LOG.warning("%s: attempt %s failed: %s", self._where, attempt, reason)
        with self._lock:
            listeners = tuple(self._failure_listeners)
        for listener in listeners:
            listener(attempt, reason)

    def add(self, event: StageEvent) -> None:
        with self._lock:
            self._events.append(event)
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener(event)

    @property
    def where(self) -> str:
        """The name of this process in its events."""
        return self._where

    def now_s(self) -> float:
        """The time that an event of this moment would carry."""
        return self._clock.monotonic_s()

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
