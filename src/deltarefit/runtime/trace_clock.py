"""One time axis for events of several processes: how far their monotonic clocks are apart, from requests and their answers.

Nothing is ever decided by it; it only places intervals in traces and reports. Wall clocks are not used: they may be off by
an hour. Every exchange bounds the difference from both sides, because a request arrives after it was asked and an answer after
it was sent. All exchanges of a transition together bound it more tightly than any one of them, and the middle of what remains
is taken. Processes of one boot of one machine share a monotonic clock, so between them the difference is zero.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from deltarefit.runtime.events import StageEvent

__all__ = ["ClockReading", "ClockShift", "TimeAxis", "boot_id", "on_axis"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Names this boot of this machine; empty where the system does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


class ClockReading(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Goes with an answer."""

    received_s: float
    """When the request was seen, on the monotonic clock of the process that answers."""
    sent_s: float
    """When the answer was sent, on the same clock."""
    boot: str = ""


class ClockShift(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one process's clock against the axis: subtract ``shift_s`` from its times."""

    shift_s: float
    error_s: float
    """The true shift is within so much of ``shift_s``; infinite if nothing was ever exchanged."""


class TimeAxis:
    """Collects exchanges with other processes; the axis is this process's monotonic clock. Safe from any thread."""

    def __init__(self, boot: str = "") -> None:
        """``boot``: what ``boot_id`` says here."""
        self._boot = boot
        self._lock = threading.Lock()
        self._bounds: dict[str, tuple[float, float]] = {}
        self._shared: set[str] = set()

    def observe(self, where: str, *, asked_s: float, reading: ClockReading, answered_s: float) -> None:
        """A request to ``where`` was posted at ``asked_s`` and its answer seen at ``answered_s``, on this process's clock."""
        low_s, high_s = reading.sent_s - answered_s, reading.received_s - asked_s
        with self._lock:
            before = self._bounds.get(where, (-math.inf, math.inf))
            both = max(low_s, before[0]), min(high_s, before[1])
            # Bounds that exclude each other mean that the clock is another one now: the process was started anew elsewhere.
            self._bounds[where] = both if both[0] <= both[1] else (low_s, high_s)
            if self._boot and reading.boot == self._boot:
                self._shared.add(where)
            else:
                self._shared.discard(where)

    def shift(self, where: str) -> ClockShift:
        """How far that process's clock is ahead of the axis; zero, with infinite error, if nothing was exchanged with it."""
        with self._lock:
            low_s, high_s = self._bounds.get(where, (-math.inf, math.inf))
            is_shared = where in self._shared
        if is_shared and low_s <= 0.0 <= high_s:
            return ClockShift(0.0, 0.0)
        if math.isinf(low_s) or math.isinf(high_s):
            return ClockShift(0.0, math.inf)
        return ClockShift((low_s + high_s) / 2, (high_s - low_s) / 2)

    def shifts(self) -> dict[str, ClockShift]:
        """Of every process that something was exchanged with, by name."""
        with self._lock:
            names = sorted(self._bounds)
        return {name: self.shift(name) for name in names}

    def forget(self) -> None:
        """Clocks drift by some 50 us per second against each other, so old bounds do not hold for long."""
        with self._lock:
            self._bounds = {}
            self._shared = set()


def on_axis(events: Iterable[StageEvent], shifts: Mapping[str, ClockShift]) -> list[StageEvent]:
    """The events with their times on the axis, in order of their start. Processes without a shift are on it already."""
    none = ClockShift(0.0, 0.0)
    moved = []
    for event in events:
        shift_s = shifts.get(event.where, none).shift_s
        moved.append(msgspec.structs.replace(event, t0_s=event.t0_s - shift_s, t1_s=event.t1_s - shift_s))
    return sorted(moved, key=lambda event: (event.t0_s, event.t1_s, event.where, event.stage))
