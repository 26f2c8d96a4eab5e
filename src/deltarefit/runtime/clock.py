"""The only module that touches the real clock and real randomness. Everything else takes a ``Clock`` and an ``IdSource``."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Protocol

__all__ = ["Clock", "Deadline", "IdSource", "ManualClock", "Pace", "RandomIds", "SystemClock"]


class Clock(Protocol):
    """Time as the library sees it."""

    def monotonic_s(self) -> float:
        """Seconds on an axis that never jumps; only differences mean anything."""

    def wall_s(self) -> float:
        """Seconds since 1970; for logs and traces only, never for decisions."""

    def sleep(self, seconds: float) -> None:
        """Let at least this long pass."""


class IdSource(Protocol):
    """Fresh names."""

    def nonce(self) -> str:
        """Eight lower-case hex digits that nobody has used before, for all practical purposes."""


class SystemClock:
    """The machine's own clock."""

    def monotonic_s(self) -> float:
        return time.monotonic()  # noqa: TID251

    def wall_s(self) -> float:
        return time.time()  # noqa: TID251

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: TID251


class RandomIds:
    """Nonces from the operating system."""

    def nonce(self) -> str:
        return secrets.token_hex(4)


class ManualClock:
    """A clock that only moves when it is told to, or when somebody sleeps on it. For tests and simulations."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._lock = threading.Lock()

    def monotonic_s(self) -> float:
        with self._lock:
            return self._now_s

    def wall_s(self) -> float:
        return self.monotonic_s()

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now_s += max(0.0, seconds)


class Deadline:
    """A point in time that bounds one wait, on one process's monotonic clock."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._end_s = clock.monotonic_s() + timeout_s

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end_s - self._clock.monotonic_s())

    @property
    def expired(self) -> bool:
        return self.remaining_s() <= 0.0


class Pace:
    """How often to look at something that changes now and then: soon after a change, ever more rarely without one."""

    def __init__(self, clock: Clock, *, first_s: float, most_s: float) -> None:
        self._clock = clock
        self._first_s = first_s
        self._most_s = most_s
        self._pause_s = first_s
        self._due_s = clock.monotonic_s()

    @property
    def is_due(self) -> bool:
        """Whether it is time to look. Saying yes doubles the pause until the next yes."""
        now_s = self._clock.monotonic_s()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._most_s)
        return True

    @property
    def remaining_s(self) -> float:
        """Seconds until it is time to look, never negative."""
        return max(0.0, self._due_s - self._clock.monotonic_s())

    def skip(self) -> None:
        """What is to be looked at was just seen: the first look is due after a pause."""
        self._due_s = self._clock.monotonic_s() + self._pause_s

    def reset(self) -> None:
        """Something changed: look again soon."""
        self._pause_s = self._first_s
        self._due_s = min(self._due_s, self._clock.monotonic_s() + self._first_s)
