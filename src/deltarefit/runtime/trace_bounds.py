"""Lower bounds of a refit's latency: what construction, transport and application would take if nothing else were in the way.

Paper App. C and Fig. C.5: a bound is the longest union of intervals in any one process, so overlap counts once and gaps not at
all. Construction is comparing and encoding at an owner. Transport is, per endpoint, the time from submitting a payload until it
is taken: an owner's upload or way to its relay, and a receiver's download where receivers download. Application is decoding and
applying at a receiver. The window runs from the first owner's first comparison to the last owner's new baseline; everything is
cut to it, so no bound exceeds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from deltarefit.runtime.events import StageEvent, union_s

__all__ = ["BOUNDS", "Bound", "LowerBounds", "lower_bounds"]

BOUNDS: Mapping[str, tuple[str, ...]] = {
    "construction": ("scan", "encode"),
    "transport": ("send", "fetch"),
    "apply": ("decode", "apply"),
}
"""Which stages each bound covers."""


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One lower bound."""

    seconds: float = 0.0
    where: str = ""
    """The process that it was found in; empty if no such stage ran."""


class LowerBounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of one refit."""

    window_s: float
    """From the start of construction to the last new baseline (t1 - t0)."""
    construction: Bound
    transport: Bound
    apply: Bound
    check_s: float
    """Within the window, time that the slowest receiver spent proving digests; the paper does not count such checks."""
    finalization_s: float
    """From the end of the last application to t1, without the check: devices in step, acknowledgment, commit, new baseline."""

    @property
    def binding(self) -> str:
        """The name of the largest bound: what a faster refit needs more of. Empty if nothing was timed."""
        bounds = {
            "construction": self.construction.seconds,
            "transport": self.transport.seconds,
            "apply": self.apply.seconds,
        }
        largest = max(bounds, key=lambda name: bounds[name])
        return largest if bounds[largest] > 0 else ""

    @property
    def latency_s(self) -> float:
        """The refit's latency as the paper counts it: the window without checks."""
        return self.window_s - self.check_s

    @property
    def unexplained_s(self) -> float:
        """Latency beyond the largest bound and finalization: start, drain and handing over between stages."""
        largest_s = max(self.construction.seconds, self.transport.seconds, self.apply.seconds)
        return max(0.0, self.latency_s - largest_s - self.finalization_s)


def lower_bounds(events: Iterable[StageEvent]) -> LowerBounds:
    """The bounds of one refit; all events on one time axis. Without any comparison or new baseline everything is 0."""
    listed = list(events)
    window = _window(listed)
    inside = [event for event in listed if event.t1_s > window[0] and event.t0_s < window[1]]
    checks = _longest(inside, ("verify",), window)
    applied_s = max((event.t1_s for event in inside if event.stage in BOUNDS["apply"]), default=window[0])
    sent_s = max((event.t1_s for event in inside if event.stage in BOUNDS["transport"]), default=window[0])
    built_s = max((event.t1_s for event in inside if event.stage in BOUNDS["construction"]), default=window[0])
    end_s = min(max(applied_s, sent_s, built_s), window[1])
    return LowerBounds(
        window_s=window[1] - window[0],
        construction=_longest(inside, BOUNDS["construction"], window),
        transport=_longest(inside, BOUNDS["transport"], window),
        apply=_longest(inside, BOUNDS["apply"], window),
        check_s=checks.seconds,
        finalization_s=max(0.0, window[1] - end_s - checks.seconds),
    )


def _window(events: Sequence[StageEvent]) -> tuple[float, float]:
    """From the first comparison to the last new baseline; empty if either is missing."""
    starts = [event.t0_s for event in events if event.stage == "scan"]
    ends = [event.t1_s for event in events if event.stage == "baseline"]
    if not starts or not ends:
        return 0.0, 0.0
    return min(starts), max(min(starts), *ends)


def _longest(events: Iterable[StageEvent], stages: tuple[str, ...], window: tuple[float, float]) -> Bound:
    intervals: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.stage in stages:
            clipped = max(event.t0_s, window[0]), min(event.t1_s, window[1])
            intervals.setdefault(event.where, []).append(clipped)
    unions = [Bound(union_s(spans), where) for where, spans in sorted(intervals.items())]
    return max(unions, key=lambda bound: bound.seconds, default=Bound())
