"""The receiving half of one attempt: what to do with each payload, and what comes next (paper B.1, Algorithm B.1).

Theory. One attempt is active at a time; everything of another attempt is dropped, whatever it is. A payload passes three
tests in this order: *attempt* (else dropped: late traffic is no fault), *content* (else the attempt fails), *identity* (an
equal duplicate is ignored, a different one fails the attempt; compared by digest, so also after the original was applied).
The declared order is in ``arrivals``, room and turn in ``apply_queue``, what the weights are worth in ``resident``.

Not thread safe: the shell holds one lock around every call, and that lock is what makes "check the attempt" and "queue" one
step. Nothing here sees bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from deltarefit.errors import (
    AttemptFailedError,
    PayloadInvalidError,
    PayloadMissingError,
    RejectedError,
)
from deltarefit.ids import AttemptId, PayloadId, PolicyVersion, ReceiverId
from deltarefit.protocol.apply_queue import ApplyQueue, ReceptionSettings
from deltarefit.protocol.arrivals import Arrivals
from deltarefit.protocol.binding import BindingLog
from deltarefit.protocol.delivery import Arrival, Completion, EndMarker, PrepareAttempt, Verdict, contradiction
from deltarefit.protocol.reception_table import NEXT_PHASE, Phase, Verb
from deltarefit.protocol.record import CommitRecord
from deltarefit.protocol.resident import Resident

__all__ = ["NEXT_PHASE", "Phase", "Reception", "ReceptionSettings", "Verb"]


class Reception:
    """One receiver's view of the attempt at hand."""

    def __init__(
        self, receiver: ReceiverId, *, resident: Resident | None = None, settings: ReceptionSettings | None = None
    ) -> None:
        self._receiver = receiver
        self._settings = settings or ReceptionSettings()
        self._resident = resident or Resident()
        self._phase = Phase.IDLE
        self._request: PrepareAttempt | None = None
        self._bindings: BindingLog[PrepareAttempt] = BindingLog(f"receiver {receiver}")
        self._arrivals: Arrivals | None = None
        self._queue: ApplyQueue | None = None
        self._failure = ""
        self._writing: PayloadId | None = None
        self._num_late = 0
        self._num_duplicates = 0

    # ------------------------------------------------------------------------------------------ what is known

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def attempt(self) -> AttemptId | None:
        """The attempt at hand; None between attempts."""
        return None if self._request is None else self._request.attempt

    @property
    def resident(self) -> Resident:
        return self._resident

    @property
    def failure(self) -> str:
        """Why the attempt at hand failed here; empty if it did not."""
        return self._failure

    @property
    def num_late(self) -> int:
        """Payloads dropped so far because they were not of the active attempt."""
        return self._num_late

    def is_active(self, attempt: AttemptId) -> bool:
        """The first test of every payload and control call: whether it is of the attempt at hand and that is not over."""
        return self.attempt == attempt and self._phase in (Phase.RECEIVING, Phase.APPLYING, Phase.COMPLETED)

    def is_quiet(self, attempt: AttemptId) -> bool:
        """Whether no write of ``attempt`` is under way or can begin. True at once if it was replaced (paper B)."""
        if self.attempt != attempt:
            return True
        return self._writing is None and self._phase not in (Phase.RECEIVING, Phase.APPLYING)

    # ------------------------------------------------------------------------------------------ attempt

    def prepare(self, request: PrepareAttempt) -> None:
        """Bind to an attempt; it replaces the one before, which must be quiet. Repeating it is harmless.

        Raises:
            CommitConflictError: a later attempt was bound here before.
            RejectedError: this receiver's weights do not fit the attempt.
            AttemptFailedError: the attempt is over, or a write of the former one is still under way; stop it and wait.
        """
        if self._bindings.is_repeated(request):
            self._require_active(request.attempt, "repeated prepare")
            return
        if self._writing is not None:
            raise AttemptFailedError(
                f"receiver {self._receiver}: {request.attempt} cannot begin while {self._writing} is being written; stop "
                f"{self._writing.attempt} and wait"
            )
        if not request.owners or len(set(request.owners)) != len(request.owners):
            raise RejectedError(
                f"receiver {self._receiver}: {request.attempt} names owners {request.owners}; expected each once"
            )
        self._resident.check_takes(
            base_version=request.base_version,
            mode=request.mode,
            is_dense=request.is_dense,
            candidate=request.candidate,
            receiver=self._receiver,
        )
        self._move(Verb.PREPARE)
        self._bindings.bind(request)
        self._request = request
        self._arrivals = Arrivals(request.attempt, request.owners, max_payloads_per_owner=self._settings.max_payloads_per_owner)
        self._queue = ApplyQueue(self._arrivals, request.delivery, self._settings)
        self._failure = ""
        self._num_duplicates = 0

    def fail(self, attempt: AttemptId, reason: str) -> None:
        """Something went wrong in this attempt outside of here; no payload of it is taken or applied any more."""
        if self.is_active(attempt):
            self._failure = self._failure or reason
            self._move(Verb.FAIL)

    def mark_obsolete(self, attempt: AttemptId) -> bool:
        """Take nothing of ``attempt`` any more, also if its prepare only comes later. False if it is not the attempt at hand.

        A write that is under way is not interrupted; wait until ``is_quiet``.
        """
        self._bindings.mark_obsolete(attempt)
        if self.attempt != attempt:
            return False
        self._move(Verb.MARK_OBSOLETE)
        return True

    def cleanup(self, attempt: AttemptId) -> bool:
        """Forget the payloads of ``attempt``. False if it is not the attempt at hand, or if its commit may still come.

        Raises:
            AttemptFailedError: it may still write; stop it and wait first.
        """
        if self.attempt != attempt or self._phase is Phase.COMPLETED:
            return False
        if not self.is_quiet(attempt):
            raise AttemptFailedError(
                f"receiver {self._receiver}: {attempt} is not stopped yet; stop it and wait before cleanup"
            )
        self._move(Verb.CLEANUP)
        self._forget()
        return True

    def committed(self, record: CommitRecord) -> bool:
        """The commit record was read. True if it publishes what is resident here."""
        self._resident = self._resident.committed(record)
        if not self._resident.is_servable(record):
            return False
        if self._request is not None and self._request.baseline == record.baseline:
            self._move(Verb.COMMITTED)
            self._forget()
        return True

    def restored(self, policy_version: PolicyVersion) -> None:
        """Every element was restored to a committed version, or proved to be that by digest.

        Raises:
            AttemptFailedError: an attempt is at hand, or a write under way.
        """
        if Verb.RESTORED not in NEXT_PHASE[self._phase] or self._writing is not None:
            raise AttemptFailedError(f"receiver {self._receiver}: cannot be restored during {self.attempt}; stop it and wait")
        self._resident = self._resident.restored(policy_version)
        self._move(Verb.RESTORED)
        self._forget()

    def fence(self, reason: str) -> None:
        """The lease ran out: nothing is taken, applied or served until restored."""
        self._resident = self._resident.fence(reason)
        if self.attempt is not None:
            self._failure = self._failure or reason
            self._move(Verb.MARK_OBSOLETE)

    # ------------------------------------------------------------------------------------------ request gate

    def close_gate(self, attempt: AttemptId) -> bool:
        """Close the request gate for ``attempt``; False and nothing if it is not active."""
        if not self.is_active(attempt):
            return False
        self._resident = self._resident.closed()
        return True

    def reopen_gate(self, attempt: AttemptId | None, record: CommitRecord) -> bool:
        """Open the request gate.

        Args:
            attempt: the last one that was bound here (the end of its transition), or None between attempts (after a restore).
                Any other is late, nothing happens and False is returned.
            record: the committed record; the weights must be what it publishes.

        Raises:
            OperatorRequiredError: the weights are not known to be those of ``record``.
        """
        if attempt is None:
            if self._phase is not Phase.IDLE:
                return False
        elif self._bindings.last is None or self._bindings.last.attempt != attempt:
            return False
        self._resident = self._resident.reopened(record, receiver=self._receiver)
        return True

    def keep_gate_closed(self) -> None:
        """The request gate was to open, but could not be opened."""
        self._resident = self._resident.closed()

    # ------------------------------------------------------------------------------------------ arrivals

    def arrive(self, arrival: Arrival) -> Verdict:
        """Decide on a payload.

        Raises:
            PayloadInvalidError: it contradicts the attempt, or differs from one accepted under its id; the attempt has failed.
            AttemptFailedError: no room to stage it; the attempt has failed.
        """
        if not self.is_active(arrival.payload.attempt):
            self._num_late += 1
            return Verdict.DROP_LATE
        request, arrivals, queue = self._bound()
        if wrong := contradiction(arrival, request):
            self._invalid(wrong)
        try:
            if arrivals.known(arrival) is not None:
                self._num_duplicates += 1
                return Verdict.IGNORE_DUPLICATE
            verdict = queue.room_for(arrival)
            if verdict is None:
                self._no_room(arrival, arrivals)
            if verdict is not Verdict.WAIT:
                arrivals.accept(arrival)
                queue.placed(arrival, verdict)
        except PayloadInvalidError as error:
            self._invalid(str(error))
        return verdict

    def _no_room(self, arrival: Arrival, arrivals: Arrivals) -> NoReturn:
        reason = (
            f"{arrival.payload}: staging needs at least {arrivals.nbytes + arrival.nbytes} bytes, the limit is "
            f"{self._settings.staging_limit_nbytes}; raise staging_nbytes, or allow spilling"
        )
        self.fail(arrival.payload.attempt, reason)
        raise AttemptFailedError(f"receiver {self._receiver}: {reason}")

    def end(self, marker: EndMarker) -> None:
        """An owner ended. Repeating it is harmless; of another attempt it is ignored.

        Raises:
            PayloadInvalidError: it contradicts what arrived or an earlier marker; the attempt has failed.
        """
        if not self.is_active(marker.attempt):
            return
        try:
            self._bound()[1].end(marker)
        except PayloadInvalidError as error:
            self._invalid(str(error))

    def missing(self, limit: int | None = None) -> tuple[str, ...]:
        """Names of what was sent, as far as is known, and is not here: payloads, and end markers."""
        return self._bound()[1].missing(limit)

    def check_arrivals(self, attempt: AttemptId, markers: Sequence[EndMarker] = ()) -> None:
        """The arrival check, with the end markers that the coordinator collected.

        Raises:
            AttemptFailedError: the attempt is not active here, or failed.
            PayloadMissingError: something is missing; the text names it. It may be asked again.
            PayloadInvalidError: a marker contradicts what arrived; the attempt has failed.
        """
        self._require_active(attempt, "arrival check")
        for marker in markers:
            self.end(marker)
        if missing := self.missing(limit=4):
            raise PayloadMissingError(f"receiver {self._receiver}: has not arrived: {_named(missing)}")

    # ------------------------------------------------------------------------------------------ application

    def open_apply(self, attempt: AttemptId) -> bool:
        """Allow writing. False and nothing if ``attempt`` is not active.

        Raises:
            RejectedError: the request gate is open; close it first.
        """
        if not self.is_active(attempt):
            return False
        if not self._resident.is_gate_closed:
            raise RejectedError(
                f"receiver {self._receiver}: open_apply of {attempt} with the request gate open; close it first"
            )
        if self._phase is Phase.RECEIVING:
            self._move(Verb.OPEN_APPLY)
        return True

    def next_payload(self) -> PayloadId | None:
        """The next payload to apply in the declared order, arrived or not; None if all are applied."""
        return self._bound()[2].next_payload()

    def next_to_decode(self) -> PayloadId | None:
        """Asynchronous delivery: the next staged payload to decode, in the declared order; None if there is none or no room.

        Each call that returns a payload takes a slot for it, and its staged bytes count as released. Decoding writes nothing,
        so it may begin while the engine serves; whether it does is the shell's choice.
        """
        return self._bound()[2].next_to_decode() if self._phase in (Phase.RECEIVING, Phase.APPLYING) else None

    def take(self) -> PayloadId | None:
        """The next payload to write, if it is here and writing is allowed. It counts as being written until ``applied``.

        In asynchronous delivery only payloads that ``next_to_decode`` gave are taken.
        """
        if self._phase is not Phase.APPLYING or self._writing is not None:
            return None
        request, _, queue = self._bound()
        payload = queue.next_to_write()
        if payload is not None:
            self._resident = self._resident.touched(candidate=request.candidate)
            self._writing = payload
        return payload

    def applied(self, payload: PayloadId) -> None:
        """The write of ``payload`` is over, whether or not it still counts.

        Raises:
            AttemptFailedError: it is not the payload that was taken.
        """
        if self._writing != payload:
            raise AttemptFailedError(f"receiver {self._receiver}: {payload} reported as applied, but {self._writing} was taken")
        self._writing = None
        self._bound()[2].written()

    def write_failed(self, payload: PayloadId, reason: str) -> None:
        """The write of ``payload`` ended in an error; whatever it wrote before stays."""
        if self._writing == payload:
            self._writing = None
        self.fail(payload.attempt, f"{payload}: {reason}")

    @property
    def is_drained(self) -> bool:
        """Whether every payload of every owner is applied."""
        return self._queue is not None and self._queue.is_drained

    def complete(self, attempt: AttemptId) -> Completion:
        """Everything is applied and devices are in step: the completion acknowledgement. Repeating it gives the same.

        Raises:
            AttemptFailedError: the attempt is not active here, or failed, or open_apply was not called.
            PayloadMissingError: something is not applied.
        """
        request = self._require_active(attempt, "completion")
        _, arrivals, queue = self._bound()
        if self._phase is Phase.RECEIVING:
            raise AttemptFailedError(f"receiver {self._receiver}: completion of {attempt} before open_apply")
        if not self.is_drained:
            behind = _named(self.missing(limit=4)) or f"{self.next_payload()} and what follows it is not applied yet"
            raise PayloadMissingError(f"receiver {self._receiver}: {attempt} is not complete: {behind}")
        if self._phase is Phase.APPLYING:
            self._resident = self._resident.completed(request.candidate, request.baseline)
            self._move(Verb.COMPLETE)
        return Completion(
            receiver=self._receiver,
            attempt=attempt,
            num_payloads=queue.num_applied,
            nbytes=arrivals.nbytes,
            num_late=self._num_late,
            num_duplicates=self._num_duplicates,
        )

    # ------------------------------------------------------------------------------------------ inside

    def _move(self, verb: Verb) -> None:
        self._phase = NEXT_PHASE[self._phase].get(verb, self._phase)

    def _bound(self) -> tuple[PrepareAttempt, Arrivals, ApplyQueue]:
        if self._request is None or self._arrivals is None or self._queue is None:
            raise AttemptFailedError(f"receiver {self._receiver}: no attempt is bound; prepare comes first")
        return self._request, self._arrivals, self._queue

    def _require_active(self, attempt: AttemptId, what: str) -> PrepareAttempt:
        if not self.is_active(attempt):
            why = self._failure or f"the attempt at hand is {self.attempt or 'none'}, {self._phase.value}"
            raise AttemptFailedError(f"receiver {self._receiver}: {what} of {attempt} is not possible: {why}")
        return self._bound()[0]

    def _forget(self) -> None:
        self._request = None
        self._arrivals = None
        self._queue = None

    def _invalid(self, reason: str) -> NoReturn:
        if self._request is not None:
            self.fail(self._request.attempt, reason)
        raise PayloadInvalidError(f"receiver {self._receiver}: {reason}")


def _named(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
