"""What a simulated coordinator does for each command of a refit: the shell around the machines, as ``runtime`` has it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from deltarefit.canonical import TensorDigest, digest_of_digests
from deltarefit.errors import AttemptFailedError, CommitConflictError, OperatorRequiredError, RefitError, RejectedError
from deltarefit.ids import AttemptId, PolicyVersion, ReceiverId, attempt_id, baseline_id
from deltarefit.plan import RefitPlan
from deltarefit.protocol import (
    CommitOutcome,
    CommitRecord,
    CommitRequest,
    ControlState,
    Delivery,
    LeaseSettings,
    PrepareAttempt,
    PrepareRequest,
    SelfFence,
    commands,
    events,
)
from deltarefit.protocol import commit as rules
from deltarefit.records import Encoding
from deltarefit.testing.simulation import calls
from deltarefit.testing.simulation.job import Job, sum_digests
from deltarefit.testing.simulation.network import Network, Node
from deltarefit.testing.simulation.record import RecordClient
from deltarefit.testing.simulation.roster import Member, Roster
from deltarefit.testing.simulation.weights import CATALOG, NUM_OWNERS
from deltarefit.testing.simulation.world import Future, each

__all__ = ["CoordinatorShell", "Steps"]

Steps = Generator[Future, Any, Any]
_CALL_S = 30.0
_LOOK_S = 0.5
_MAX_FAILURES = 4
_MAX_ASKED = 6
"""An operator who could not help so often restarts the job."""


class CoordinatorShell(Node):
    """Carries out commands; what a coordinator lives for is in ``coordinator_node``."""

    def __init__(
        self,
        network: Network,
        name: str,
        job: Job,
        lease: LeaseSettings,
        *,
        audits: bool,
        delivery: Delivery,
        on_end: Callable[[Node, str], None],
        on_refit: Callable[[Node], None],
        mutant: str = "",
    ) -> None:
        super().__init__(network, name)
        self.job = job
        self.has_ended = False
        self._lease = lease
        self._audits = audits
        self._delivery = delivery
        self._on_end = on_end
        self._on_refit = on_refit
        self._mutant = mutant

    def boot(self) -> None:
        self.epoch = 0
        self._record = RecordClient(self, fences=self._mutant != "skip the fence")
        self._roster = Roster(self._lease)
        self._fence = SelfFence(self._lease, now_s=self.world.now_s)
        self._committed: dict[str, TensorDigest] = {}
        self._doubtful: dict[Member, frozenset[str]] = {}
        self._settled: frozenset[Member] = frozenset()
        self._abort = ""
        self._alone = False
        self._unfinished: ControlState | None = None
        self._bound: _Bound | None = None
        self._num_schedules = 0

    # --- commands ---------------------------------------------------------------------------------------------------

    def _prepare(self, command: commands.Prepare) -> Steps:
        self._bound = None
        try:
            yield from self._look()
            required = {name: one for name, one in self._roster.ready().items() if name not in command.excluded}
            if not required:
                raise AttemptFailedError("no receiver is ready")
            bound = yield from self._bind(command, required)
        except RejectedError as error:
            return events.PrepareRejected(reason=str(error), attempt=self._bound_name())
        except CommitConflictError:
            raise
        except RefitError as error:
            if isinstance(error, OperatorRequiredError):
                yield from self._notice_abort()
            return events.PrepareFailed(reason=str(error), attempt=self._bound_name())
        return events.Prepared(attempt=bound.attempt, target=bound.target, required=frozenset(required))

    def _bind(self, command: commands.Prepare, required: Mapping[ReceiverId, Member]) -> Steps:
        repair = yield from self._survey(required, is_retry=command.ordinal > 1)
        dense = frozenset(CATALOG) if command.is_dense else repair
        plan = RefitPlan(CATALOG, dict.fromkeys(CATALOG, Encoding.DIFFERENCE), NUM_OWNERS, dense)
        version = PolicyVersion(command.base.policy_version + 1)
        attempt = attempt_id(version, command.ordinal, self._nonce())
        target = CommitRecord(version, baseline_id(version, self._nonce()))
        wanted = PrepareRequest(
            epoch=self.epoch,
            attempt=attempt,
            baseline=target.baseline,
            base=command.base,
            mode=command.mode,
            is_dense=command.is_dense,
            candidate=self.job.candidate,
            plan_digest=plan.digest,
            required=frozenset(required),
        )
        state = yield from self._record.change(lambda now: rules.prepare(now, wanted))
        self._bound = bound = _Bound(attempt, state.revision, command, target, plan, required)
        yield from self._ask_all(required, lambda member: calls.Prepare(self._request(bound, member), plan))
        return bound

    def _request(self, bound: _Bound, member: Member) -> PrepareAttempt:
        return PrepareAttempt(
            attempt=bound.attempt,
            revision=bound.revision,
            base_version=bound.command.base.policy_version,
            target_version=bound.target.policy_version,
            baseline=bound.target.baseline,
            plan_digest=bound.plan.digest,
            mode=bound.command.mode,
            is_dense=bound.command.is_dense or member not in self._settled,
            candidate=self.job.candidate,
            owners=tuple(self.job.owner_ids),
            delivery=self._delivery,
        )

    def _survey(self, required: Mapping[ReceiverId, Member], *, is_retry: bool) -> Steps:
        """Tensors that some receiver does not hold at the base version; whoever is new, or at audits everybody, is asked."""
        asked = {
            name: member for name, member in required.items() if member not in self._doubtful or (self._audits and not is_retry)
        }
        answers = yield from self._ask_all(asked, lambda _: calls.Survey())
        for name, digests in answers.items():
            wrong = frozenset(tensor for tensor in CATALOG if digests[tensor] != self._committed[tensor])
            self._doubtful[asked[name]] = self._doubtful.get(asked[name], frozenset()) | wrong
        return frozenset[str]().union(*(self._doubtful[member] for member in required.values()))

    def _run_schedule(self) -> Steps:
        bound = self._bound
        if bound is None:
            raise RejectedError(f"{self.name}: no attempt is bound")
        starts, self._num_schedules = self._num_schedules == 0, self._num_schedules + 1
        is_gate_closed = self._delivery is Delivery.SYNCHRONOUS
        try:
            building = self.job.build(self, self._build(bound, starts))
            if self._delivery is Delivery.SYNCHRONOUS:
                yield from self._gather([*self._post(bound, calls.OpenApply(bound.attempt)), *building], bound)
            else:
                yield from self._gather(building, bound)
            markers = tuple(one.value.marker for one in building)
            if self._delivery is Delivery.ASYNCHRONOUS:
                yield from self._gather(self._post(bound, calls.ConfirmArrival(bound.attempt, markers)), bound)
                is_gate_closed = True
                yield from self._gather(self._post(bound, calls.OpenApply(bound.attempt)), bound)
            candidate = sum_digests(one.value.digests for one in building)
            acknowledged = yield from self._flush(bound, calls.Flush(bound.attempt, markers), candidate)
        except CommitConflictError:
            raise
        except RefitError as error:
            return events.AttemptFailed(reason=str(error), gate_closed=is_gate_closed)
        return events.Flushed(acknowledged=acknowledged, policy_digest=digest_of_digests(candidate))

    def _post(self, bound: _Bound, body: Any) -> list[Future]:
        return [self._to(member, body, _CALL_S) for member in bound.required.values()]

    def _build(self, bound: _Bound, starts_transition: bool) -> calls.Build:
        return calls.Build(
            bound.attempt,
            bound.revision,
            bound.command.base,
            bound.target,
            self.job.candidate,
            bound.command.mode,
            bound.plan,
            starts_transition,
            tuple(sorted(bound.required)),
        )

    def _flush(self, bound: _Bound, body: calls.Flush, candidate: Mapping[str, TensorDigest]) -> Steps:
        flushing = {name: self._to(member, body, _CALL_S) for name, member in bound.required.items()}
        waited = list(flushing.values())
        if self._mutant == "commit before the last acknowledgement":
            waited = waited[:1]
        yield from self._gather(waited, bound)
        for name, future in flushing.items():
            if self._audits and future.is_done and future.value != dict(candidate):
                member = bound.required[name]
                wrong = frozenset(tensor for tensor in CATALOG if future.value[tensor] != candidate[tensor])
                self._doubtful[member] = self._doubtful.get(member, frozenset()) | wrong
                raise AttemptFailedError(f"{name} does not hold the candidate")
        return frozenset(flushing)

    def _gather(self, futures: Iterable[Future], bound: _Bound) -> Steps:
        """Wait for all, but give up at the first failure, at a death, and when an operator asks to."""
        waiting = list(futures)
        looked_s = self.world.now_s
        while True:
            for future in waiting:
                if future.error is not None:
                    raise future.error
            waiting = [future for future in waiting if not future.is_done]
            if not waiting:
                return
            yield self.world.any_of(waiting, _LOOK_S)
            if self.world.now_s - looked_s >= _LOOK_S:
                looked_s = self.world.now_s
                yield from self._ensure_may_act()
                yield from self._notice_abort()
                if self._abort:
                    raise AttemptFailedError(f"an operator asked to abort: {self._abort}")
                yield from self._look()
                alive = self._roster.alive()
                if gone := [name for name, member in bound.required.items() if alive.get(name) != member]:
                    raise AttemptFailedError(f"{gone} died or restarted")

    def _commit(self, command: commands.Commit) -> Steps:
        request = CommitRequest(
            epoch=self.epoch,
            attempt=command.attempt,
            baseline=command.target.baseline,
            acknowledged=command.acknowledged,
            policy_digest=command.target.policy_digest,
        )
        outcome = yield from self._record.commit(request)
        if outcome is CommitOutcome.FAILED:
            yield from self._notice_abort()
        return events.CommitReplied(outcome=outcome)

    def _update_baselines(self, record: CommitRecord) -> Steps:
        if self._alone:
            return events.BaselinesUpdated()
        self._committed = yield from self.job.commit(self, record)
        required = () if self._bound is None else self._bound.required.values()
        self._settled = frozenset(required)
        self._doubtful = dict.fromkeys(self._settled, frozenset())
        return events.BaselinesUpdated()

    def _stop_and_wait(self, attempt: AttemptId) -> Steps:
        if not self._alone:
            yield from self.job.tell(self, calls.StopSending(attempt))
        yield from self._look()
        concerned = self._concerned()
        asking = {name: self._to(member, calls.Stop(attempt), _CALL_S) for name, member in concerned.items()}
        while not all(future.is_done for future in asking.values()):
            yield self.world.any_of([future for future in asking.values() if not future.is_done], _LOOK_S)
            yield from self._look()
            alive = self._roster.alive()
            if all(future.is_done or alive.get(name) != concerned[name] for name, future in asking.items()):
                break
        alive = self._roster.alive()
        stopped = frozenset(name for name, future in asking.items() if future.is_done and future.error is None)
        retired = frozenset(name for name in set(asking) - stopped if alive.get(name) != concerned[name])
        if left := sorted(set(asking) - stopped - retired):
            return events.CommandFailed(reason=f"stop of {attempt}: {left} are alive and do not answer")
        unfinished = self._unfinished.attempt if self._unfinished is not None else None
        gone = frozenset(unfinished.required) - set(asking) if unfinished is not None else frozenset()
        return events.Stopped(survivors=stopped, retired=retired | gone)

    def _tell(self, body: calls.DropCaches | calls.ReopenGate) -> Steps:
        concerned = self._concerned()
        futures = {name: self._to(member, body, self._lease.lease_s * 2) for name, member in concerned.items()}
        for future in futures.values():
            yield self.world.any_of([future], self._lease.lease_s * 3)
        retired = frozenset(name for name, future in futures.items() if future.error is not None)
        for name in retired:
            self._doubtful.pop(concerned[name], None)
            self._settled -= {concerned[name]}
        return retired

    # --- small things -----------------------------------------------------------------------------------------------

    def _ensure_may_act(self) -> Steps:
        if self._fence.may_act(self.world.now_s):
            return
        state = yield from self._record.read()
        if state is None or state.epoch != self.epoch:
            raise CommitConflictError(f"{self.name}: another coordinator took over")
        sent_s = self.world.now_s
        yield self.call("store", calls.Beat("coordinator", f"{self.name}@{sent_s}"), self._lease.lease_s)
        self._fence.restore(sent_s)

    def _await_receivers(self) -> Steps:
        while True:
            yield from self._look()
            if self._roster.ready() and self._roster.is_decided():
                return
            yield self.sleep(_LOOK_S)
            yield from self._ensure_may_act()

    def _look(self) -> Steps:
        asked_s = self.world.now_s
        try:
            beats = yield self.call("store", calls.ReadBeats(), self._lease.lease_s)
        except RefitError:
            return
        self._roster.observe(beats, asked_s=asked_s, now_s=self.world.now_s)

    def _concerned(self) -> Mapping[ReceiverId, Member]:
        if self._bound is not None:
            return self._bound.required
        attempt = self._unfinished.attempt if self._unfinished is not None else None
        required = attempt.required if attempt is not None else ()
        return {name: member for name, member in self._roster.alive().items() if name in required}

    def _ask_all(self, asked: Mapping[ReceiverId, Member], body: Callable[[Member], Any]) -> Steps:
        """Ask all; the answers, or the first failure."""
        futures = {name: self._to(member, body(member), _CALL_S / 3) for name, member in asked.items()}
        yield from each(futures.values())
        return {name: future.value for name, future in futures.items()}

    def _to(self, member: Member, body: Any, timeout_s: float) -> Future:
        return self.call(member.receiver, calls.ToReceiver(self.epoch, member.incarnation, body), timeout_s)

    def _notice_abort(self) -> Steps:
        try:
            state = yield from self._record.read()
        except RefitError:
            return
        if state is not None and state.epoch == self.epoch:
            self._abort = state.abort or self._abort

    def _state(self) -> Steps:
        state = yield from self._record.read()
        if state is None:
            raise RejectedError("the record is gone")
        if state.epoch != self.epoch:
            raise CommitConflictError(f"{self.name}: another coordinator took over")
        return state

    def _bound_name(self) -> AttemptId | None:
        return None if self._bound is None else self._bound.attempt

    def _nonce(self) -> str:
        return f"{self.world.random.getrandbits(32):08x}"


class _Bound:
    """The attempt at hand."""

    def __init__(
        self,
        attempt: AttemptId,
        revision: int,
        command: commands.Prepare,
        target: CommitRecord,
        plan: RefitPlan,
        required: Mapping[ReceiverId, Member],
    ) -> None:
        self.attempt = attempt
        self.revision = revision
        self.command = command
        self.target = target
        self.plan = plan
        self.required = required
