"""Who is required: members join and leave between attempts, and a name that restarted is somebody new."""

from __future__ import annotations

import pytest

from deltarefit.errors import RejectedError
from deltarefit.ids import BaselineId, PolicyVersion, ReceiverId
from deltarefit.protocol import CommitRecord, Membership, MemberStatus, RetirementProof

K3 = CommitRecord(PolicyVersion(3), BaselineId("b3"))
K4 = CommitRecord(PolicyVersion(4), BaselineId("b4"))
R1, R2, R3 = (ReceiverId(name) for name in ("r1", "r2", "r3"))


def three() -> Membership:
    members = Membership()
    for receiver in (R1, R2, R3):
        members.register(receiver, f"{receiver}-first")
        assert members.ready(receiver, f"{receiver}-first", K3.policy_version)
    return members


def test_a_receiver_killed_in_an_attempt_is_missing_from_the_retry_and_back_after_it_restored() -> None:
    members = three()
    assert members.required(K3) == {R1, R2, R3}
    assert members.retire(R3, "r3-first", RetirementProof.EXITED)
    assert members.required(K3) == {R1, R2}
    members.committed(K4, [R1, R2])
    members.register(R3, "r3-second")
    assert members.required(K4) == {R1, R2}
    assert members.behind(K4) == (R3,)
    assert members.ready(R3, "r3-second", K4.policy_version)
    assert members.required(K4) == {R1, R2, R3}


def test_a_joiner_that_restored_an_older_version_is_not_required_until_it_restored_again() -> None:
    members = three()
    late = ReceiverId("late")
    members.register(late, "s")
    members.committed(K4, [R1, R2, R3])
    members.ready(late, "s", K3.policy_version)
    assert members.required(K4) == {R1, R2, R3}
    members.ready(late, "s", K4.policy_version)
    assert late in members.required(K4)


def test_what_an_earlier_session_says_counts_no_more() -> None:
    members = three()
    members.register(R1, "r1-second")
    assert members.is_restarted(R1, "r1-first")
    assert not members.is_restarted(R1, "r1-second")
    assert not members.ready(R1, "r1-first", K3.policy_version)
    assert not members.retire(R1, "r1-first", RetirementProof.LEASE_EXPIRED)
    member = members.get(R1)
    assert member is not None
    assert member.status is MemberStatus.JOINING


def test_a_retired_session_cannot_come_back_but_registering_it_twice_is_harmless() -> None:
    members = three()
    members.retire(R1, "r1-first", RetirementProof.LEASE_EXPIRED)
    assert not members.ready(R1, "r1-first", K3.policy_version)
    assert members.register(R1, "r1-first").status is MemberStatus.RETIRED
    members.committed(K4, [R1])
    assert members.required(K4, is_dense=True) == {R2, R3}


def test_too_few_receivers_are_refused_and_the_text_says_why() -> None:
    members = Membership(min_receivers=2)
    with pytest.raises(RejectedError, match="none has registered; start receivers"):
        members.required(K3)
    members.register(R1, "s")
    members.register(R2, "s")
    members.ready(R2, "s", PolicyVersion(2))
    members.register(R3, "s")
    members.retire(R3, "s", RetirementProof.LEFT)
    with pytest.raises(
        RejectedError, match=r"r1 is still joining; r2 holds policy version 2; r3 is retired \(it left by itself"
    ):
        members.required(K3)
    assert members.required(K3, is_dense=True) == {R1, R2}
    assert Membership(min_receivers=0).required(K3) == frozenset()


def test_a_negative_minimum_is_refused() -> None:
    with pytest.raises(RejectedError, match="expected 0 or more"):
        Membership(min_receivers=-1)
