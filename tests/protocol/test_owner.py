"""An owner's baseline moves when, and only when, the commit record names what it can make."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deltarefit.errors import AttemptFailedError, CommitConflictError, OperatorRequiredError, RejectedError
from deltarefit.ids import AttemptId, BaselineId, OwnerId, PolicyVersion
from deltarefit.protocol import BindOwner, CommitRecord, OwnerMachine, OwnerPhase, end_digest

A1, A2 = AttemptId("a1"), AttemptId("a2")
K3 = CommitRecord(PolicyVersion(3), BaselineId("b3"))


def bind(attempt: AttemptId = A1, revision: int = 5) -> BindOwner:
    target = CommitRecord(PolicyVersion(4), BaselineId(f"b4-{attempt}"))
    return BindOwner(
        attempt=attempt, revision=revision, base=K3, target=target, candidate="w4"
    )  # fmt: skip


def bound() -> OwnerMachine:
    owner = OwnerMachine(OwnerId(0), K3.baseline)
    owner.prepare(bind())
    return owner


def test_what_was_sent_makes_the_end_marker() -> None:
    owner = bound()
    assert [owner.sent(A1, digest) for digest in ("x", "y")] == [0, 1]
    marker = owner.end(A1)
    assert (marker.count, marker.digest) == (2, end_digest(["x", "y"]))
    assert owner.end(A1) == marker
    with pytest.raises(AttemptFailedError, match="nothing more may be sent"):
        owner.sent(A1, "z")


def test_nothing_is_sent_for_an_obsolete_attempt() -> None:
    owner = bound()
    assert owner.mark_obsolete(A1)
    assert not owner.is_active(A1)
    with pytest.raises(AttemptFailedError):
        owner.sent(A1, "x")
    with pytest.raises(AttemptFailedError):
        owner.end(A1)
    with pytest.raises(AttemptFailedError, match="is over here"):
        owner.prepare(bind())
    assert not owner.mark_obsolete(A2)


def test_the_baseline_moves_only_to_what_the_record_names_and_the_update_may_be_repeated() -> None:
    owner = bound()
    assert not owner.must_update(K3)
    assert owner.baseline == "b3"
    record = bind().target
    assert owner.must_update(record)
    assert owner.must_update(record), "asking must not move the baseline"
    owner.updated(record)
    assert owner.baseline == record.baseline
    assert not owner.must_update(record)
    owner.updated(record)
    assert (owner.baseline, owner.phase) == (record.baseline, OwnerPhase.IDLE)


def test_an_attempt_that_was_stopped_here_can_still_turn_out_committed() -> None:
    owner = bound()
    owner.mark_obsolete(A1)
    assert owner.must_update(bind(A1).target)


def test_an_earlier_attempt_cannot_be_committed_once_a_later_one_is_bound() -> None:
    """Binding the later one to the record fenced it; an owner that is told otherwise must not guess."""
    owner = bound()
    owner.prepare(bind(A2, revision=8))
    with pytest.raises(OperatorRequiredError, match="no candidate of that name"):
        owner.must_update(bind(A1).target)


def test_a_record_that_names_an_unknown_baseline_needs_an_operator() -> None:
    with pytest.raises(OperatorRequiredError, match="holds b3 and no candidate of that name"):
        bound().must_update(CommitRecord(PolicyVersion(4), BaselineId("b4-foreign")))
    restarted = OwnerMachine(OwnerId(0), None)
    with pytest.raises(OperatorRequiredError, match="holds no baseline"):
        restarted.must_update(K3)
    with pytest.raises(RejectedError, match="has no baseline; reinitialise it"):
        restarted.prepare(bind())
    restarted.reinitialised(K3.baseline)
    restarted.prepare(bind())


def test_a_baseline_that_lags_or_leads_the_record_is_refused_at_prepare() -> None:
    owner = OwnerMachine(OwnerId(0), BaselineId("b2"))
    with pytest.raises(RejectedError, match="its baseline is b2, the attempt starts from policy version 3"):
        owner.prepare(bind())


def test_the_candidate_is_fixed_until_the_transition_ends() -> None:
    owner = bound()
    other = replace(bind(A2, revision=8), candidate="w4-after-another-step")
    with pytest.raises(RejectedError, match="the optimizer must not step during a refit"):
        owner.prepare(other)
    owner.abandoned()
    owner.prepare(other)


def test_another_candidate_is_fine_in_a_new_transition() -> None:
    """Also if nobody told this owner how the former one ended."""
    owner = bound()
    owner.prepare(replace(bind(A2, revision=8), candidate="w5", starts_transition=True))
    assert owner.is_active(A2)


def test_an_older_prepare_is_a_conflict() -> None:
    owner = bound()
    owner.prepare(bind())
    with pytest.raises(CommitConflictError, match=r"\(revision 5\) came after it"):
        owner.prepare(bind(A2, revision=4))
