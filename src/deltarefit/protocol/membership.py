"""Which receivers a refit needs: members join and leave between attempts only (paper 6.3, B.2).

A receiver is known by its name and a *session*, which is new with every start of its process. It is required once it holds the
committed version and is prewarmed. Whoever restarts is somebody new under an old name: it has to restore first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from deltarefit.errors import RejectedError
from deltarefit.ids import PolicyVersion, ReceiverId
from deltarefit.protocol.record import CommitRecord

__all__ = ["Member", "MemberStatus", "Membership", "RetirementProof"]


class MemberStatus(Enum):
    """What a member is good for."""

    JOINING = "joining"
    """Registered; does not hold the committed version yet, or is not prewarmed."""
    READY = "ready"
    """Holds ``policy_version`` and is prewarmed."""
    RETIRED = "retired"
    """Proven unable to write or serve again in this session."""


class RetirementProof(Enum):
    """Why it is certain that a session cannot come back to life. Silence alone proves nothing."""

    EXITED = "its supervisor confirmed that the process ended"
    LEASE_EXPIRED = "its lease expired, and it fences itself before that"
    LEFT = "it left by itself, with its gate closed"
    RESTARTED = "its name registered again with a new session"


@dataclass(frozen=True, slots=True)
class Member:
    """One receiver of a run."""

    receiver: ReceiverId
    session: str
    status: MemberStatus
    policy_version: PolicyVersion | None = None
    reason: str = ""
    """Why it is retired."""


class Membership:
    """The members of a run, as one coordinator knows them. Rebuilt from registrations after a takeover."""

    def __init__(self, *, min_receivers: int = 1) -> None:
        if min_receivers < 0:
            raise RejectedError(f"membership: min_receivers {min_receivers}, expected 0 or more")
        self._min_receivers = min_receivers
        self._members: dict[ReceiverId, Member] = {}

    @property
    def members(self) -> tuple[Member, ...]:
        """All that are known, in name order."""
        return tuple(self._members[name] for name in sorted(self._members))

    def get(self, receiver: ReceiverId) -> Member | None:
        return self._members.get(receiver)

    def register(self, receiver: ReceiverId, session: str) -> Member:
        """A receiver announced itself. The same session again changes nothing; a new session starts from JOINING."""
        known = self._members.get(receiver)
        if known is not None and known.session == session:
            return known
        member = Member(receiver, session, MemberStatus.JOINING)
        self._members[receiver] = member
        return member

    def ready(self, receiver: ReceiverId, session: str, policy_version: PolicyVersion) -> bool:
        """It restored ``policy_version`` and is prewarmed. False if that session is not the current one or is retired."""
        known = self._members.get(receiver)
        if known is None or known.session != session or known.status is MemberStatus.RETIRED:
            return False
        self._members[receiver] = replace(known, status=MemberStatus.READY, policy_version=policy_version)
        return True

    def retire(self, receiver: ReceiverId, session: str, proof: RetirementProof) -> bool:
        """It cannot come back in this session. False if that session is not the current one."""
        known = self._members.get(receiver)
        if known is None or known.session != session:
            return False
        self._members[receiver] = replace(known, status=MemberStatus.RETIRED, policy_version=None, reason=proof.value)
        return True

    def required(self, record: CommitRecord, *, is_dense: bool = False) -> frozenset[ReceiverId]:
        """Who must acknowledge an attempt that starts from ``record``.

        Args:
            record: the committed record.
            is_dense: every element is sent, so members that do not hold the committed version take part too.

        Raises:
            RejectedError: fewer than ``min_receivers``; the text says who is missing and why.
        """
        named = frozenset(
            member.receiver
            for member in self._members.values()
            if (member.status is MemberStatus.READY and member.policy_version == record.policy_version)
            or (is_dense and member.status is not MemberStatus.RETIRED)
        )
        if len(named) < self._min_receivers:
            raise RejectedError(
                f"{len(named)} receivers are ready at {record}, expected at least {self._min_receivers}: "
                + ("; ".join(self._why_not(record)) or "none has registered; start receivers for this run")
            )
        return named

    def _why_not(self, record: CommitRecord) -> list[str]:
        texts = []
        for member in self.members:
            if member.status is MemberStatus.RETIRED:
                texts.append(f"{member.receiver} is retired ({member.reason})")
            elif member.status is MemberStatus.JOINING:
                texts.append(f"{member.receiver} is still joining")
            elif member.policy_version != record.policy_version:
                texts.append(f"{member.receiver} holds policy version {member.policy_version}")
        return texts

    def behind(self, record: CommitRecord) -> tuple[ReceiverId, ...]:
        """Members that have to restore the committed version before they count."""
        return tuple(
            member.receiver
            for member in self.members
            if member.status is not MemberStatus.RETIRED and member.policy_version != record.policy_version
        )

    def committed(self, record: CommitRecord, acknowledged: Iterable[ReceiverId]) -> None:
        """A commit took effect: whoever acknowledged it holds its version; all others fell behind."""
        for receiver in acknowledged:
            known = self._members.get(receiver)
            if known is not None and known.status is not MemberStatus.RETIRED:
                self._members[receiver] = replace(known, status=MemberStatus.READY, policy_version=record.policy_version)

    def is_restarted(self, receiver: ReceiverId, session: str) -> bool:
        """Whether ``receiver`` registered again since ``session``: the earlier process is gone, with what it held."""
        known = self._members.get(receiver)
        return known is not None and known.session != session
