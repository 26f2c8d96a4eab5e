"""Each rule of the control record: what it allows, what it refuses and with which error."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from deltarefit.errors import AttemptFailedError, CommitConflictError, OperatorRequiredError, RejectedError
from deltarefit.ids import AttemptId, BaselineId, EncodingMode, PolicyVersion, ReceiverId
from deltarefit.protocol import CommitOutcome, CommitRecord, CommitRequest, ControlState, PrepareRequest
from deltarefit.protocol import commit as rules

K3 = CommitRecord(PolicyVersion(3), BaselineId("b3"), "d3")
A1, A2 = AttemptId("a1"), AttemptId("a2")
R1, R2 = ReceiverId("r1"), ReceiverId("r2")


def held() -> ControlState:
    """A run at version 3, held by coordinator x in epoch 1."""
    return rules.acquire(rules.create_run("run", "setup", K3), holder="x", setup_digest="setup")


def request(attempt: AttemptId = A1, **changes: object) -> PrepareRequest:
    fields: dict[str, object] = {
        "epoch": 1, "attempt": attempt, "baseline": BaselineId(f"b4-{attempt}"), "base": K3, "mode": EncodingMode.MIXED,
        "is_dense": False, "candidate": "w4", "plan_digest": "plan", "required": frozenset({R2, R1}),
    }  # fmt: skip
    return PrepareRequest(**{**fields, **changes})  # type: ignore[arg-type]


def overwrite(attempt: AttemptId = A2, **changes: object) -> PrepareRequest:
    return request(attempt, **{"mode": EncodingMode.OVERWRITE, **changes})


def commit_of(attempt: AttemptId = A1, **changes: object) -> CommitRequest:
    fields: dict[str, object] = {
        "epoch": 1, "attempt": attempt, "baseline": BaselineId(f"b4-{attempt}"), "acknowledged": frozenset({R1, R2}),
        "policy_digest": "d4",
    }  # fmt: skip
    return CommitRequest(**{**fields, **changes})  # type: ignore[arg-type]


def bound() -> ControlState:
    return rules.prepare(held(), request())


def committed() -> ControlState:
    return rules.commit(bound(), commit_of())[1]


# ---------------------------------------------------------------------------------------------- who may act


def test_a_free_run_is_acquired_in_a_new_epoch_and_release_keeps_the_epoch() -> None:
    state = held()
    assert (state.epoch, state.coordinator) == (1, "x")
    freed = rules.release(state, epoch=1, holder="x")
    assert (freed.epoch, freed.coordinator) == (1, "")
    assert rules.acquire(freed, holder="y", setup_digest="setup").epoch == 2


def test_a_held_run_is_refused_by_the_holders_name_until_its_lease_has_expired() -> None:
    with pytest.raises(RejectedError, match=r"in use by live coordinator x \(epoch 1\)"):
        rules.acquire(held(), holder="y", setup_digest="setup")
    taken = rules.acquire(held(), holder="y", setup_digest="setup", expired_epoch=1)
    assert (taken.epoch, taken.coordinator) == (2, "y")


def test_a_proof_of_expiry_is_void_once_somebody_else_took_over() -> None:
    taken = rules.acquire(held(), holder="y", setup_digest="setup", expired_epoch=1)
    with pytest.raises(RejectedError, match="live coordinator y"):
        rules.acquire(taken, holder="z", setup_digest="setup", expired_epoch=1)


def test_acquiring_twice_changes_nothing() -> None:
    state = held()
    assert rules.acquire(state, holder="x", setup_digest="setup") is state


def test_another_model_is_refused() -> None:
    with pytest.raises(RejectedError, match="set-up digest other, expected setup"):
        rules.acquire(rules.create_run("run", "setup", K3), holder="x", setup_digest="other")


def test_a_replaced_coordinator_gets_a_conflict_from_everything_but_release_and_fence() -> None:
    taken = rules.acquire(bound(), holder="y", setup_digest="setup", expired_epoch=1)
    with pytest.raises(CommitConflictError, match="epoch 1, but the run is in epoch 2, held by y"):
        rules.prepare(taken, overwrite())
    with pytest.raises(CommitConflictError):
        rules.close_attempt(taken, epoch=1, attempt=A1)
    with pytest.raises(CommitConflictError):
        rules.record_abort(taken, epoch=1, repair="")
    with pytest.raises(CommitConflictError):
        rules.note_repair(taken, epoch=1, reason="x")
    assert rules.commit(taken, commit_of()) == (CommitOutcome.CONFLICT, taken)
    assert rules.release(taken, epoch=1, holder="x") is taken
    assert rules.mark_obsolete(taken, attempt=A1).attempt is not None


def test_a_released_run_must_be_acquired_again_before_anything_is_prepared() -> None:
    with pytest.raises(CommitConflictError, match="was released; acquire the run again"):
        rules.prepare(rules.release(held(), epoch=1, holder="x"), request())


# ---------------------------------------------------------------------------------------------- prepare


def test_prepare_binds_attempt_mode_baseline_and_receivers() -> None:
    attempt = bound().attempt
    assert attempt is not None
    assert (attempt.attempt, attempt.ordinal, attempt.required) == (A1, 1, (R1, R2))
    assert attempt.target == CommitRecord(PolicyVersion(4), BaselineId("b4-a1"))
    assert bound().open_attempt == attempt


def test_repeating_a_prepare_changes_nothing() -> None:
    state = bound()
    assert rules.prepare(state, request()) is state


def test_a_fenced_attempt_cannot_be_prepared_again() -> None:
    with pytest.raises(AttemptFailedError, match="a1: already over"):
        rules.prepare(rules.mark_obsolete(bound(), attempt=A1), request())


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"base": CommitRecord(PolicyVersion(2), BaselineId("b2"))}, CommitConflictError, "belongs to policy version 2"),
        ({"base": CommitRecord(PolicyVersion(3), BaselineId("b3x"))}, CommitConflictError, "baseline b3x"),
        ({"required": frozenset()}, RejectedError, r"0 required receivers \(none\), expected at least 1"),
        ({"min_receivers": 3}, RejectedError, r"2 required receivers \(r1, r2\), expected at least 3"),
        ({"baseline": K3.baseline}, RejectedError, "baseline id b3 was used before"),
        ({"is_dense": True}, RejectedError, "a dense attempt sends overwrites"),
    ],
)
def test_prepare_refuses(changes: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        rules.prepare(held(), request(**changes))


def test_no_receiver_at_all_can_be_allowed() -> None:
    assert rules.prepare(held(), request(required=frozenset(), min_receivers=0)).attempt is not None


def test_a_retry_must_be_an_overwrite_of_the_same_candidate_or_dense() -> None:
    state = rules.mark_obsolete(bound(), attempt=A1)
    with pytest.raises(RejectedError, match="mode mixed, expected overwrite"):
        rules.prepare(state, request(A2))
    with pytest.raises(RejectedError, match="candidate w4-other, expected w4 as in the earlier attempts, or a dense attempt"):
        rules.prepare(state, overwrite(candidate="w4-other"))
    assert rules.prepare(state, overwrite()).transition == rules.AdmittedTransition(PolicyVersion(4), "w4", False, 2)
    dense = rules.prepare(state, overwrite(candidate="w4-other", is_dense=True))
    with pytest.raises(RejectedError, match="dense"):
        rules.prepare(dense, overwrite(AttemptId("a3"), candidate="w4-other"))


def test_a_retry_needs_a_fresh_baseline_id() -> None:
    with pytest.raises(RejectedError, match="b4-a1 was used before"):
        rules.prepare(rules.mark_obsolete(bound(), attempt=A1), overwrite(baseline=BaselineId("b4-a1")))


def test_a_later_prepare_fences_the_attempt_before_it() -> None:
    state = rules.prepare(bound(), overwrite())
    assert rules.commit(state, commit_of(A1)) == (CommitOutcome.FAILED, state)


def test_a_committed_attempt_must_be_closed_before_the_next_prepare() -> None:
    state = committed()
    with pytest.raises(RejectedError, match="the commit of a1 is not closed yet"):
        rules.prepare(state, request(A2, base=state.record))


# ---------------------------------------------------------------------------------------------- commit and fence


def test_commit_publishes_version_baseline_and_digest() -> None:
    outcome, state = rules.commit(bound(), commit_of())
    assert outcome is CommitOutcome.SUCCESS
    assert state.record == CommitRecord(PolicyVersion(4), BaselineId("b4-a1"), "d4")
    assert state.committed_attempt is not None
    assert state.open_attempt is None
    assert state.transition is None


def test_committing_twice_is_a_success_that_changes_nothing() -> None:
    state = committed()
    assert rules.commit(state, commit_of()) == (CommitOutcome.SUCCESS, state)
    taken = rules.acquire(state, holder="y", setup_digest="setup", expired_epoch=1)
    assert rules.commit(taken, commit_of())[0] is CommitOutcome.SUCCESS


def test_commit_without_the_last_acknowledgement_is_refused_by_name() -> None:
    with pytest.raises(RejectedError, match=r"commit without completion of r2 \(1 of 2 required receivers\)"):
        rules.commit(bound(), commit_of(acknowledged=frozenset({R1, ReceiverId("stranger")})))


def test_commit_of_another_baseline_is_refused() -> None:
    with pytest.raises(RejectedError, match="commit of baseline b9"):
        rules.commit(bound(), commit_of(baseline=BaselineId("b9")))


def test_a_fenced_attempt_cannot_be_committed_and_the_fence_is_idempotent() -> None:
    state = rules.mark_obsolete(bound(), attempt=A1)
    assert rules.settled(state, attempt=A1)
    assert not rules.settled(bound(), attempt=A1)
    assert rules.commit(state, commit_of()) == (CommitOutcome.FAILED, state)
    assert rules.mark_obsolete(state, attempt=A1) is state


def test_a_fence_that_comes_after_the_commit_changes_nothing() -> None:
    state = committed()
    assert rules.mark_obsolete(state, attempt=A1) is state


def test_a_takeover_alone_settles_the_old_attempt() -> None:
    assert rules.settled(rules.acquire(bound(), holder="y", setup_digest="setup", expired_epoch=1), attempt=A1)


# ---------------------------------------------------------------------------------------------- close


def test_an_open_attempt_cannot_be_closed() -> None:
    with pytest.raises(RejectedError, match="a1: still open"):
        rules.close_attempt(bound(), epoch=1, attempt=A1)


def test_closing_a_failed_attempt_keeps_the_transition_admitted() -> None:
    state = rules.close_attempt(rules.mark_obsolete(bound(), attempt=A1), epoch=1, attempt=A1)
    assert state.attempt is None
    with pytest.raises(RejectedError, match="expected overwrite"):
        rules.prepare(state, request(A2))


def test_closing_an_attempt_that_no_receiver_accepted_forgets_the_transition() -> None:
    state = rules.close_attempt(rules.mark_obsolete(bound(), attempt=A1), epoch=1, attempt=A1, was_admitted=False)
    assert state.transition is None
    assert rules.prepare(state, request(A2, candidate="w4-other")).attempt is not None


def test_closing_twice_changes_nothing() -> None:
    state = rules.close_attempt(committed(), epoch=1, attempt=A1)
    assert state.attempt is None
    assert rules.close_attempt(state, epoch=1, attempt=A1) is state


# ---------------------------------------------------------------------------------------------- operators and repairs


def test_an_abort_fences_at_once_and_stops_further_prepares() -> None:
    state = rules.request_abort(bound(), reason="wrong data")
    assert rules.commit(state, commit_of())[0] is CommitOutcome.FAILED
    with pytest.raises(OperatorRequiredError, match="asked to abort the refit: wrong data"):
        rules.prepare(state, overwrite())
    ended = rules.record_abort(state, epoch=1, repair="may have been written")
    assert (ended.abort, ended.attempt, ended.transition, ended.repair) == ("", None, None, "may have been written")


def test_an_abort_with_nothing_under_way_or_without_a_reason_is_refused() -> None:
    with pytest.raises(RejectedError, match="no refit is under way"):
        rules.request_abort(held(), reason="x")
    with pytest.raises(RejectedError, match="no refit is under way"):
        rules.request_abort(committed(), reason="x")
    with pytest.raises(RejectedError, match="a reason is needed"):
        rules.request_abort(bound(), reason="")


def test_an_abort_of_an_attempt_that_no_receiver_accepted_goes_with_it() -> None:
    state = rules.request_abort(bound(), reason="x")
    assert rules.close_attempt(state, epoch=1, attempt=A1, was_admitted=False).abort == ""


def test_a_noted_repair_demands_dense_attempts_until_one_is_committed() -> None:
    state = rules.note_repair(held(), epoch=1, reason="the trainer came back with other weights")
    with pytest.raises(RejectedError, match=r"every element must be sent \(dense attempt\), because the trainer came back"):
        rules.prepare(state, overwrite())
    dense = rules.prepare(state, overwrite(is_dense=True))
    assert rules.commit(dense, commit_of(A2))[1].repair == ""


def test_a_repair_noted_during_a_sparse_attempt_outlives_its_commit() -> None:
    state = rules.note_repair(bound(), epoch=1, reason="x")
    assert rules.commit(state, commit_of())[1].repair == "x"


def test_a_repair_ends_only_when_every_required_receiver_was_restored() -> None:
    state = rules.note_repair(held(), epoch=1, reason="x")
    with pytest.raises(RejectedError, match=r"still to restore to policy version 3 .*: r2"):
        rules.repaired(state, restored=[R1], required=[R1, R2])
    assert rules.repaired(state, restored=[R1, R2], required=[R1, R2]).repair == ""
    clean = held()
    assert rules.repaired(clean, restored=[], required=[R1]) is clean


def test_a_baseline_is_reinitialised_only_between_attempts() -> None:
    with pytest.raises(RejectedError, match="attempt a1 is still bound"):
        rules.reinitialise(bound(), epoch=1, baseline=BaselineId("b3-new"), policy_digest="d3")


@pytest.mark.parametrize(("digest", "needs_dense"), [("d3", False), ("other", True), ("", True)])
def test_a_reinitialised_baseline_may_send_deltas_only_if_its_digest_is_the_same(digest: str, needs_dense: bool) -> None:
    state = rules.reinitialise(held(), epoch=1, baseline=BaselineId("b3-new"), policy_digest=digest)
    assert state.record == CommitRecord(PolicyVersion(3), BaselineId("b3-new"), "d3")
    assert bool(state.repair) is needs_dense
    assert rules.reinitialise(state, epoch=1, baseline=BaselineId("b3-new"), policy_digest=digest) is state


def test_an_unknown_committed_digest_never_counts_as_equal() -> None:
    state = replace(held(), record=CommitRecord(PolicyVersion(3), BaselineId("b3"), ""))
    assert rules.reinitialise(state, epoch=1, baseline=BaselineId("b3-new"), policy_digest="").repair


def test_each_write_has_its_own_revision_and_nonce_and_the_list_stays_short() -> None:
    state = held()
    for number in range(40):
        state = rules.stamp(state, f"n{number}")
    assert state.revision == 40
    assert state.nonces[0] == "n39"
    assert len(state.nonces) == 16
