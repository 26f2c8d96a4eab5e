"""An owner's half of the protocol: what its baseline is, what it sent, and when the baseline moves (paper 6.3, B.2)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from deltarefit.errors import AttemptFailedError, OperatorRequiredError, RejectedError
from deltarefit.ids import AttemptId, BaselineId, OwnerId
from deltarefit.protocol.binding import BindingLog
from deltarefit.protocol.delivery import EndMarker, end_digest
from deltarefit.protocol.record import CommitRecord

__all__ = ["BindOwner", "OwnerMachine", "OwnerPhase"]


class OwnerPhase(Enum):
    """Where an owner stands in the attempt at hand."""

    IDLE = "idle"
    SENDING = "sending"
    ENDED = "ended"
    """Everything was sent; the end marker is fixed."""
    OBSOLETE = "obsolete"


@dataclass(frozen=True, slots=True, kw_only=True)
class BindOwner:
    """Binds an owner to an attempt."""

    attempt: AttemptId
    revision: int
    """Revision of the control record that binds the attempt, as in ``PrepareAttempt``."""
    base: CommitRecord
    target: CommitRecord
    candidate: str
    starts_transition: bool = False
    """The candidate may be another than before: the first attempt of a transition, or one that sends every element. The control
    record allowed it."""


class OwnerMachine:
    """One owner. The baseline never leads the record and never lags behind it once the transition has ended.

    The baseline moves only in ``updated``, and only to what the commit record names. The update writes absolute values from the
    fixed candidate, so it may be begun again after a crash of the coordinator in the middle of it. Only the latest attempt can
    be committed once it is bound here, because binding it to the record fenced all earlier ones.
    """

    def __init__(self, owner: OwnerId, baseline: BaselineId | None) -> None:
        """``baseline`` None: the owner has none, or lost it, and must be reinitialised."""
        self._owner = owner
        self._baseline = baseline
        self._bound: BindOwner | None = None
        self._bindings: BindingLog[BindOwner] = BindingLog(f"owner {owner}")
        self._phase = OwnerPhase.IDLE
        self._digests: list[str] = []

    @property
    def phase(self) -> OwnerPhase:
        return self._phase

    @property
    def baseline(self) -> BaselineId | None:
        return self._baseline

    def is_active(self, attempt: AttemptId) -> bool:
        """Whether payloads of ``attempt`` may be built and sent."""
        return self._bound is not None and self._bound.attempt == attempt and self._phase is not OwnerPhase.OBSOLETE

    def prepare(self, request: BindOwner) -> None:
        """Bind to an attempt.

        Raises:
            CommitConflictError: a later attempt was bound here before.
            RejectedError: the owner does not hold the base, or the candidate changed within a transition.
            AttemptFailedError: this very attempt is over.
        """
        if self._bindings.is_repeated(request):
            return
        if self._baseline is None:
            raise RejectedError(f"owner {self._owner}: has no baseline; reinitialise it, and send every element once")
        if self._baseline != request.base.baseline:
            raise RejectedError(
                f"owner {self._owner}: its baseline is {self._baseline}, the attempt starts from {request.base}; "
                "finish the former transition, or reinitialise the baseline"
            )
        before = self._bound
        if before is not None and before.candidate != request.candidate and not request.starts_transition:
            raise RejectedError(
                f"owner {self._owner}: candidate {request.candidate}, but {before.candidate} is fixed until the transition "
                "ends: the optimizer must not step during a refit"
            )
        self._bindings.bind(request)
        self._bound = request
        self._phase = OwnerPhase.SENDING
        self._digests = []

    def sent(self, attempt: AttemptId, payload_digest: str) -> int:
        """Note the next payload; returns its sequence.

        Raises:
            AttemptFailedError: the attempt is over, or this owner has ended it.
        """
        if not self.is_active(attempt) or self._phase is not OwnerPhase.SENDING:
            raise AttemptFailedError(f"owner {self._owner}: {attempt} is {self._phase.value}; nothing more may be sent")
        self._digests.append(payload_digest)
        return len(self._digests) - 1

    def end(self, attempt: AttemptId) -> EndMarker:
        """Everything was sent. Repeating it gives the same marker.

        Raises:
            AttemptFailedError: the attempt is over.
        """
        if not self.is_active(attempt):
            raise AttemptFailedError(f"owner {self._owner}: {attempt} is over; it cannot end")
        self._phase = OwnerPhase.ENDED
        return EndMarker(attempt=attempt, owner=self._owner, count=len(self._digests), digest=end_digest(self._digests))

    def mark_obsolete(self, attempt: AttemptId) -> bool:
        """Build and send nothing of ``attempt`` any more, also if its prepare only comes later. False if it is not at hand."""
        self._bindings.mark_obsolete(attempt)
        if self._bound is None or self._bound.attempt != attempt:
            return False
        self._phase = OwnerPhase.OBSOLETE
        return True

    def must_update(self, record: CommitRecord) -> bool:
        """The commit record was read: whether the baseline has to be brought to it. Changes nothing.

        Raises:
            OperatorRequiredError: the record names a baseline that this owner neither has nor can make.
        """
        if record.baseline == self._baseline:
            return False
        if self._bound is not None and record.baseline == self._bound.target.baseline:
            return True
        raise OperatorRequiredError(
            f"owner {self._owner}: {record} is committed, but this owner holds {self._baseline or 'no baseline'} and no "
            "candidate of that name (it was restarted, or the transition was another's); reinitialise the baseline and send "
            "every element once"
        )

    def updated(self, record: CommitRecord) -> None:
        """The update in place is done; the transition is over for this owner."""
        if self.must_update(record):
            self._baseline = record.baseline
        self._drop()

    def abandoned(self) -> None:
        """The transition ended without a commit; the baseline is what it was."""
        self._drop()

    def reinitialised(self, baseline: BaselineId) -> None:
        """The baseline was rebuilt, from a checkpoint or from the weights at hand (paper B.2)."""
        self._baseline = baseline
        self._drop()

    def _drop(self) -> None:
        self._bound = None
        self._phase = OwnerPhase.IDLE
        self._digests = []
