"""What can happen to a transition: each event is what a command came to, or what an operator or another coordinator did."""

from __future__ import annotations

from dataclasses import dataclass, field

from deltarefit.ids import AttemptId, ReceiverId
from deltarefit.protocol.record import CommitOutcome, CommitRecord

__all__ = [
    "AttemptClosed",
    "AttemptFailed",
    "BackedOff",
    "BaselinesUpdated",
    "CachesDropped",
    "CleanedUp",
    "CommandFailed",
    "CommitRecordRead",
    "CommitReplied",
    "Event",
    "Flushed",
    "GateReopened",
    "MarkedObsolete",
    "OperatorAborted",
    "OperatorRetried",
    "PrepareFailed",
    "PrepareRejected",
    "Prepared",
    "Started",
    "Stopped",
    "Superseded",
    "UnfinishedAttempt",
]


@dataclass(frozen=True, slots=True)
class UnfinishedAttempt:
    """What a former coordinator left in the control record."""

    attempt: AttemptId
    target: CommitRecord
    """What the record names if that attempt's commit took effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A refit begins, or a coordinator takes a run over (Algorithm B.2 lines 1 and 2)."""

    base: CommitRecord
    """The record that the transition starts from; on a takeover the unfinished attempt's base."""
    unfinished: UnfinishedAttempt | None = None
    """Set on a takeover."""
    is_admitted: bool = False
    """An earlier attempt of this transition may have written to receivers: start with overwrites."""
    is_dense: bool = False
    """Send every element, in every attempt: the receivers or the baseline are not to be trusted, or the candidate changed."""
    recover_only: bool = False
    """End after the takeover instead of going on with an own attempt: there is no candidate yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Answers ``Prepare``: the record and every required receiver are bound to the attempt. Admits the transition."""

    attempt: AttemptId
    target: CommitRecord
    """(v+1, g); the digest may be empty."""
    required: frozenset[ReceiverId]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRejected:
    """Answers ``Prepare``: a check failed (``RejectedError``)."""

    reason: str
    attempt: AttemptId | None = None
    """Set if the record was already bound to it, so that it must be fenced, stopped and cleaned up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareFailed:
    """Answers ``Prepare``: anything else went wrong."""

    reason: str
    attempt: AttemptId | None = None
    """As in ``PrepareRejected``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """Answers ``RunSchedule``: every expected payload arrived, queues are drained, devices are in step."""

    acknowledged: frozenset[ReceiverId]
    """Receivers whose completion acknowledgement came in."""
    policy_digest: str = ""
    """32 hex digits; the candidate's digest."""
    gate_closed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed:
    """Answers ``RunSchedule``: the attempt failed somewhere."""

    reason: str
    gate_closed: bool = True
    """Whether the request gate of any receiver was closed, which comes before any write. If in doubt, True."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReplied:
    """Answers ``Commit``."""

    outcome: CommitOutcome
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecordRead:
    """Answers ``ReadCommit``: the record, at a time when no commit of the attempt can change it any more."""

    record: CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedObsolete:
    """Answers ``MarkObsolete``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """Answers ``StopAndWait``: no write of the attempt can happen any more, at any endpoint."""

    survivors: frozenset[ReceiverId] = frozenset()
    retired: frozenset[ReceiverId] = frozenset()
    """Endpoints that are proven unable to resume; not required in the next attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanedUp:
    """Answers ``Cleanup``. What could not be deleted is named and left to the next sweep; it never stops a transition."""

    leftover: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselinesUpdated:
    """Answers ``UpdateBaselines``: every owner reported that its baseline is the one that the record names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachesDropped:
    """Answers ``DropCaches``."""

    retired: frozenset[ReceiverId] = frozenset()
    """Receivers that did not answer; their gates stay closed and they have to rejoin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReopened:
    """Answers ``ReopenGate``."""

    retired: frozenset[ReceiverId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptClosed:
    """Answers ``CloseAttempt`` and ``RecordAbort``: the record holds no attempt any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackedOff:
    """Answers ``Backoff``: time to try again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFailed:
    """Answers any command: control plane out of reach, an endpoint that neither answers nor is proven dead, an owner that lost
    its state. Leads to the operator where the machine cannot go on by itself."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded:
    """Answers any command: the control plane raised a conflict, another coordinator owns the run (line 25)."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorAborted:
    """An operator asked to end the transition. May come at any time; takes effect where it is safe."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRetried:
    """An operator says that the cause is mended: take up where the machine stopped, with the retry count at zero."""

    note: str = field(default="")


Event = (
    Started
    | Prepared
    | PrepareRejected
    | PrepareFailed
    | Flushed
    | AttemptFailed
    | CommitReplied
    | CommitRecordRead
    | MarkedObsolete
    | Stopped
    | CleanedUp
    | BaselinesUpdated
    | CachesDropped
    | GateReopened
    | AttemptClosed
    | BackedOff
    | CommandFailed
    | Superseded
    | OperatorAborted
    | OperatorRetried
)
