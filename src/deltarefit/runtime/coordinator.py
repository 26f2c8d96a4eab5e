"""Carries out the commands of one transition: the shell around ``protocol.TransitionMachine`` (paper Algorithms B.1, B.2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from deltarefit.canonical import Catalog, TensorDigest, digest_of_digests
from deltarefit.control import ControlPlane
from deltarefit.errors import AttemptFailedError, BaseMismatchError, CommitConflictError, RefitError, RejectedError
from deltarefit.ids import AttemptId, PolicyVersion, ReceiverId, attempt_id, baseline_id
from deltarefit.plan import RefitPlan
from deltarefit.protocol import commands, events
from deltarefit.protocol.commit import CommitRequest, PrepareRequest
from deltarefit.protocol.record import CommitRecord
from deltarefit.records import Encoding
from deltarefit.runtime import messages
from deltarefit.runtime.calls import Answer, Caller, PendingCall
from deltarefit.runtime.clock import Clock, IdSource
from deltarefit.runtime.events import EventLog, StageEvent
from deltarefit.runtime.members import Member, Members
from deltarefit.runtime.owner_group import OwnerGroup
from deltarefit.runtime.owner_worker import Build, CommitBaseline, OwnerReply, ReleaseAttempt, StopSending, sum_digests
from deltarefit.runtime.planning import check_digests, make_plan
from deltarefit.runtime.settings import PublisherSettings
from deltarefit.transport import OwnerEnd, RunStore, keys

__all__ = ["Coordinator", "Outcome", "Session"]

_MAX_BACKOFF_S = 30.0
AnswerT = TypeVar("AnswerT", messages.Completed, messages.Surveyed, messages.Done)
Identity = tuple[str, str]


@dataclass(slots=True)
class Session:
    """What one coordinator holds for as long as it owns the run."""

    store: RunStore
    control: ControlPlane
    holder: str
    epoch: int
    catalog: Catalog
    owners: OwnerGroup
    num_owners: int
    caller: Caller
    members: Members
    clock: Clock
    ids: IdSource
    settings: PublisherSettings
    log: EventLog
    policy_version: int
    """The committed version."""
    committed: dict[str, TensorDigest]
    """Digest of each canonical tensor of the committed policy."""
    doubtful: dict[Identity, frozenset[str]] = field(default_factory=dict)
    """Per receiver that showed what it holds: tensors that it does not hold, or cannot prove to hold, at the committed version.
    These are sent whole. A receiver that is not listed has not been asked yet."""
    num_refits: int = 0

    @property
    def is_first(self) -> bool:
        """Nothing was committed in this run yet, so every receiver must come with the weights that the run started from."""
        return self.policy_version == 0

    @property
    def is_audit_due(self) -> bool:
        every = self.settings.audit_every
        return self.num_refits == 0 or (every > 0 and self.num_refits % every == 0)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The attempt that is bound at the moment."""

    attempt: AttemptId
    mode: str
    base: CommitRecord
    target: CommitRecord
    plan: RefitPlan
    required: Mapping[ReceiverId, Member]


@dataclass(slots=True)
class Outcome:
    """What the transition produced; the report is made from it."""

    attempts: int = 0
    changed_elements: int = 0
    payloads: int = 0
    payload_nbytes: int = 0
    sent_nbytes: int = 0
    digests: dict[str, TensorDigest] = field(default_factory=dict)
    receivers: tuple[ReceiverId, ...] = ()
    audited: bool = False
    covered: str = ""
    t0_s: float = 0.0
    t1_s: float = 0.0
    events: list[StageEvent] = field(default_factory=list)


class Coordinator:
    """Executes commands of one transition and answers each with an event. Never raises what an event can say."""

    def __init__(self, session: Session, *, alone: bool = False) -> None:
        """``alone``: only recover what a former coordinator left; the owners take no part, as their baseline is new."""
        self._session = session
        self._alone = alone
        self._bound: _Attempt | None = None
        self._num_builds = 0
        self._candidate = f"{session.holder}-{session.ids.nonce()}"
        self.outcome = Outcome()

    def execute(self, command: commands.Command) -> events.Event:
        """Carry out one command (all but AskOperator and Finish, which the caller handles)."""
        try:
            return self._dispatch(command)
        except CommitConflictError as error:
            return events.Superseded(reason=str(error))
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
                body = messages.DropCaches(attempt, record.policy_version)
                return events.CachesDropped(retired=self._tell_all(body, "finish", attempt))
            case commands.ReopenGate(attempt=attempt, record=record):
                reopen = messages.ReopenGate(attempt, record.policy_version)
                return events.GateReopened(retired=self._tell_all(reopen, "finish", attempt))
            case commands.Backoff(num_failures=num_failures):
                pause_s = self._session.settings.retry_pause_s * 2.0 ** (num_failures - 1)
                self._session.clock.sleep(min(_MAX_BACKOFF_S, pause_s))
                return events.BackedOff()
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

    # --- prepare ----------------------------------------------------------------------------------------------------

    def _prepare(self, command: commands.Prepare) -> events.Event:
        """Check the set-up, bind the record, bind the receivers (paper B.1)."""
        session = self._session
        self._bound = None
        attempt = attempt_id(command.base.policy_version + 1, command.ordinal, session.ids.nonce())
        bound_record = False
        try:
            with session.log.stage("prepare", attempt):
                required = self._required(command.excluded)
                plan = self._plan(required, is_dense=command.is_dense, is_retry=command.ordinal > 1)
                version = PolicyVersion(command.base.policy_version + 1)
                target = CommitRecord(version, baseline_id(version, session.ids.nonce()))
                session.control.prepare(self._request(command, attempt, target, plan, required))
                bound_record = True
                self._bound = _Attempt(attempt, command.mode.value, command.base, target, plan, required)
                self._bind_receivers(self._bound)
        except RejectedError as error:
            return events.PrepareRejected(reason=str(error), attempt=attempt if bound_record else None)
        except CommitConflictError:
            raise
        except RefitError as error:
            return events.PrepareFailed(reason=str(error), attempt=attempt if bound_record else None)
        self.outcome.attempts = command.ordinal
        return events.Prepared(attempt=attempt, target=target, required=frozenset(required))

    def _request(
        self,
        command: commands.Prepare,
        attempt: AttemptId,
        target: CommitRecord,
        plan: RefitPlan,
        required: Mapping[ReceiverId, Member],
    ) -> PrepareRequest:
        return PrepareRequest(
            epoch=self._session.epoch,
            attempt=attempt,
            baseline=target.baseline,
            base=command.base,
            mode=command.mode,
            is_dense=command.is_dense,
            candidate=self._candidate,
            plan_digest=plan.digest,
            required=frozenset(required),
            min_receivers=self._session.settings.min_receivers,
        )

    def _required(self, excluded: frozenset[ReceiverId]) -> dict[ReceiverId, Member]:
        ready = self._session.members.ready(self._session.catalog.digest)
        required = {receiver: member for receiver, member in ready.items() if receiver not in excluded}
        if len(required) < self._session.settings.min_receivers:
            raise AttemptFailedError(
                f"{len(required)} receivers are ready, expected at least {self._session.settings.min_receivers}; "
                f"retired in this refit: {', '.join(sorted(excluded)) or 'none'}"
            )
        return required

    def _plan(self, required: Mapping[ReceiverId, Member], *, is_dense: bool, is_retry: bool) -> RefitPlan:
        """Fix the encodings; receivers that cannot be taken at their word first show what they hold."""
        session = self._session
        dense = frozenset(session.catalog) if is_dense else self._tensors_to_repair(required, is_retry=is_retry)
        plan = make_plan(
            session.catalog,
            [session.members.summary(member) for member in required.values()],
            preferred=Encoding[session.settings.difference.upper()],
            num_owners=session.num_owners,
            dense=dense,
        )
        session.store.put_if_absent(keys.plan(plan.digest), plan.to_wire())
        return plan

    def _tensors_to_repair(self, required: Mapping[ReceiverId, Member], *, is_retry: bool) -> frozenset[str]:
        """Tensors that some receiver does not hold, or cannot prove to hold, at the base version.

        A receiver is asked when it is new, and at audits; not in a retry, where earlier attempts left a mixture on purpose.
        """
        session = self._session
        asked = [
            member
            for member in required.values()
            if member.identity not in session.doubtful or (session.is_audit_due and not is_retry)
        ]
        answers = session.caller.ask(asked, messages.Survey(), session.settings.reply_timeout_s)
        for member in asked:
            shown = _expect(answers[member.receiver], messages.Surveyed, member.receiver)
            self._judge(member, shown.digests)
        return frozenset().union(*(session.doubtful[member.identity] for member in required.values()))

    def _judge(self, member: Member, digests: Mapping[str, str | None]) -> None:
        """Note what is doubtful about a receiver's resident bits.

        Raises:
            RejectedError: at the start of a run it holds other weights than the trainer: a wrong checkpoint.
        """
        session = self._session
        check = check_digests(session.committed, digests, session.members.summary(member).skipped)
        is_new = member.identity not in session.doubtful
        if is_new and not check.is_equal and session.is_first:
            raise RejectedError(
                f"receiver {member.receiver} holds other weights than the trainer: {check.describe(session.catalog)}; load the "
                "checkpoint that the trainer started from into it, or start the trainer from the receiver's"
            )
        unproven = check.unproven if is_new else ()
        earlier = session.doubtful.get(member.identity, frozenset())
        session.doubtful[member.identity] = earlier.union(check.differing, unproven)

    def _bind_receivers(self, bound: _Attempt) -> None:
        session = self._session
        body = messages.Prepare(
            bound.attempt,
            bound.base.policy_version,
            bound.target.policy_version,
            bound.mode,
            bound.plan.digest,
            session.num_owners,
        )
        answers = session.caller.ask(bound.required.values(), body, session.settings.reply_timeout_s)
        for receiver, answer in sorted(answers.items()):
            _expect(answer, messages.Done, receiver)

    # --- the schedule -----------------------------------------------------------------------------------------------

    def _run_schedule(self) -> events.Event:
        """Algorithm B.1, synchronous: gates close while owners compare and send; receivers apply what arrives."""
        session, bound = self._session, self._the_attempt()
        if self._num_builds == 0:
            self.outcome.t0_s = session.clock.monotonic_s()
        try:
            opening = self._post(bound, messages.OpenApply(bound.attempt))
            replies = self._build(bound)
            for receiver, answer in sorted(session.caller.collect(opening).items()):
                _expect(answer, messages.Done, receiver)
            audit = session.is_audit_due
            acknowledged = self._flush(bound, replies, audit=audit)
        except CommitConflictError:
            raise
        except RefitError as error:
            return events.AttemptFailed(reason=str(error))
        return events.Flushed(acknowledged=acknowledged, policy_digest=digest_of_digests(self.outcome.digests))

    def _build(self, bound: _Attempt) -> list[OwnerReply]:
        command = Build(
            bound.attempt,
            bound.mode,
            bound.base.policy_version,
            bound.target.policy_version,
            bound.plan.to_wire(),
            starts_transition=self._num_builds == 0,
        )
        self._num_builds += 1
        replies = self._session.owners.demand(command)
        self._note(replies)
        self.outcome.digests = sum_digests(replies)
        self.outcome.changed_elements = sum(reply.changed_elements for reply in replies)
        entries = [entry for reply in replies for entry in reply.entries]
        self.outcome.payloads = len(entries)
        self.outcome.payload_nbytes = sum(entry.nbytes for entry in entries)
        self.outcome.sent_nbytes += self.outcome.payload_nbytes
        return replies

    def _flush(self, bound: _Attempt, replies: Iterable[OwnerReply], *, audit: bool) -> frozenset[ReceiverId]:
        """Have every receiver finish and prove what it holds now."""
        session = self._session
        ended = tuple(OwnerEnd.of(reply.owner, reply.entries) for reply in replies)
        body = messages.Flush(bound.attempt, ended, audit)
        with session.log.stage("flush", bound.attempt):
            answers = session.caller.ask(bound.required.values(), body, session.settings.reply_timeout_s)
        for receiver, answer in sorted(answers.items()):
            completed = _expect(answer, messages.Completed, receiver)
            self.outcome.events.extend(completed.events)
            self.outcome.covered = completed.covered
            if completed.digests is not None:
                self._check_result(bound, receiver, completed.digests)
        self.outcome.audited = audit
        self.outcome.receivers = tuple(sorted(answers))
        return frozenset(answers)

    def _check_result(self, bound: _Attempt, receiver: ReceiverId, shown: Mapping[str, str | None]) -> None:
        skipped = self._session.members.summary(bound.required[receiver]).skipped
        check = check_digests(self.outcome.digests, shown, skipped)
        if not check.is_equal:
            identity = bound.required[receiver].identity
            self._session.doubtful[identity] = self._session.doubtful[identity].union(check.differing)
            raise BaseMismatchError(
                f"receiver {receiver} does not hold the candidate after applying {bound.attempt}: "
                f"{check.describe(self._session.catalog)}; these tensors are sent whole in the next attempt"
            )

    # --- commit and after -------------------------------------------------------------------------------------------

    def _commit(self, command: commands.Commit) -> events.Event:
        session = self._session
        request = CommitRequest(
            epoch=session.epoch,
            attempt=command.attempt,
            baseline=command.target.baseline,
            acknowledged=command.acknowledged,
            policy_digest=command.target.policy_digest,
        )
        with session.log.stage("commit", command.attempt):
            outcome = session.control.commit(request)
        return events.CommitReplied(outcome=outcome)

    def _update_baselines(self, record: CommitRecord) -> events.Event:
        """Owners take the candidate over. From here on the receivers of this attempt hold the committed version."""
        session, bound = self._session, self._bound
        if self._alone or bound is None:
            return events.BaselinesUpdated()  # a former coordinator's commit: the owners' new baseline is bound afterwards
        replies = session.owners.demand(CommitBaseline(bound.attempt, record.policy_version))
        self.outcome.t1_s = session.clock.monotonic_s()
        self._note(replies)
        session.committed = sum_digests(replies)
        session.policy_version = record.policy_version
        session.doubtful = {member.identity: frozenset() for member in bound.required.values()}
        session.num_refits += 1
        return events.BaselinesUpdated()

    def _stop_and_wait(self, attempt: AttemptId) -> events.Event:
        """No write of the attempt after this. A receiver that shows no sign of life has fenced itself and is retired."""
        session = self._session
        with session.log.stage("stop", attempt):
            if not self._alone:
                self._note(session.owners.demand(StopSending(attempt)))
            required = self._concerned()
            answers = session.caller.ask(required.values(), messages.Stop(attempt), session.settings.reply_timeout_s)
        stopped = frozenset(receiver for receiver, answer in answers.items() if isinstance(answer, messages.Done))
        alive = session.members.alive()
        retired = frozenset(
            receiver
            for receiver in set(answers) - stopped
            if receiver not in alive or alive[receiver].identity != required[receiver].identity
        )
        for receiver in sorted(set(answers) - stopped - retired):
            return events.CommandFailed(reason=f"stop of {attempt}: {answers[receiver]}")
        return events.Stopped(survivors=stopped, retired=retired)

    def _cleanup(self, attempt: AttemptId) -> events.Event:
        if self._alone:
            self._session.store.delete_prefix(keys.attempt_prefix(attempt))
            return events.CleanedUp()
        replies = self._session.owners.command(ReleaseAttempt(attempt))
        self._note(replies)
        failures = [reply.failure.text for reply in replies if reply.failure is not None]
        return events.CleanedUp(leftover="; ".join(failures[:3]))

    def _tell_all(self, body: messages.CallBody, stage: str, attempt: AttemptId) -> frozenset[ReceiverId]:
        """Tell every receiver of the attempt; those that do not do it have to rejoin."""
        session, concerned = self._session, self._concerned()
        with session.log.stage(stage, attempt):
            answers = session.caller.ask(concerned.values(), body, session.settings.reply_timeout_s)
        retired = frozenset(receiver for receiver, answer in answers.items() if not isinstance(answer, messages.Done))
        for receiver in retired:
            session.doubtful.pop(concerned[receiver].identity, None)
        return retired

    # --- small things -----------------------------------------------------------------------------------------------

    def _post(self, bound: _Attempt, body: messages.CallBody) -> PendingCall:
        settings = self._session.settings
        return self._session.caller.post(bound.required.values(), body, settings.reply_timeout_s + settings.request_timeout_s)

    def _the_attempt(self) -> _Attempt:
        if self._bound is None:
            raise RejectedError("coordinator: a command about an attempt came before any attempt was prepared")
        return self._bound

    def _concerned(self) -> Mapping[ReceiverId, Member]:
        """Receivers of the attempt; on a takeover, where they are not known here, every live one."""
        return self._bound.required if self._bound is not None else self._session.members.alive()

    def _note(self, replies: Iterable[OwnerReply]) -> None:
        for reply in replies:
            self.outcome.events.extend(reply.events)


def _expect(answer: Answer, kind: type[AnswerT], receiver: ReceiverId) -> AnswerT:
    """The answer, if it is of this kind; otherwise raise what it says."""
    if isinstance(answer, RefitError):
        raise answer
    if not isinstance(answer, kind):
        raise AttemptFailedError(f"receiver {receiver}: expected {kind.__name__}, got {type(answer).__name__}")
    return answer
