"""What the simulated nodes ask of each other. The real shell's messages without their encoding."""

from __future__ import annotations

from dataclasses import dataclass

from deltarefit.canonical import TensorDigest
from deltarefit.ids import AttemptId, BaselineId, EncodingMode
from deltarefit.plan import RefitPlan
from deltarefit.protocol import CommitRecord, EndMarker, PrepareAttempt

__all__ = [
    "Beat", "Build", "CommitBaseline", "ConfirmArrival", "Deliver", "Digests", "DropCaches", "Ended", "Flush", "OpenApply",
    "OwnerEnded", "Prepare", "ReadBeats", "ReadRecord", "Rebase", "Release", "ReopenGate", "Stop", "StopSending", "Survey",
    "SwapRecord", "ToReceiver",
]  # fmt: skip


# --- to the store -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """Answers: (bytes or None, tag)."""


@dataclass(frozen=True, slots=True)
class SwapRecord:
    """Answers: whether the record was the one of ``tag`` and now is ``data``."""

    tag: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life with what its sender shows."""

    name: str
    text: str
    shown: object = None


@dataclass(frozen=True, slots=True)
class ReadBeats:
    """Answers: name -> (text, shown)."""


# --- to receivers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Survey:
    """Answers: digests of what is held."""


@dataclass(frozen=True, slots=True)
class Prepare:
    request: PrepareAttempt
    plan: RefitPlan


@dataclass(frozen=True, slots=True)
class OpenApply:
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class ConfirmArrival:
    """Asynchronous delivery: answers once everything that was sent is staged."""

    attempt: AttemptId
    markers: tuple[EndMarker, ...]


@dataclass(frozen=True, slots=True)
class Flush:
    """Answers: digests of what is held, once everything is applied."""

    attempt: AttemptId
    markers: tuple[EndMarker, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class DropCaches:
    attempt: AttemptId
    record: CommitRecord


@dataclass(frozen=True, slots=True)
class ReopenGate:
    attempt: AttemptId
    record: CommitRecord


@dataclass(frozen=True, slots=True)
class ToReceiver:
    """A coordinator's call to one incarnation of a receiver."""

    epoch: int
    incarnation: str
    body: Survey | Prepare | ConfirmArrival | OpenApply | Flush | Stop | DropCaches | ReopenGate


@dataclass(frozen=True, slots=True)
class Deliver:
    """A payload, from its owner."""

    attempt: AttemptId
    data: bytes


@dataclass(frozen=True, slots=True)
class OwnerEnded:
    marker: EndMarker


# --- to owners ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Build:
    """Answers: ``Ended``, once every payload is sent."""

    attempt: AttemptId
    revision: int
    base: CommitRecord
    target: CommitRecord
    candidate: str
    mode: EncodingMode
    plan: RefitPlan
    starts_transition: bool
    receivers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    marker: EndMarker
    digests: dict[str, TensorDigest]


@dataclass(frozen=True, slots=True)
class StopSending:
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class Release:
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class CommitBaseline:
    """Answers: digests of the committed baseline."""

    record: CommitRecord


@dataclass(frozen=True, slots=True)
class Digests:
    """Answers: digests of the committed baseline."""


@dataclass(frozen=True, slots=True)
class Rebase:
    """The baseline that was copied at the start goes by this name; answers its digests."""

    baseline: BaselineId
