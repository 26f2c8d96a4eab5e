"""What a transition wants done next. The shell carries a command out and answers with the event named in its docstring.

Any command may also be answered with ``Superseded`` (the control plane raised a conflict). Every command may be carried out
twice: a shell that does not know whether it did one does it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from deltarefit.ids import AttemptId, EncodingMode, ReceiverId
from deltarefit.protocol.record import CommitRecord

__all__ = [
    "AskOperator",
    "Backoff",
    "Cleanup",
    "CloseAttempt",
    "Command",
    "Commit",
    "DropCaches",
    "Finish",
    "MarkObsolete",
    "Prepare",
    "ReadCommit",
    "RecordAbort",
    "ReopenGate",
    "RunSchedule",
    "StopAndWait",
    "TransitionOutcome",
    "UpdateBaselines",
]


class TransitionOutcome(Enum):
    """How a transition ended."""

    COMMITTED = "committed"
    REJECTED = "rejected"
    """Nothing was changed."""
    CONFLICT = "conflict"
    """Another coordinator owns the run, or a former one's commit took effect."""
    ABORTED = "aborted"
    """By an operator. If the request gates were closed they stay so until a dense refit."""
    RECOVERED = "recovered"
    """A takeover that was to recover only is done; the record tells which version is committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Check the set-up with the receivers, bind the record, bind the receivers.

    Answers: ``Prepared``, ``PrepareRejected``, ``PrepareFailed``.
    """

    base: CommitRecord
    mode: EncodingMode
    is_dense: bool
    ordinal: int
    """From 1, over the attempts that this machine saw; part of the attempt's id."""
    excluded: frozenset[ReceiverId]
    """Receivers retired during this transition; they may join again between attempts only after they were restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSchedule:
    """Algorithm B.1, up to and including flush. Answers: ``Flushed``, ``AttemptFailed``."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Answers: ``CommitReplied``."""

    attempt: AttemptId
    target: CommitRecord
    """(v+1, g) with the digest that the flush reported."""
    acknowledged: frozenset[ReceiverId]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCommit:
    """Answers: ``CommitRecordRead``, ``CommandFailed``."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkObsolete:
    """Fence the attempt in the record, then tell the endpoints. Answers: ``MarkedObsolete``, ``CommandFailed``."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAndWait:
    """Answers: ``Stopped``, ``CommandFailed`` (an endpoint is silent and not proven dead)."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleanup:
    """Release payloads and, after a failure, delta records. The baseline stays as it is. Answers: ``CleanedUp``."""

    attempt: AttemptId
    is_committed: bool
    """False: delta records are released too. True: a retention rule may keep the payloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBaselines:
    """Have every owner make its baseline the one that the record names. Answers: ``BaselinesUpdated``, ``CommandFailed``."""

    record: CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCaches:
    """Invalidate KV and prefix caches of every receiver. Answers: ``CachesDropped``."""

    attempt: AttemptId
    record: CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ReopenGate:
    """Answers: ``GateReopened``."""

    attempt: AttemptId
    record: CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseAttempt:
    """Take the attempt out of the record. Answers: ``AttemptClosed``, ``CommandFailed``."""

    attempt: AttemptId
    was_admitted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Wait before the next attempt: longer with each failure, with a cap. Answers: ``BackedOff``."""

    num_failures: int
    """Failures in a row, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordAbort:
    """Note in the record that the transition was aborted. Answers: ``AttemptClosed``, ``CommandFailed``."""

    repair: str
    """Not empty: receivers may hold mixed weights; gates stay closed until a dense refit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskOperator:
    """Retries cannot mend this. Answers, whenever they come: ``OperatorRetried``, ``OperatorAborted``, ``Superseded``."""

    reason: str
    causes: tuple[str, ...]
    """Failures of this transition, first one first."""
    gate_closed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The transition is over; no answer is expected, and every further event is an error."""

    outcome: TransitionOutcome
    record: CommitRecord
    """The committed record as far as this coordinator knows."""
    num_attempts: int
    causes: tuple[str, ...]
    """Failures on the way, first one first; empty if everything went well at once."""


Command = (
    Prepare
    | RunSchedule
    | Commit
    | ReadCommit
    | MarkObsolete
    | StopAndWait
    | Cleanup
    | UpdateBaselines
    | DropCaches
    | ReopenGate
    | CloseAttempt
    | Backoff
    | RecordAbort
    | AskOperator
    | Finish
)
