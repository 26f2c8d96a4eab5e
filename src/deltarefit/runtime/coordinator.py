"""Carries out the commands of one transition: the shell around ``protocol.TransitionMachine`` (paper Algorithms B.1, B.2)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from deltarefit.errors import CommitConflictError, OperatorRequiredError, RefitError, RejectedError
from deltarefit.ids import AttemptId, ReceiverId, attempt_id
from deltarefit.protocol import AttemptState, CommitOutcome, CommitRequest, Delivery, commands, events
from deltarefit.protocol.record import CommitRecord
from deltarefit.runtime import messages
from deltarefit.runtime.clock import Deadline
from deltarefit.runtime.members import Member
from deltarefit.runtime.owner_group import OwnersLostError
from deltarefit.runtime.owner_worker import CommitBaseline, OwnerReply, ReleaseAttempt, StopSending, sum_digests
from deltarefit.runtime.preparing import Preparation
from deltarefit.runtime.refit_state import BoundAttempt, Outcome, Session
from deltarefit.runtime.retaining import is_linked, is_retained, retention_of
from deltarefit.runtime.schedule import Schedule
from deltarefit.transport import keys
from deltarefit.wording import some_of

__all__ = ["Coordinator"]

_LOG = logging.getLogger(__name__)
_MAX_BACKOFF_S = 30.0
_ABORT_LOOK_S = 1.0


class Coordinator:
    """Executes commands of one transition and answers each with an event.

    Raises nothing that an event can say; ``OwnersLostError`` passes, as no command can succeed any more.
    """

    def __init__(self, session: Session, *, unfinished: AttemptState | None = None, alone: bool = False) -> None:
        """Begin a transition, or end one.

        Args:
            session: the hold on the run.
            unfinished: the attempt that the record still names.
            alone: the other training ranks do not follow: a new trainer ends what a former one left.
        """
        self.abort = ""
        """Why an operator asked to abort, once it was seen."""
        self.outcome = Outcome()
        self._session = session
        self._unfinished = unfinished
        self._alone = alone
        self._bound: BoundAttempt | None = None
        self._num_schedules = 0
        self._is_committed = False
        self._concluded: set[ReceiverId] = set()
        """Receivers that dropped their caches and serve again."""
        self._owed: CommitBaseline | None = None
        """Owners proved that they hold what is committed, and have not copied it yet."""
        self._preparation = Preparation(session, f"{session.holder}-{session.ids.nonce()}")

    def execute(self, command: commands.Command) -> events.Event:
        """Carry out one command (all but AskOperator and Finish, which the caller handles)."""
        try:
            self._session.ensure_may_act()
            return self._dispatch(command)
        except CommitConflictError as error:
            return events.Superseded(reason=str(error))
        except OwnersLostError:
            raise
        except RefitError as error:
            return events.CommandFailed(reason=str(error))

    def _dispatch(self, command: commands.Command) -> events.Event:
        match command:
            case commands.Prepare():
                return self._prepare(command)
            case commands.RunSchedule():
                return self._run_schedule()
            case commands.Commit():
                return self._commit(command)
            case commands.StopAndWait(attempt=attempt):
                return self._stop_and_wait(attempt)
            case commands.Cleanup(attempt=attempt):
                return self._cleanup(attempt)
            case commands.UpdateBaselines(record=record):
                return self._update_baselines(record)
            case commands.DropCaches(attempt=attempt, record=record):
                return events.CachesDropped(retired=self._conclude(messages.DropCaches(attempt, record, True), attempt))
            case commands.ReopenGate(attempt=attempt, record=record):
                return events.GateReopened(retired=self._conclude(messages.ReopenGate(attempt, record), attempt))
            case commands.Backoff(num_failures=num_failures):
                return self._back_off(num_failures)
            case _:
                return self._on_record(command)

    def _on_record(self, command: commands.Command) -> events.Event:
        """Commands that only concern the control record."""
        control, epoch = self._session.control, self._session.epoch
        match command:
            case commands.ReadCommit(attempt=attempt):
                return events.CommitRecordRead(record=control.read_commit(attempt))
            case commands.MarkObsolete(attempt=attempt):
                control.mark_obsolete(attempt)
                return events.MarkedObsolete()
            case commands.CloseAttempt(attempt=attempt, was_admitted=was_admitted):
                control.close_attempt(epoch, attempt, was_admitted=was_admitted)
                return events.AttemptClosed()
            case commands.RecordAbort(repair=repair):
                control.record_abort(epoch, repair)
                return events.AttemptClosed()
            case _:
                raise RejectedError(f"coordinator: cannot execute {type(command).__name__}")

    # --- the attempt ------------------------------------------------------------------------------------------------

    def _prepare(self, command: commands.Prepare) -> events.Event:
        """Check the set-up, bind the record, bind the receivers (paper B.1)."""
        session = self._session
        self._bound = None
        attempt = attempt_id(command.base.policy_version + 1, command.ordinal, session.ids.nonce())
        try:
            with session.log.stage("prepare", attempt):
                required = self._preparation.required()
                plan = self._preparation.plan(command, required)
                self._bound = bound = self._preparation.bind_record(command, attempt, plan, required)
                self._preparation.bind_receivers(bound)
        except RejectedError as error:
            return events.PrepareRejected(reason=str(error), attempt=self._bound_name())
        except (CommitConflictError, OwnersLostError):
            raise
        except OperatorRequiredError as error:
            self._notice_abort()
            return events.PrepareFailed(reason=str(error), attempt=self._bound_name())
        except RefitError as error:
            return events.PrepareFailed(reason=str(error), attempt=self._bound_name())
        return events.Prepared(attempt=attempt, target=bound.target, required=frozenset(required))

    def _bound_name(self) -> AttemptId | None:
        """The attempt, if the record was bound to it."""
        return None if self._bound is None else self._bound.attempt

    def _run_schedule(self) -> events.Event:
        session = self._session
        if self._bound is None:
            raise RejectedError("coordinator: a schedule before any attempt was prepared")
        if self._num_schedules == 0:
            self.outcome.t0_s = session.clock.monotonic_s()
        schedule = Schedule(session, self._bound, self.outcome, starts_transition=self._num_schedules == 0)
        self._num_schedules += 1
        event = schedule.run()
        if isinstance(event, events.AttemptFailed):
            session.log.failed(self._bound.attempt, event.reason)
        self.abort = self.abort or schedule.abort
        return event

    def _commit(self, command: commands.Commit) -> events.Event:
        session = self._session
        request = CommitRequest(
            epoch=session.epoch,
            attempt=command.attempt,
            baseline=command.target.baseline,
            acknowledged=command.acknowledged,
            policy_digest=command.target.policy_digest,
            retention=None if self._bound is None else retention_of(session, self._bound, self.outcome),
        )
        session.activity.begin(f"{command.attempt}: committing")
        with session.log.stage("commit", command.attempt):
            outcome = session.control.commit(request)
        if outcome is CommitOutcome.FAILED:
            self._notice_abort()
        return events.CommitReplied(outcome=outcome)

    # --- after a commit ---------------------------------------------------------------------------------------------

    def _update_baselines(self, record: CommitRecord) -> events.Event:
        """Owners make their baseline what the record names. After a takeover there is nothing to do: theirs is a new one.

        In asynchronous delivery they prove that they hold it, and copy it while gates reopen, so that no request waits for the
        copy. The training loop is kept from stepping until the transition ends, which is after the copy.
        """
        session, bound = self._session, self._bound
        self._is_committed = True
        if self._alone:
            return events.BaselinesUpdated()
        attempt = bound.attempt if bound is not None else self._unfinished_name()
        session.activity.begin(f"{attempt}: owners take the candidate over as their baseline")
        copies = session.delivery is Delivery.SYNCHRONOUS or bound is None
        replies = self._command_baselines(CommitBaseline(attempt, record, copies))
        self._owed = None if copies else CommitBaseline(attempt, record)
        session.committed = sum_digests(replies) if copies else self.outcome.digests
        session.policy_version = record.policy_version
        required = () if bound is None else bound.required.values()
        session.settled = frozenset(member.identity for member in required)
        session.doubtful = dict.fromkeys(session.settled, frozenset())
        session.num_refits += 1
        return events.BaselinesUpdated()

    def _command_baselines(self, command: CommitBaseline) -> list[OwnerReply]:
        replies = self._session.owners.command(command)
        if failed := [f"owner {reply.owner}: {reply.failure.text}" for reply in replies if reply.failure is not None]:
            raise OperatorRequiredError(
                f"{command.record} is committed, but owners did not take it over as their baseline: {'; '.join(failed[:3])}. "
                "Call refit() again; if that does not help, make a new Publisher, here or in a restarted trainer: it starts "
                "from the weights at hand and sends every element once"
            )
        self.outcome.t1_s = self._session.clock.monotonic_s()
        self.outcome.note(replies)
        if command.copies:
            self._note_nans(command.record, replies)
        return replies

    def _note_nans(self, record: CommitRecord, replies: Iterable[OwnerReply]) -> None:
        """They travel like any other bits, but hardly anybody wants them in a policy."""
        listed = list(replies)
        self.outcome.nan_elements = count = sum(reply.nan_elements for reply in listed)
        if count:
            names = sorted({name for reply in listed for name in reply.nans})
            _LOG.warning("%s holds %d elements that are NaN, in tensors such as %s", record, count, some_of(names, 3))

    def _copy_owed(self) -> None:
        if self._owed is not None:
            self._command_baselines(self._owed)
            self._owed = None

    def _conclude(self, body: messages.CallBody, attempt: AttemptId) -> frozenset[ReceiverId]:
        """Tell every receiver of the attempt that has not reopened its gate yet; those that do not do it have to rejoin.

        Dropping caches and reopening the gate are one call: over a long link each costs a round trip of the pause.
        """
        session = self._session
        concerned = {name: member for name, member in self._concerned().items() if name not in self._concluded}
        with session.log.stage("finish", attempt):
            try:
                telling = session.caller.post(concerned.values(), body, session.settings.reply_timeout_s)
            except RefitError:
                self._copy_owed()
                raise
            try:
                self._copy_owed()
            finally:
                answers = session.caller.collect(telling)
        done = {receiver: answer for receiver, answer in answers.items() if isinstance(answer, messages.Done)}
        self._concluded |= set(done)
        for answer in done.values():
            self.outcome.events.extend(answer.events)
        retired = frozenset(set(answers) - set(done))
        for receiver in retired:
            session.distrust(concerned[receiver].identity)
        return retired

    # --- after a failure --------------------------------------------------------------------------------------------

    def _stop_and_wait(self, attempt: AttemptId) -> events.Event:
        """No write of the attempt after this. A receiver that shows no sign of life has fenced itself and is retired."""
        session = self._session
        with session.log.stage("stop", attempt):
            if not self._alone:
                self.outcome.note(session.owners.demand(StopSending(attempt)))
            concerned = self._concerned()
            answers = session.caller.ask(concerned.values(), messages.Stop(attempt), session.settings.reply_timeout_s)
        stopped = frozenset(receiver for receiver, answer in answers.items() if isinstance(answer, messages.Done))
        alive = session.members.alive()
        retired = {
            receiver
            for receiver in set(answers) - stopped
            if receiver not in alive or alive[receiver].identity != concerned[receiver].identity
        }
        for receiver in retired:
            self._preparation.retire(concerned[receiver].identity)
        for receiver in sorted(set(answers) - stopped - retired):
            return events.CommandFailed(
                reason=f"stop of {attempt}: {answers[receiver]}. It may still be writing: restart that receiver's process, "
                "which restores it, or wait until it answers again: 'deltarefit status' shows it"
            )
        gone = frozenset(self._unfinished.required) - set(answers) if self._unfinished is not None else frozenset()
        return events.Stopped(survivors=stopped, retired=frozenset(retired) | gone)

    def _cleanup(self, attempt: AttemptId) -> events.Event:
        session = self._session
        retains = self._is_committed and self._stays(attempt)
        if self._alone:
            if retains:
                return events.CleanedUp()
            try:
                session.store.delete_prefix(keys.attempt_prefix(attempt))
                session.relays.cleanup(attempt)
            except RefitError as error:
                return events.CleanedUp(leftover=str(error))
            return events.CleanedUp()
        replies = session.owners.command(ReleaseAttempt(attempt, retains))
        self.outcome.note(replies)
        failures = [reply.failure.text for reply in replies if reply.failure is not None]
        return events.CleanedUp(leftover="; ".join(failures[:3]))

    def _stays(self, attempt: AttemptId) -> bool:
        """Whether the commit retained the attempt's payloads. What it did not retain after all, the next sweep removes."""
        if self._bound is not None:
            return is_retained(self._session, self._bound)
        return is_linked(self._session.control, attempt)

    def _back_off(self, num_failures: int) -> events.Event:
        """Pause before the next attempt, looking for a request to abort meanwhile."""
        session = self._session
        pause_s = min(_MAX_BACKOFF_S, session.settings.retry_pause_s * 2.0 ** (num_failures - 1))
        session.activity.begin(f"a pause of {pause_s:.1f} s before the next attempt")
        deadline = Deadline(session.clock, pause_s)
        while not deadline.expired:
            session.clock.sleep(min(_ABORT_LOOK_S, deadline.remaining_s()))
            self._notice_abort()
            if self.abort:
                break
        return events.BackedOff()

    def _notice_abort(self) -> None:
        """See whether an operator asked to abort. If the record is out of reach, the next command finds out."""
        try:
            state = self._session.control.read()
        except RefitError:
            return
        if state is not None and state.abort:
            self.abort = state.abort

    # --- small things -----------------------------------------------------------------------------------------------

    def _unfinished_name(self) -> AttemptId:
        if self._unfinished is None:
            raise RejectedError("coordinator: a command about an attempt, but there is none")
        return self._unfinished.attempt

    def _concerned(self) -> Mapping[ReceiverId, Member]:
        """Receivers of the attempt; of an unfinished one, those that are not proven dead."""
        if self._bound is not None:
            return self._bound.required
        required = self._unfinished.required if self._unfinished is not None else ()
        return {receiver: member for receiver, member in self._session.members.alive().items() if receiver in required}
