"""Algorithm B.1: owners build and send while receivers apply, then everything is flushed. Whatever fails ends it early."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self

from deltarefit.canonical import digest_of_digests
from deltarefit.errors import (
    AttemptFailedError,
    BaseMismatchError,
    CommitConflictError,
    DeadlineError,
    RefitError,
    TransportError,
)
from deltarefit.ids import ReceiverId
from deltarefit.protocol import Delivery, events
from deltarefit.runtime import messages
from deltarefit.runtime.calls import Answer, PendingCall, expect
from deltarefit.runtime.clock import Pace
from deltarefit.runtime.comparing import compare
from deltarefit.runtime.owner_group import OwnersLostError
from deltarefit.runtime.owner_worker import Build, OwnerReply, Recheck, sum_digests
from deltarefit.runtime.refit_state import BoundAttempt, Outcome, Session
from deltarefit.runtime.retaining import note_digests
from deltarefit.transport import keys

__all__ = ["Schedule"]

_RECORD_S = 1.0  # how often the control record is looked at for a request to abort


class Schedule:
    """Runs the schedule of one attempt."""

    def __init__(self, session: Session, bound: BoundAttempt, outcome: Outcome, *, starts_transition: bool) -> None:
        self._session = session
        self._bound = bound
        self._outcome = outcome
        self._starts_transition = starts_transition
        self._watch = _Watch(session, bound)
        self._is_gate_closed = False
        """Whether this attempt asked for gates to be closed."""

    @property
    def abort(self) -> str:
        """Why an operator asked to abort, as far as it was seen while the schedule ran."""
        return self._watch.abort

    def run(self) -> events.Event:
        """Gates close while owners compare and send; receivers apply what arrives; then each proves that it is complete.

        Raises:
            CommitConflictError: another coordinator owns the run.
            OwnersLostError: the training ranks lost each other.
        """
        try:
            if self._session.delivery is Delivery.ASYNCHRONOUS:
                acknowledged = self._stage_first()
            else:
                opening = self._open()
                replies = self._build(opening)
                flushing = self._post_flush(replies)
                self._recheck()
                self._await_open(opening)
                acknowledged = self._flushed(flushing)
        except (CommitConflictError, OwnersLostError):
            raise
        except RefitError as error:
            return events.AttemptFailed(reason=str(error), gate_closed=self._is_gate_closed)
        return events.Flushed(acknowledged=acknowledged, policy_digest=self._outcome.policy_digest)

    def _stage_first(self) -> frozenset[ReceiverId]:
        """Asynchronous delivery: engines serve until every payload has arrived everywhere; only then gates close.

        Opening and flush are asked for together: over a long link each would cost a round trip of the pause.
        """
        replies = self._build(None)
        self._confirm_arrival(replies)
        opening = self._open()
        flushing = self._post_flush(replies)
        self._await_open(opening)
        return self._flushed(flushing)

    # --- lines 1 to 28 ----------------------------------------------------------------------------------------------

    def _open(self) -> PendingCall:
        """Ask every receiver to close its gate and to apply from then on."""
        session, settings = self._session, self._session.settings
        self._is_gate_closed = True
        timeout_s = settings.reply_timeout_s + settings.request_timeout_s
        return session.caller.post(self._bound.required.values(), messages.OpenApply(self._bound.attempt), timeout_s)

    def _await_open(self, opening: PendingCall) -> None:
        answers = self._session.caller.collect(opening, until_failure=True, poll=self._watch.poll)
        for receiver, answer in _failures_first(answers):
            expect(answer, messages.Done, receiver)

    def _confirm_arrival(self, replies: Iterable[OwnerReply]) -> None:
        """Lines 22 to 25: everything sent has arrived everywhere, before any gate is closed."""
        session, bound = self._session, self._bound
        session.activity.begin(f"{bound.attempt}: payloads on their way to receivers that serve on")
        body = messages.ConfirmArrival(bound.attempt, self._markers(replies))
        confirming = session.caller.post(bound.required.values(), body, session.settings.reply_timeout_s)
        self._recheck()
        answers = session.caller.collect(confirming, until_failure=True, poll=self._watch.poll)
        for receiver, answer in _failures_first(answers):
            expect(answer, messages.Done, receiver)

    def _build(self, opening: PendingCall | None) -> list[OwnerReply]:
        """Have the payloads built and sent, in synchronous delivery while gates close."""
        session, bound = self._session, self._bound
        session.activity.begin(f"{bound.attempt}: owners compare and send")
        with _BuildGuard(session, bound, opening, self._watch) as guard:
            replies = session.owners.command(self._build_command())
        self._outcome.note(replies)
        if guard.trouble is not None:
            raise guard.trouble
        _raise_failure(replies)
        self._note_built(replies)
        return replies

    def _build_command(self) -> Build:
        bound = self._bound
        return Build(
            attempt=bound.attempt,
            revision=bound.revision,
            base=bound.base,
            target=bound.target,
            candidate=bound.candidate,
            mode=bound.mode,
            plan=bound.plan.to_wire(),
            starts_transition=self._starts_transition,
            is_asynchronous=self._session.delivery is Delivery.ASYNCHRONOUS,
            relays=bound.relays,
        )

    def _recheck(self) -> None:
        """Before any commit: the candidate is what was sent. Owners began to prove it when they had compared everything.

        Meanwhile what a retained attempt needs beside its payloads is written: receivers are at work, so nobody waits for it.
        """
        note_digests(self._session, self._bound, self._outcome)
        replies = self._session.owners.command(Recheck(self._bound.attempt))
        self._outcome.note(replies)
        _raise_failure(replies)

    def _note_built(self, replies: Iterable[OwnerReply]) -> None:
        outcome, listed = self._outcome, list(replies)
        outcome.digests = sum_digests(listed)
        outcome.policy_digest = digest_of_digests(outcome.digests)
        outcome.changed_elements = sum(reply.changed_elements for reply in listed)
        outcome.payloads = sum(reply.payloads for reply in listed)
        outcome.payload_nbytes = sum(reply.payload_nbytes for reply in listed)
        outcome.sent_nbytes += outcome.payload_nbytes
        outcome.transport = self._bound.transport

    # --- line 29 ----------------------------------------------------------------------------------------------------

    def _markers(self, replies: Iterable[OwnerReply]) -> tuple[messages.OwnerMarker, ...]:
        ended = tuple(reply.marker for reply in replies if reply.marker is not None)
        if len(ended) != self._session.num_owners:
            raise AttemptFailedError(f"{self._bound.attempt}: {len(ended)} of {self._session.num_owners} owners ended")
        return ended

    def _post_flush(self, replies: Iterable[OwnerReply]) -> PendingCall:
        session, bound = self._session, self._bound
        body = messages.Flush(bound.attempt, self._markers(replies), session.is_audit_due)
        settings = session.settings
        return session.caller.post(bound.required.values(), body, settings.reply_timeout_s + settings.request_timeout_s)

    def _flushed(self, pending: PendingCall) -> frozenset[ReceiverId]:
        """Wait until every receiver finished and proved what it holds now."""
        session, bound, audit = self._session, self._bound, self._session.is_audit_due
        with session.log.stage("flush", bound.attempt):
            answers = session.caller.collect(pending, until_failure=True, poll=self._watch.poll)
        holdings: dict[ReceiverId, messages.Holding] = {}
        for receiver, answer in _failures_first(answers):
            completed = expect(answer, messages.Completed, receiver)
            self._outcome.covered[receiver] = completed.covered
            if completed.holding is not None:
                holdings[receiver] = completed.holding
        self._check_results(holdings)
        self._outcome.audited = audit
        self._outcome.receivers = tuple(sorted(answers))
        return frozenset(answers)

    def _check_results(self, holdings: Mapping[ReceiverId, messages.Holding]) -> None:
        session, required = self._session, self._bound.required
        checks = compare(session, self._outcome.digests, holdings, required)
        wrong = {receiver: check for receiver, check in sorted(checks.items()) if not check.is_equal}
        for receiver, check in wrong.items():
            identity = required[receiver].identity
            session.doubtful[identity] = session.doubtful[identity].union(check.differing)
        if wrong:
            receiver, check = next(iter(wrong.items()))
            others = f"; of {len(required)} receivers {len(wrong)} do not" if len(wrong) > 1 else ""
            raise BaseMismatchError(
                f"receiver {receiver} does not hold the candidate after applying {self._bound.attempt}: "
                f"{check.describe(session.catalog)}; these tensors are sent whole in the next attempt{others}"
            )


class _Watch:
    """Notices what makes an attempt pointless while something else is waited for. Used by one thread at a time."""

    def __init__(self, session: Session, bound: BoundAttempt) -> None:
        self.abort = ""
        self._session = session
        self._bound = bound
        self._members_pace = Pace(session.clock, first_s=session.settings.lease_s / 10, most_s=session.settings.lease_s / 10)
        self._record_pace = Pace(session.clock, first_s=_RECORD_S, most_s=_RECORD_S)
        self._members_pace.skip()
        self._record_pace.skip()  # prepare has just looked at both

    def poll(self) -> None:
        """Raise what makes the attempt pointless, if anything does.

        Raises:
            AttemptFailedError: a receiver failed, died or restarted, or an operator asked to abort.
            CommitConflictError: another coordinator owns the run.
        """
        session, bound = self._session, self._bound
        if (error := session.caller.broken(bound.attempt, bound.required)) is not None:
            raise error
        if self._members_pace.is_due:
            self._check_members()
        if self._record_pace.is_due:
            session.ensure_may_act()
            self._check_record()
            self._check_owners()

    def _check_members(self) -> None:
        alive = self._session.members.alive()
        for receiver, member in sorted(self._bound.required.items()):
            now = alive.get(receiver)
            if now is None:
                raise DeadlineError(f"receiver {receiver} shows no sign of life any more during {self._bound.attempt}")
            if now.identity != member.identity:
                raise AttemptFailedError(
                    f"receiver {receiver} was restarted, or its lease ran out, during {self._bound.attempt}"
                )

    def _check_owners(self) -> None:
        """Over relays, an owner may learn after its last payload that some do not get through."""
        session, bound = self._session, self._bound
        for info in session.store.listing(keys.broken_prefix(bound.attempt)) if bound.relays else ():
            text = session.store.find(info.key, max_nbytes=4096) or b""
            raise TransportError(f"{bound.attempt}: not everything was delivered by relay: {text.decode(errors='replace')}")

    def _check_record(self) -> None:
        state = self._session.control.read()
        if state is None or state.epoch != self._session.epoch:
            raise CommitConflictError(f"{self._bound.attempt}: another coordinator took {self._session.store.url} over")
        if state.abort:
            self.abort = state.abort
            raise AttemptFailedError(f"an operator asked to abort: {state.abort}")


class _BuildGuard:
    """While the owners build, a thread watches; what it finds makes every owner stop at its next bucket."""

    def __init__(self, session: Session, bound: BoundAttempt, opening: PendingCall | None, watch: _Watch) -> None:
        self.trouble: RefitError | None = None
        self._session = session
        self._bound = bound
        self._opening = opening
        self._watch = watch
        self._is_built = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deltarefit-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._is_built.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._opening is not None:
                self._await_open(self._opening)
            while True:
                self._session.caller.listen(self._is_built)
                self._poll()
        except _BuiltError:
            return
        except RefitError as error:
            self.trouble = error
        except Exception as error:
            self.trouble = AttemptFailedError(f"{self._bound.attempt}: {type(error).__name__}: {error}")
        self._halt()

    def _await_open(self, opening: PendingCall) -> None:
        answers = self._session.caller.collect(opening, until_failure=True, poll=self._poll, wake=self._is_built)
        for receiver, answer in _failures_first(answers):
            expect(answer, messages.Done, receiver)

    def _poll(self) -> None:
        if self._is_built.is_set():
            raise _BuiltError
        self._watch.poll()

    def _halt(self) -> None:
        try:
            self._session.store.put(keys.halt(self._bound.attempt), b"")
        except RefitError as error:
            self.trouble = AttemptFailedError(f"{self.trouble}; owners could not be told: {error}")


class _BuiltError(Exception):
    """Ends the watch: the owners have built everything."""


def _raise_failure(replies: Iterable[OwnerReply]) -> None:
    for reply in replies:
        if reply.failure is not None:
            raise reply.failure.error(f"owner {reply.owner}")


def _failures_first(answers: Mapping[ReceiverId, Answer]) -> list[tuple[ReceiverId, Answer]]:
    """By name, but failures before everything else, and of these the deadlines last: they tell least."""

    def rank(answer: Answer) -> int:
        if not isinstance(answer, RefitError):
            return 2
        return 1 if isinstance(answer, DeadlineError) else 0

    return sorted(answers.items(), key=lambda one: (rank(one[1]), one[0]))
