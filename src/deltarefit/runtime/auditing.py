"""The audit: every receiver proves, from the bits it holds at that moment, that they are the committed policy's."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from deltarefit.canonical import Catalog, TensorDigest, digest_of_digests
from deltarefit.errors import RefitError, RejectedError
from deltarefit.protocol import ControlState
from deltarefit.runtime import messages
from deltarefit.runtime.calls import Answer
from deltarefit.runtime.members import Member
from deltarefit.runtime.owner_worker import ShowBaseline, sum_digests
from deltarefit.runtime.planning import check_digests
from deltarefit.runtime.refit_state import Session
from deltarefit.wording import some_of

__all__ = ["AuditReport", "ReceiverAudit", "audit"]

_SHOWN = 5


class ReceiverAudit(msgspec.Struct, frozen=True, kw_only=True):
    """What one receiver holds, all its ranks together."""

    receiver: str
    engine: str
    proven: int = 0
    """Canonical tensors whose every element was shown to have the committed bits."""
    differing: tuple[str, ...] = ()
    """Canonical tensors of which a bit differs, on any rank, in name order. The next refit sends them whole."""
    disagreeing: dict[str, tuple[int, ...]] = {}
    """Of these, tensors of which ranks hold the same elements with different bits, and these ranks."""
    unproven: tuple[str, ...] = ()
    """Canonical tensors that the receiver cannot prove: its loader computes with them and no whole copy has come by yet (after
    the first refit one has, up to a limit), or ranks hold boxes that overlap in part."""
    skipped: tuple[str, ...] = ()
    """Canonical tensors of which no rank holds anything, as after a full reload."""
    drifted: tuple[str, ...] = ()
    """Storages that changed since prewarm in bytes that no canonical tensor reaches: padding, caches, runtime constants. Each
    as ``rank <n>: <name of the first tensor in it>``."""
    covered: str = ""
    """In words. State outside parameters and buffers is never covered."""
    failure: str = ""
    """Why the receiver gave no answer; empty if it did."""

    @property
    def is_clean(self) -> bool:
        """Whether everything was proven and nothing drifted."""
        return not (self.failure or self.differing or self.unproven or self.drifted)


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit found. It changed nothing."""

    policy_version: int
    """The committed version, which the receivers were compared with."""
    policy_digest: str
    """Its position-keyed digest: 32 hex digits over all canonical tensors."""
    num_tensors: int
    """Canonical tensors of the policy."""
    checked_nbytes: int
    """Their bytes."""
    receivers: tuple[ReceiverAudit, ...]
    source_differing: tuple[str, ...] = ()
    """Tensors whose committed bits in the trainers' own memory no longer have the digest that they were committed with."""

    @property
    def is_clean(self) -> bool:
        """Whether at least one receiver answered, and nothing is wrong or unproven anywhere."""
        return bool(self.receivers) and not self.source_differing and all(one.is_clean for one in self.receivers)

    def describe(self) -> str:
        """What is wrong, a line per receiver and kind; empty if nothing is."""
        lines = [_line("the trainers' committed copy", "differs in", self.source_differing)]
        for one in self.receivers:
            who = f"receiver {one.receiver}"
            lines += [
                f"{who}: {one.failure}" if one.failure else "",
                _line(who, "differs in", [_with_ranks(name, one.disagreeing) for name in one.differing]),
                _line(who, "cannot prove", one.unproven),
                _line(who, "changed outside the policy in", one.drifted),
            ]
        if not self.receivers:
            lines.append("no receiver answered")
        return "\n".join(line for line in lines if line)


def _line(who: str, what: str, names: tuple[str, ...] | list[str]) -> str:
    if not names:
        return ""
    return f"{who} {what} {some_of(names, _SHOWN)}"


def _with_ranks(name: str, disagreeing: Mapping[str, tuple[int, ...]]) -> str:
    return f"{name} (ranks {' and '.join(map(str, disagreeing[name]))} disagree)" if name in disagreeing else name


def audit(session: Session, state: ControlState) -> AuditReport:
    """Compare what every ready receiver holds with the committed policy. Rank 0, with the other ranks following.

    Raises:
        RejectedError: receivers need not hold the committed policy at present, so there is nothing to compare with.
        OwnersLostError: the training job's group is broken.
    """
    _require_settled(session, state)
    shown = sum_digests(session.owners.demand(ShowBaseline()))
    source_differing = tuple(name for name in session.catalog if shown.get(name) != session.committed.get(name))
    members = session.members.ready(session.catalog.digest)
    answers = session.caller.ask(members.values(), messages.Audit(), session.settings.reply_timeout_s)
    found = tuple(_judge(session, members[receiver], answer) for receiver, answer in sorted(answers.items()))
    return AuditReport(
        policy_version=state.record.policy_version,
        policy_digest=digest_of_digests(session.committed),
        num_tensors=len(session.catalog),
        checked_nbytes=session.catalog.nbytes,
        receivers=found,
        source_differing=source_differing,
    )


def _require_settled(session: Session, state: ControlState) -> None:
    if state.is_idle:
        return
    why = state.repair or "a refit is unfinished"
    raise RejectedError(
        f"audit of {session.store.url}: receivers need not hold the committed policy now ({why}); call refit() first, which "
        "brings them there"
    )


def _judge(session: Session, member: Member, answer: Answer) -> ReceiverAudit:
    """Compare one answer, and have the next refit send whole what is wrong."""
    receiver, engine = member.receiver, member.membership.engine
    if not isinstance(answer, messages.Audited):
        text = str(answer) if isinstance(answer, RefitError) else f"expected Audited, got {type(answer).__name__}"
        session.distrust(member.identity)
        return ReceiverAudit(receiver=receiver, engine=engine, failure=text)
    skipped = session.members.summary(member).skipped
    check = check_digests(session.committed, answer.digests, skipped)
    if member.identity in session.doubtful:  # others show what they hold before their first refit anyway
        session.doubtful[member.identity] = session.doubtful[member.identity].union(check.differing)
    return ReceiverAudit(
        receiver=receiver,
        engine=engine,
        proven=_num_held(session.catalog, session.committed, skipped) - len(check.differing) - len(check.unproven),
        differing=check.differing,
        disagreeing=answer.disagreeing,
        unproven=check.unproven,
        skipped=skipped,
        drifted=answer.drifted,
        covered=answer.covered,
    )


def _num_held(catalog: Catalog, committed: Mapping[str, TensorDigest], skipped: tuple[str, ...]) -> int:
    return len((catalog.keys() & committed.keys()) - set(skipped))
