"""What a refit tells its caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from deltarefit.runtime.events import STAGES, StageEvent, union_s
from deltarefit.runtime.trace_bounds import LowerBounds

__all__ = ["RefitReport", "stage_seconds"]


class RefitReport(msgspec.Struct, frozen=True, kw_only=True):
    """One committed refit. ``msgspec.to_builtins(report)`` gives plain dictionaries."""

    policy_version: int
    """The version that is now committed everywhere."""
    attempts: int
    """1 if nothing went wrong; each failed attempt adds one and its cause to ``failures``."""
    changed_elements: int
    """Source elements whose stored bits changed, counted once whatever their replication."""
    total_elements: int
    nan_elements: int
    """Elements of the committed policy that are NaN, changed or not, as far as owners compare them. They travel bit by bit like
    all others; more than 0 usually means that training has gone wrong."""
    payloads: int
    payload_nbytes: int
    """Bytes of the payloads of the attempt that was committed."""
    sent_nbytes: int
    """The same over all attempts, failed ones included."""
    checkpoint_nbytes: int
    """Bytes that a full reload would have carried."""
    stage_s: Mapping[str, float]
    """Per stage, the longest union of its intervals in any one process. Stages of different processes overlap."""
    refit_s: float
    """From the start of construction to the last owner's baseline update (paper C), on the coordinator's clock."""
    policy_digest: str
    """Position-keyed digest of the whole policy that the source computed; 32 hex digits."""
    audited: bool
    """Whether every receiver proved that digest from the bits it holds, in this refit."""
    receivers: tuple[str, ...]
    covered: str
    """What the audit covered on the receivers, in words, by receiver where they differ: state outside parameters and buffers is
    never covered."""
    failures: tuple[str, ...] = ()
    bounds: LowerBounds | None = None
    """What construction, transport and application would have taken alone; ``bounds.binding`` names the longest."""
    pause_s: float = 0.0
    """How long the slowest receiver's request gate was closed."""
    transport: str = "object_store"
    """How the committed attempt's payloads travelled: ``object_store`` or ``relay``."""
    delivery: str = "synchronous"
    """``synchronous``: applied while payloads arrived; ``asynchronous``: staged first, while engines served."""
    cross_nbytes: int = 0
    """Payload bytes that went to or were fetched by the rollout side, over all attempts: what crossed between the clusters."""

    @property
    def changed_fraction(self) -> float:
        return self.changed_elements / self.total_elements if self.total_elements else 0.0

    @property
    def bottleneck(self) -> str:
        """The stage that took longest, or '' if none was timed."""
        return max(self.stage_s, key=lambda stage: self.stage_s[stage], default="")

    @property
    def reduction(self) -> float:
        """How many times smaller the payloads are than a full checkpoint; infinite if nothing was sent."""
        return self.checkpoint_nbytes / self.payload_nbytes if self.payload_nbytes else float("inf")


def stage_seconds(events: Iterable[StageEvent]) -> dict[str, float]:
    """Per stage, the longest union of intervals in any one process."""
    intervals: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for event in events:
        intervals.setdefault(event.stage, {}).setdefault(event.where, []).append((event.t0_s, event.t1_s))
    known = [stage for stage in STAGES if stage in intervals] + sorted(set(intervals) - set(STAGES))
    return {stage: max(union_s(spans) for spans in intervals[stage].values()) for stage in known}
