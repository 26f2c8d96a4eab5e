"""A simulated coordinator: the real ``TransitionMachine``, rules, ``LeaseWatch`` and ``SelfFence``; its shell as generators.

The shell does what ``runtime`` does, command by command. It drives a training job: steps, refits, and again.
"""

from __future__ import annotations

from deltarefit.canonical import digest_of_digests
from deltarefit.errors import CommitConflictError, OperatorRequiredError, RefitError, RejectedError
from deltarefit.ids import PolicyVersion, baseline_id
from deltarefit.protocol import (
    CommitRecord,
    ControlState,
    LeaseVerdict,
    LeaseWatch,
    TransitionMachine,
    TransitionOutcome,
    TransitionSettings,
    UnfinishedAttempt,
    commands,
    events,
)
from deltarefit.protocol import commit as rules
from deltarefit.testing.simulation import calls
from deltarefit.testing.simulation.coordinator_shell import CoordinatorShell, Steps
from deltarefit.testing.simulation.weights import CATALOG
from deltarefit.testing.simulation.world import Future

__all__ = ["CoordinatorNode"]

_CALL_S = 30.0
_LOOK_S = 0.5
_MAX_FAILURES = 4
_MAX_ASKED = 6
"""An operator who could not help so often restarts the job."""


class CoordinatorNode(CoordinatorShell):
    """Rank 0 of a training job, or whoever took its place."""

    def boot(self) -> None:
        super().boot()
        self.spawn(self._life())

    # --- a life -----------------------------------------------------------------------------------------------------

    def _life(self) -> Steps:
        """Take the run, end what is open, then step and refit until somebody else takes over or the cluster is told to stop."""
        try:
            state = yield from self._take_run()
            yield from self._recover(state)
            while True:
                yield from self._refit()
                yield self.sleep(self.world.random.uniform(0.1, 1.0))
        except RefitError as error:
            self.has_ended = True
            self.is_up = False
            self._on_end(self, f"{type(error).__name__}: {error}")

    def _take_run(self) -> Steps:
        digests = yield from self.job.digests(self)
        digest = digest_of_digests(digests)
        self._first = CommitRecord(PolicyVersion(0), baseline_id(0, self._nonce()), digest)
        state = yield from self._record.create(rules.create_run("run", CATALOG.digest, self._first))
        expired = (yield from self._wait_out(state)) if state.coordinator else None
        state = yield from self._record.change(
            lambda now: rules.acquire(now, holder=self.name, setup_digest=CATALOG.digest, expired_epoch=expired)
        )
        self.epoch = state.epoch
        self._fence.restore(self.world.now_s)
        self.repeat(self._lease.renew_s, self._beat)
        return state

    def _wait_out(self, state: ControlState) -> Steps:
        watch = LeaseWatch(self._lease)
        while True:
            asked_s = self.world.now_s
            try:
                beats = yield self.call("store", calls.ReadBeats(), self._lease.lease_s)
            except RefitError:
                continue
            text = beats.get("coordinator", (None, None))[0]
            verdict = watch.observe(text, asked_s=asked_s, now_s=self.world.now_s)
            if verdict is LeaseVerdict.ALIVE:
                raise RejectedError("the run is in use by a live coordinator")
            if verdict is LeaseVerdict.EXPIRED:
                return state.epoch
            yield self.sleep(_LOOK_S)

    def _beat(self) -> None:
        if not self._fence.may_act(self.world.now_s):
            return
        sent_s = self.world.now_s
        answer = self.call("store", calls.Beat("coordinator", f"{self.name}@{sent_s}"), self._lease.lease_s)

        def renewed(future: Future) -> None:
            if future.error is None:
                self._fence.renewed(sent_s=sent_s, now_s=self.world.now_s)

        answer.then(lambda future: self.guard(lambda: renewed(future)))

    def _recover(self, state: ControlState) -> Steps:
        """A new job ends what is open and binds its own baseline; a coordinator that took over a living job goes on with it."""
        if self.job.baseline is not None:
            self._committed = yield from self.job.digests(self)
            return
        if state.attempt is not None:
            self._alone = True
            yield from self._end_unfinished(state)
            self._alone = False
        digests = yield from self.job.digests(self)
        if state.record.baseline == self._first.baseline:
            name = state.record.baseline  # this coordinator made the record
        else:
            name = baseline_id(state.record.policy_version, self._nonce())
            digest = digest_of_digests(digests)
            yield from self._record.change(
                lambda now: rules.reinitialise(now, epoch=self.epoch, baseline=name, policy_digest=digest)
            )
        yield from self.job.rebase(self, name)
        self._committed = digests

    def _end_unfinished(self, state: ControlState) -> Steps:
        attempt = state.attempt
        if attempt is None:
            return
        self._unfinished, self._bound = state, None
        started = events.Started(
            base=attempt.base, unfinished=UnfinishedAttempt(attempt.attempt, attempt.target), recover_only=True
        )
        finish = yield from self._drive(started)
        self._unfinished = None
        if finish.outcome not in (TransitionOutcome.RECOVERED, TransitionOutcome.ABORTED):
            raise CommitConflictError(f"{self.name}: {attempt.attempt} could not be ended: {finish.causes}")

    # --- a refit ----------------------------------------------------------------------------------------------------

    def _refit(self) -> Steps:
        yield from self._ensure_may_act()
        state = yield from self._state()
        yield from self._end_unfinished(state)
        yield from self._await_receivers()
        state = yield from self._state()
        if state.abort:
            repair = f"a refit was aborted by an operator: {state.abort}"
            state = yield from self._record.change(lambda now: rules.record_abort(now, epoch=self.epoch, repair=repair))
        is_continued = state.transition is not None and state.transition.candidate == self.job.candidate
        if not is_continued:
            self.job.step(self._nonce())
        self._abort, self._bound, self._num_schedules = "", None, int(is_continued)
        self._on_refit(self)
        unfinished = state.transition is not None
        is_dense = bool(state.repair) or (state.transition is not None and (state.transition.is_dense or not is_continued))
        finish = yield from self._drive(events.Started(base=state.record, is_admitted=unfinished, is_dense=is_dense))
        if finish.outcome is TransitionOutcome.CONFLICT:
            raise CommitConflictError(f"{self.name}: {finish.causes}")

    def _drive(self, started: events.Started) -> Steps:
        machine = TransitionMachine(TransitionSettings(max_failures=_MAX_FAILURES))
        (command,) = machine.receive(started)
        asked = 0
        while not isinstance(command, commands.Finish):
            if isinstance(command, commands.AskOperator):
                asked += 1
                if asked > _MAX_ASKED:
                    raise OperatorRequiredError(f"{self.name}: nobody can help: {command.reason}")
                yield self.sleep(self.world.random.uniform(1.0, 10.0))
                aborts = self.world.random.random() < 0.2
                (command,) = machine.receive(
                    events.OperatorAborted(reason="asked") if aborts else events.OperatorRetried(note="mended")
                )
                continue
            event = yield from self._execute(command)
            yield from self._strike()
            if (
                self._abort
                and machine.abort_reason is None
                and (instead := machine.receive(events.OperatorAborted(reason=self._abort)))
            ):
                (command,) = instead
                continue
            (command,) = machine.receive(event)
        return command

    def _strike(self) -> Steps:
        """Between two commands this coordinator may die, or sleep for longer than its lease."""
        self.effect("command")
        if self.network.faults.strikes("coordinator dies"):
            self.crash()
        if self.network.faults.strikes("coordinator sleeps"):
            self.freeze(self._lease.lease_s * self.world.random.uniform(1.2, 4.0))
        yield self.sleep(0.0)

    def _execute(self, command: commands.Command) -> Steps:
        try:
            yield from self._ensure_may_act()
            event = yield from self._dispatch(command)
        except CommitConflictError as error:
            return events.Superseded(reason=str(error))
        except RefitError as error:
            return events.CommandFailed(reason=str(error))
        return event

    def _dispatch(self, command: commands.Command) -> Steps:
        match command:
            case commands.Prepare():
                return (yield from self._prepare(command))
            case commands.RunSchedule():
                return (yield from self._run_schedule())
            case commands.Commit():
                return (yield from self._commit(command))
            case commands.StopAndWait(attempt=attempt):
                return (yield from self._stop_and_wait(attempt))
            case commands.Cleanup():
                return events.CleanedUp()
            case commands.UpdateBaselines(record=committed):
                return (yield from self._update_baselines(committed))
            case commands.DropCaches(attempt=attempt, record=committed):
                return events.CachesDropped(retired=(yield from self._tell(calls.DropCaches(attempt, committed))))
            case commands.ReopenGate(attempt=attempt, record=committed):
                return events.GateReopened(retired=(yield from self._tell(calls.ReopenGate(attempt, committed))))
            case commands.Backoff(num_failures=failures):
                yield self.sleep(0.2 * failures)
                yield from self._notice_abort()
                return events.BackedOff()
        return (yield from self._on_record(command))

    def _on_record(self, command: commands.Command) -> Steps:
        """Commands that only concern the control record."""
        record = self._record
        match command:
            case commands.ReadCommit(attempt=attempt):
                state = yield from record.mark_obsolete(attempt)
                return events.CommitRecordRead(record=state.record)
            case commands.MarkObsolete(attempt=attempt):
                yield from record.mark_obsolete(attempt)
                return events.MarkedObsolete()
            case commands.CloseAttempt(attempt=attempt, was_admitted=admitted):
                yield from record.change(
                    lambda now: rules.close_attempt(now, epoch=self.epoch, attempt=attempt, was_admitted=admitted)
                )
                return events.AttemptClosed()
            case commands.RecordAbort(repair=repair):
                yield from record.change(lambda now: rules.record_abort(now, epoch=self.epoch, repair=repair))
                return events.AttemptClosed()
        raise RejectedError(f"{self.name}: cannot execute {type(command).__name__}")
