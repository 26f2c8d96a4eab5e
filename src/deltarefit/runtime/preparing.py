"""Prepare: who takes part, what they hold, how each tensor travels, and binding it all to a fresh attempt (paper B.1)."""

from __future__ import annotations

from collections.abc import Mapping

from deltarefit.errors import AttemptFailedError, OperatorRequiredError, RefitError, RejectedError
from deltarefit.ids import AttemptId, PolicyVersion, ReceiverId, baseline_id
from deltarefit.plan import RefitPlan
from deltarefit.protocol import CommitRecord, PrepareRequest, commands
from deltarefit.records import Encoding
from deltarefit.runtime import messages
from deltarefit.runtime.calls import Answer, expect
from deltarefit.runtime.clock import Deadline, Pace
from deltarefit.runtime.comparing import compare
from deltarefit.runtime.members import Member
from deltarefit.runtime.planning import DigestCheck, make_plan
from deltarefit.runtime.refit_state import BoundAttempt, Identity, Session
from deltarefit.runtime.retaining import retained_whole
from deltarefit.transport import keys

__all__ = ["Preparation"]

_LOOK_S = 0.1
_ABORT_S = 1.0


class Preparation:
    """Prepares the attempts of one transition."""

    def __init__(self, session: Session, candidate: str) -> None:
        """``candidate`` names the fixed weights of the transition."""
        self._session = session
        self._candidate = candidate
        self._retired: set[Identity] = set()
        self._shortage: Deadline | None = None
        """Until when receivers may come back; one time for the whole transition."""

    def retire(self, identity: Identity) -> None:
        """This receiver takes no part in this transition any more. Under a new incarnation it is another one."""
        self._retired.add(identity)

    def required(self) -> dict[ReceiverId, Member]:
        """Live, prewarmed receivers, without those that were retired in this transition; too few are waited for.

        Raises:
            AttemptFailedError: too few came.
            OperatorRequiredError: a person asked to abort meanwhile.
        """
        session, count = self._session, self._session.settings.min_receivers
        required = self._usable()
        if len(required) < count and self._shortage is None:
            self._shortage = Deadline(session.clock, session.settings.join_timeout_s)
        pace = Pace(session.clock, first_s=_ABORT_S, most_s=_ABORT_S)
        while len(required) < count:
            if self._shortage is None or self._shortage.expired:
                retired = ", ".join(sorted(receiver for receiver, _ in self._retired)) or "none"
                raise AttemptFailedError(
                    f"{len(required)} receivers are ready ({', '.join(sorted(required)) or 'none'}), expected at least "
                    f"{count}; retired in this refit: {retired}; start receivers for this run ('deltarefit receiver'), and see "
                    f"'deltarefit status --run {session.store.url}'"
                )
            session.activity.begin(f"receivers to come back: {len(required)} of {count} are ready")
            session.clock.sleep(_LOOK_S)
            if pace.is_due:
                self._check_abort()
            required = self._usable()
        return required

    def _usable(self) -> dict[ReceiverId, Member]:
        """With many receivers a look costs many requests, so what was seen a moment ago counts."""
        session = self._session
        ready = session.members.ready(session.catalog.digest, max_age_s=session.settings.lease_s / 10)
        return {receiver: member for receiver, member in ready.items() if member.identity not in self._retired}

    def _check_abort(self) -> None:
        self._session.ensure_may_act()
        state = self._session.control.read()
        if state is not None and state.abort:
            raise OperatorRequiredError(f"an operator asked to abort: {state.abort}")

    def plan(self, command: commands.Prepare, required: Mapping[ReceiverId, Member]) -> RefitPlan:
        """Fix the encodings; receivers that cannot be taken at their word first show what they hold.

        Raises:
            RejectedError: a receiver started the run with other weights.
        """
        session = self._session
        repair = self._tensors_to_repair(required, is_retry=command.ordinal > 1)
        summaries = [session.members.summary(member) for member in required.values()]
        plan = make_plan(
            session.catalog,
            summaries,
            preferred=Encoding[session.settings.difference.upper()],
            num_owners=session.num_owners,
            dense=frozenset(session.catalog) if command.is_dense else repair | retained_whole(session, summaries),
        )
        session.store.put_if_absent(keys.plan(plan.digest), plan.to_wire())
        return plan

    def bind_record(
        self, command: commands.Prepare, attempt: AttemptId, plan: RefitPlan, required: Mapping[ReceiverId, Member]
    ) -> BoundAttempt:
        """Bind the control record to the attempt. Raises what ``ControlPlane.prepare`` raises."""
        session = self._session
        version = PolicyVersion(command.base.policy_version + 1)
        target = CommitRecord(version, baseline_id(version, session.ids.nonce()))
        state = session.control.prepare(
            PrepareRequest(
                epoch=session.epoch,
                attempt=attempt,
                baseline=target.baseline,
                base=command.base,
                mode=command.mode,
                is_dense=command.is_dense,
                candidate=self._candidate,
                plan_digest=plan.digest,
                required=frozenset(required),
                min_receivers=session.settings.min_receivers,
            )
        )
        return BoundAttempt(
            attempt,
            state.revision,
            command.mode.value,
            command.base,
            target,
            self._candidate,
            command.is_dense,
            plan,
            required,
            session.relays.choose(required, is_retry=command.ordinal > 1),
        )

    def bind_receivers(self, bound: BoundAttempt) -> None:
        """Bind every required receiver. Raises what the first of them answers."""
        session = self._session

        def body(member: Member) -> messages.Prepare:
            return messages.Prepare(
                attempt=bound.attempt,
                revision=bound.revision,
                base_version=bound.base.policy_version,
                target_version=bound.target.policy_version,
                baseline=bound.target.baseline,
                candidate=bound.candidate,
                mode=bound.mode,
                restores=bound.is_dense or member.identity not in session.settled,
                plan_digest=bound.plan.digest,
                num_owners=session.num_owners,
                delivery=session.delivery.value,
                transport=bound.transport,
            )

        answers = session.caller.ask(bound.required.values(), body, session.settings.reply_timeout_s)
        self._distrust_failures(bound.required, answers)
        for receiver, answer in sorted(answers.items()):
            expect(answer, messages.Done, receiver)

    # --- what receivers hold ----------------------------------------------------------------------------------------

    def _tensors_to_repair(self, required: Mapping[ReceiverId, Member], *, is_retry: bool) -> frozenset[str]:
        """Tensors that some receiver does not hold, or cannot prove to hold, at the base version.

        A receiver is asked when it is new, and at audits; not in a retry, where earlier attempts left a mixture on purpose.
        """
        session = self._session
        asked = {
            receiver: member
            for receiver, member in required.items()
            if member.identity not in session.doubtful or (session.is_audit_due and not is_retry)
        }
        answers = session.caller.ask(asked.values(), messages.Survey(), session.settings.reply_timeout_s)
        self._distrust_failures(asked, answers)
        holdings = {receiver: expect(answers[receiver], messages.Surveyed, receiver).holding for receiver in asked}
        for receiver, check in compare(session, session.committed, holdings, asked).items():
            self._judge(asked[receiver], check, is_start=session.is_first and not is_retry)
        return frozenset().union(*(session.doubtful[member.identity] for member in required.values()))

    def _distrust_failures(self, asked: Mapping[ReceiverId, Member], answers: Mapping[ReceiverId, Answer]) -> None:
        """A receiver that could not answer may have lost what it held: the next attempt asks it again."""
        for receiver, answer in answers.items():
            if isinstance(answer, RefitError):
                self._session.distrust(asked[receiver].identity)

    def _judge(self, member: Member, check: DigestCheck, *, is_start: bool) -> None:
        """Note what is doubtful about a receiver's resident bits.

        Raises:
            RejectedError: at the start of a run it holds other weights than the trainer: a wrong checkpoint.
        """
        session = self._session
        is_new = member.identity not in session.doubtful
        if is_new and not check.is_equal and is_start:
            raise RejectedError(
                f"receiver {member.receiver} holds other weights than the trainer: {check.describe(session.catalog)}; load the "
                "checkpoint that the trainer started from into it, or start the trainer from the receiver's"
            )
        unproven = check.unproven if is_new else ()
        earlier = session.doubtful.get(member.identity, frozenset())
        session.doubtful[member.identity] = earlier.union(check.differing, unproven)
