"""The receiving half: late, torn, doubled, missing and disordered payloads; order, room, and what weights are worth."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltarefit.errors import (
    AttemptFailedError,
    CommitConflictError,
    OperatorRequiredError,
    PayloadInvalidError,
    PayloadMissingError,
    RejectedError,
)
from deltarefit.ids import AttemptId, BaselineId, EncodingMode, OwnerId, PayloadId, PolicyVersion, ReceiverId
from deltarefit.protocol import (
    NEXT_PHASE,
    Arrival,
    CommitRecord,
    Delivery,
    Doubt,
    EndMarker,
    Phase,
    PrepareAttempt,
    Reception,
    ReceptionSettings,
    Resident,
    Verdict,
    end_digest,
)
from deltarefit.protocol.reception_table import Verb

A1, A2 = AttemptId("a1"), AttemptId("a2")
SYNC, ASYNC = Delivery.SYNCHRONOUS, Delivery.ASYNCHRONOUS
K4 = CommitRecord(PolicyVersion(4), BaselineId("b-a1"))


def request(attempt: AttemptId = A1, **changes: object) -> PrepareAttempt:
    plain = PrepareAttempt(
        attempt=attempt, revision=5 if attempt == A1 else 9, base_version=PolicyVersion(3), target_version=PolicyVersion(4),
        baseline=BaselineId(f"b-{attempt}"), plan_digest="plan", mode=EncodingMode.MIXED, is_dense=False, candidate="w4",
        owners=(OwnerId(0), OwnerId(1)), delivery=SYNC,
    )  # fmt: skip
    return replace(plain, **changes)


RETRY = request(A2, mode=EncodingMode.OVERWRITE)


def arrival(sequence: int, owner: int = 0, attempt: AttemptId = A1, **changes: object) -> Arrival:
    plain = Arrival(
        payload=PayloadId(attempt, sequence, OwnerId(owner)), base_version=PolicyVersion(3), target_version=PolicyVersion(4),
        plan_digest="plan", nbytes=10, digest=f"d{owner}.{sequence}",
    )  # fmt: skip
    return replace(plain, **changes)


def marker(owner: int, count: int, attempt: AttemptId = A1) -> EndMarker:
    digest = end_digest(f"d{owner}.{sequence}" for sequence in range(count))
    return EndMarker(attempt=attempt, owner=OwnerId(owner), count=count, digest=digest)


def reception(prepare: PrepareAttempt | None = None, **changes: object) -> Reception:
    """A receiver at version 3, bound to ``prepare``."""
    made = Reception(
        ReceiverId("r1"), resident=Resident(policy_version=PolicyVersion(3)), settings=ReceptionSettings(**changes)  # type: ignore[arg-type]
    )  # fmt: skip
    if prepare is not None:
        made.prepare(prepare)
    return made


def applying(prepare: PrepareAttempt | None = None, **changes: object) -> Reception:
    made = reception(prepare or request(), **changes)
    assert made.attempt is not None
    assert made.close_gate(made.attempt)
    assert made.open_apply(made.attempt)
    return made


def apply_all(receiver: Reception) -> list[PayloadId]:
    """Decode and write whatever may be written now."""
    done = []
    while True:
        while receiver.next_to_decode() is not None:
            pass
        payload = receiver.take()
        if payload is None:
            return done
        receiver.applied(payload)
        done.append(payload)


def completed(prepare: PrepareAttempt | None = None) -> Reception:
    made = applying(prepare)
    assert made.attempt is not None
    for owner in (0, 1):
        made.arrive(arrival(0, owner, made.attempt))
        made.end(marker(owner, 1, made.attempt))
    apply_all(made)
    made.complete(made.attempt)
    return made


# ---------------------------------------------------------------------------------------------- attempt, content, identity


def test_a_payload_of_an_obsolete_attempt_is_dropped_even_if_it_is_wrong_in_every_way() -> None:
    receiver = reception(request())
    receiver.mark_obsolete(A1)
    receiver.prepare(RETRY)
    late = arrival(0, owner=9, plan_digest="x", base_version=PolicyVersion(0))
    assert receiver.arrive(late) is Verdict.DROP_LATE
    assert (receiver.num_late, receiver.phase, receiver.failure) == (1, Phase.RECEIVING, "")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"base_version": PolicyVersion(2)}, "base version 2, expected 3"),
        ({"target_version": PolicyVersion(5)}, "target version 5, expected 4"),
        ({"plan_digest": "other"}, "plan other, expected plan"),
        ({"payload": PayloadId(A1, 0, OwnerId(7))}, "owner 7 has no part in a1"),
        ({"payload": PayloadId(A1, 8, OwnerId(0))}, "sequence 8, expected 0 to 7"),
        ({"payload": PayloadId(A1, -1, OwnerId(0))}, "sequence -1"),
        ({"payload": PayloadId(A1, 0, OwnerId(0)), "digest": "other"}, "ids are never reused"),
        ({"payload": PayloadId(A1, 0, OwnerId(0)), "nbytes": 11}, "ids are never reused"),
    ],
)
def test_a_payload_that_contradicts_the_attempt_fails_it(change: dict[str, object], text: str) -> None:
    receiver = applying(max_payloads_per_owner=8)
    assert receiver.arrive(arrival(0)) is Verdict.QUEUE
    wrong = replace(arrival(0, digest="d0.0") if "payload" in change else arrival(1), **change)
    with pytest.raises(PayloadInvalidError, match=text):
        receiver.arrive(wrong)
    assert text in receiver.failure
    assert receiver.take() is None, "a failed attempt goes on applying"
    assert receiver.arrive(arrival(1)) is Verdict.DROP_LATE


@pytest.mark.parametrize("is_applied", [False, True])
def test_an_equal_duplicate_is_ignored_and_a_different_one_fails_before_and_after_application(is_applied: bool) -> None:
    receiver = applying()
    receiver.arrive(arrival(0))
    if is_applied:
        assert apply_all(receiver) == [PayloadId(A1, 0, OwnerId(0))]
    assert receiver.arrive(arrival(0)) is Verdict.IGNORE_DUPLICATE
    assert apply_all(receiver) == ([] if is_applied else [PayloadId(A1, 0, OwnerId(0))])
    with pytest.raises(PayloadInvalidError, match="ids are never reused"):
        receiver.arrive(arrival(0, digest="other"))


def test_a_wrong_base_is_found_before_the_duplicate_is_recognised() -> None:
    receiver = applying()
    receiver.arrive(arrival(0))
    with pytest.raises(PayloadInvalidError, match="base version"):
        receiver.arrive(arrival(0, base_version=PolicyVersion(2)))


# ---------------------------------------------------------------------------------------------- end markers, arrival check


def test_what_is_missing_is_named() -> None:
    receiver = applying()
    receiver.arrive(arrival(1, 1))
    with pytest.raises(PayloadMissingError, match=r"a1/owner 0/end marker, a1/owner 1/payload 0$"):
        receiver.check_arrivals(A1, [marker(1, 2)])
    assert receiver.phase is Phase.APPLYING, "asking what is missing must not fail the attempt"
    receiver.arrive(arrival(0, 1))
    receiver.check_arrivals(A1, [marker(0, 0)])
    receiver.check_arrivals(A1)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (marker(0, 1), "1 payloads, but sequence 1 arrived"),
        (replace(marker(0, 2), digest="0" * 32), "its end marker says 0000"),
        (replace(marker(0, 2), owner=OwnerId(5)), "owner 5 has no part"),
        (replace(marker(0, 2), count=-1), "-1 payloads, expected 0 to"),
        (replace(marker(0, 2), count=1 << 40), "payloads, expected 0 to"),
    ],
)
def test_an_end_marker_that_contradicts_what_arrived_fails_the_attempt(wrong: EndMarker, text: str) -> None:
    receiver = applying()
    receiver.arrive(arrival(0))
    receiver.arrive(arrival(1))
    with pytest.raises(PayloadInvalidError, match=text):
        receiver.end(wrong)
    assert receiver.phase is Phase.FAILED


def test_an_end_marker_may_come_twice_but_not_differ_and_nothing_may_follow_it() -> None:
    receiver = applying()
    receiver.end(marker(0, 2))
    receiver.end(marker(0, 2))
    with pytest.raises(PayloadInvalidError, match="its owner ended after 2 payloads"):
        receiver.arrive(arrival(2))
    other = applying()
    other.end(marker(0, 2))
    with pytest.raises(PayloadInvalidError, match="3 payloads, but 2 in an earlier one"):
        other.end(marker(0, 3))


def test_the_joint_digest_is_checked_when_the_last_payload_comes_after_the_marker() -> None:
    receiver = applying()
    receiver.end(marker(0, 2))
    receiver.arrive(arrival(0))
    with pytest.raises(PayloadInvalidError, match="joint digest"):
        receiver.arrive(arrival(1, digest="another payload under a right id"))


# ---------------------------------------------------------------------------------------------- order and room


def test_the_declared_order_goes_by_sequence_then_owner_and_skips_owners_that_ended() -> None:
    receiver = applying()
    for sequence, owner in ((2, 0), (1, 0), (0, 1), (0, 0)):
        receiver.arrive(arrival(sequence, owner))
    assert [(p.sequence, p.owner) for p in apply_all(receiver)] == [(0, 0), (0, 1), (1, 0)]
    assert receiver.next_payload() == PayloadId(A1, 1, OwnerId(1))
    receiver.end(marker(1, 1))
    assert [(p.sequence, p.owner) for p in apply_all(receiver)] == [(2, 0)]
    assert not receiver.is_drained
    receiver.end(marker(0, 3))
    assert receiver.is_drained
    assert receiver.next_payload() is None


def test_one_slot_is_kept_for_the_next_payload_in_order() -> None:
    receiver = applying(request(owners=(OwnerId(0),)), queue_slots=2)
    assert [receiver.arrive(arrival(sequence)) for sequence in (2, 1, 0)] == [Verdict.QUEUE, Verdict.WAIT, Verdict.QUEUE]
    assert apply_all(receiver) == [PayloadId(A1, 0, OwnerId(0))]
    assert receiver.arrive(arrival(1)) is Verdict.QUEUE
    assert [p.sequence for p in apply_all(receiver)] == [1, 2]


def test_waiting_notes_nothing() -> None:
    receiver = reception(request(), queue_slots=1)
    assert receiver.arrive(arrival(1)) is Verdict.WAIT
    assert receiver.arrive(arrival(1)) is Verdict.WAIT, "a payload that waits must not count as accepted"


def _deliver(counts: list[int], slots: int, delivery: Delivery, seed: int) -> list[tuple[int, int]]:
    """Blocking senders, one per payload, in a random order with duplicates; returns the order of application."""
    dice = random.Random(seed)
    owners = tuple(OwnerId(owner) for owner in range(len(counts)))
    receiver = applying(request(owners=owners, delivery=delivery), queue_slots=slots)
    waiting = [arrival(sequence, owner) for owner, count in enumerate(counts) for sequence in range(count)]
    waiting += dice.choices(waiting, k=3) if waiting else []
    ends = [marker(owner, count) for owner, count in enumerate(counts)]
    done: list[tuple[int, int]] = []
    for _ in range(20 * (len(waiting) + len(ends)) + 1):
        dice.shuffle(waiting)
        waiting = [one for one in waiting if receiver.arrive(one) is Verdict.WAIT]
        if ends and dice.random() < 0.3:
            receiver.end(ends.pop(dice.randrange(len(ends))))
        done += [(payload.sequence, payload.owner) for payload in apply_all(receiver)]
        if not waiting and not ends:
            break
    assert receiver.is_drained, "application got stuck"
    assert receiver.complete(A1).num_payloads == sum(counts)
    return done


@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    slots=st.integers(1, 4),
    delivery=st.sampled_from(Delivery),
    seed=st.integers(0, 2**32),
)
def test_any_arrival_order_is_applied_once_in_the_one_order_and_never_gets_stuck(
    counts: list[int], slots: int, delivery: Delivery, seed: int
) -> None:
    expected = sorted((sequence, owner) for owner, count in enumerate(counts) for sequence in range(count))
    assert _deliver(counts, slots, delivery, seed) == expected


def test_without_the_kept_slot_the_same_senders_get_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    def room_without_reserve(queue: object, arrival: Arrival) -> Verdict:
        del arrival
        return Verdict.QUEUE if queue._num_queued < queue._settings.queue_slots else Verdict.WAIT  # type: ignore[attr-defined]

    monkeypatch.setattr("deltarefit.protocol.apply_queue.ApplyQueue.room_for", room_without_reserve)
    with pytest.raises(AssertionError, match="got stuck"):
        _deliver_in_many_orders()


def _deliver_in_many_orders() -> None:
    for seed in range(20):
        _deliver([5], 2, SYNC, seed)


def test_staging_is_bounded_in_bytes_and_released_by_decoding() -> None:
    receiver = applying(request(delivery=ASYNC), staging_limit_nbytes=25)
    assert [receiver.arrive(arrival(n)) for n in range(3)] == [Verdict.STAGE, Verdict.STAGE, Verdict.SPILL]
    assert receiver.next_to_decode() == PayloadId(A1, 0, OwnerId(0))
    assert receiver.arrive(arrival(3)) is Verdict.STAGE


def test_staging_without_spilling_fails_the_attempt_and_names_the_need() -> None:
    receiver = applying(request(delivery=ASYNC), staging_limit_nbytes=15, may_spill=False)
    receiver.arrive(arrival(0))
    with pytest.raises(AttemptFailedError, match="needs at least 20 bytes, the limit is 15"):
        receiver.arrive(arrival(1))
    assert receiver.phase is Phase.FAILED


@pytest.mark.parametrize("decodes_while_serving", [False, True])
def test_asynchronous_delivery_takes_nothing_before_open_apply_and_decodes_no_more_than_there_are_slots(
    decodes_while_serving: bool,
) -> None:
    receiver = reception(request(delivery=ASYNC, owners=(OwnerId(0),)), queue_slots=2)
    for sequence in range(4):
        receiver.arrive(arrival(sequence))
    decoded = [receiver.next_to_decode() for _ in range(3)] if decodes_while_serving else []
    assert receiver.take() is None, "a payload was taken while the engine served"
    receiver.close_gate(A1)
    receiver.open_apply(A1)
    if not decodes_while_serving:
        assert receiver.take() is None, "a payload was taken before it was decoded"
        decoded = [receiver.next_to_decode() for _ in range(3)]
    assert [p.sequence if p else None for p in decoded] == [0, 1, None]
    first = receiver.take()
    assert first is not None
    receiver.applied(first)
    again = receiver.next_to_decode()
    assert again is not None
    assert again.sequence == 2


# ---------------------------------------------------------------------------------------------- apply, complete, stop


def test_nothing_is_taken_before_open_apply_and_only_the_active_attempt_opens() -> None:
    receiver = reception(request())
    receiver.arrive(arrival(0))
    assert receiver.take() is None
    assert not receiver.open_apply(AttemptId("older"))
    with pytest.raises(RejectedError, match="with the request gate open"):
        receiver.open_apply(A1)
    receiver.close_gate(A1)
    assert receiver.open_apply(A1)
    assert receiver.take() == PayloadId(A1, 0, OwnerId(0))
    assert receiver.take() is None, "one write at a time"


def test_completion_needs_every_payload_applied() -> None:
    receiver = applying()
    receiver.arrive(arrival(0))
    with pytest.raises(PayloadMissingError, match="not complete: a1/owner 0/end marker"):
        receiver.complete(A1)
    receiver.end(marker(0, 1))
    receiver.end(marker(1, 0))
    with pytest.raises(PayloadMissingError, match="a1/owner 0/payload 0 and what follows it is not applied yet"):
        receiver.complete(A1)
    apply_all(receiver)
    assert receiver.complete(A1) == receiver.complete(A1)


def test_completion_is_refused_before_open_apply_and_after_a_failure() -> None:
    receiver = reception(request())
    for owner in (0, 1):
        receiver.end(marker(owner, 0))
    with pytest.raises(AttemptFailedError, match="before open_apply"):
        receiver.complete(A1)
    receiver.fail(A1, "the loader bypassed the hook")
    with pytest.raises(AttemptFailedError, match="the loader bypassed the hook"):
        receiver.complete(A1)


def test_an_empty_changed_set_completes_and_is_committed() -> None:
    receiver = applying()
    for owner in (0, 1):
        receiver.end(marker(owner, 0))
    receiver.complete(A1)
    assert receiver.committed(K4)
    assert receiver.resident.policy_version == 4


def test_stop_waits_for_the_write_in_progress_and_cleanup_for_the_stop() -> None:
    receiver = applying()
    receiver.arrive(arrival(0))
    writing = receiver.take()
    assert writing is not None
    receiver.mark_obsolete(A1)
    assert not receiver.is_quiet(A1)
    with pytest.raises(AttemptFailedError, match="stop it and wait before cleanup"):
        receiver.cleanup(A1)
    with pytest.raises(AttemptFailedError, match="cannot begin while a1/owner 0/payload 0 is being written"):
        receiver.prepare(RETRY)
    receiver.applied(writing)
    assert receiver.is_quiet(A1)
    assert receiver.cleanup(A1)
    assert not receiver.cleanup(A1)


def test_a_failed_write_leaves_the_attempt_failed_and_quiet() -> None:
    receiver = applying()
    receiver.arrive(arrival(0))
    writing = receiver.take()
    assert writing is not None
    receiver.write_failed(writing, "copy was not intercepted")
    assert receiver.is_quiet(A1)
    assert receiver.failure == "a1/owner 0/payload 0: copy was not intercepted"


def test_everything_of_a_replaced_attempt_is_ignored_and_its_stop_is_quiet_at_once() -> None:
    receiver = applying()
    receiver.mark_obsolete(A1)
    receiver.prepare(RETRY)
    before = (receiver.phase, receiver.resident, receiver.attempt)
    assert receiver.is_quiet(A1)
    assert not receiver.open_apply(A1)
    assert not receiver.close_gate(A1)
    assert not receiver.mark_obsolete(A1)
    assert not receiver.cleanup(A1)
    assert not receiver.reopen_gate(A1, K4)
    receiver.fail(A1, "old news")
    receiver.end(marker(0, 3))
    assert (receiver.phase, receiver.resident, receiver.attempt) == before
    with pytest.raises(CommitConflictError, match=r"was bound by record revision 5, but a2 \(revision 9\) came after it"):
        receiver.prepare(request())


def test_open_apply_after_mark_obsolete_is_ignored() -> None:
    receiver = reception(request())
    receiver.close_gate(A1)
    receiver.mark_obsolete(A1)
    assert not receiver.open_apply(A1)
    assert receiver.take() is None


def test_repeating_a_prepare_changes_nothing_and_does_not_revive_what_is_over() -> None:
    receiver = applying()
    receiver.arrive(arrival(0))
    receiver.prepare(request())
    assert receiver.phase is Phase.APPLYING
    assert receiver.arrive(arrival(0)) is Verdict.IGNORE_DUPLICATE
    receiver.mark_obsolete(A1)
    with pytest.raises(AttemptFailedError, match="a1 is over here"):
        receiver.prepare(request())


def test_a_prepare_that_comes_after_its_attempt_was_stopped_binds_nothing() -> None:
    receiver = reception()
    assert not receiver.mark_obsolete(A1)
    assert receiver.is_quiet(A1)
    with pytest.raises(AttemptFailedError, match="a1 is over here"):
        receiver.prepare(request())
    receiver.prepare(RETRY)


def test_a_repeated_prepare_of_a_failed_attempt_says_why_it_failed() -> None:
    receiver = reception(request())
    receiver.fail(A1, "torn payload")
    with pytest.raises(AttemptFailedError, match="torn payload"):
        receiver.prepare(request())


# ---------------------------------------------------------------------------------------------- what the weights are worth


def test_weights_are_in_doubt_from_the_first_write_until_the_commit_of_what_was_completed() -> None:
    receiver = applying()
    assert receiver.resident.doubt is None
    receiver.arrive(arrival(0))
    receiver.take()
    assert receiver.resident.doubt == Doubt("w4")
    assert not receiver.committed(K4), "a commit of an attempt that is not completed here ended the doubt"
    done = completed()
    assert not done.committed(replace_record(K4, "b-other"))
    assert not done.resident.is_servable(K4)
    assert done.committed(K4)
    assert done.resident == Resident(policy_version=PolicyVersion(4), is_gate_closed=True)


def replace_record(record: CommitRecord, baseline: str) -> CommitRecord:
    return CommitRecord(record.policy_version, BaselineId(baseline), record.policy_digest)


def test_the_gate_opens_only_on_committed_weights_and_only_for_the_last_attempt() -> None:
    receiver = completed()
    with pytest.raises(OperatorRequiredError, match=r"gate stays closed: weights are in doubt.*next refit"):
        receiver.reopen_gate(A1, K4)
    receiver.committed(K4)
    assert receiver.cleanup(A1) is False
    with pytest.raises(OperatorRequiredError, match="of policy version 4, committed is policy version 5"):
        receiver.reopen_gate(A1, CommitRecord(PolicyVersion(5), BaselineId("b5")))
    assert not receiver.reopen_gate(A2, K4)
    assert receiver.reopen_gate(A1, K4)
    assert not receiver.resident.is_gate_closed


def test_a_completed_attempt_whose_commit_lost_stays_in_doubt_and_is_overwritten() -> None:
    receiver = completed()
    receiver.mark_obsolete(A1)
    receiver.cleanup(A1)
    with pytest.raises(RejectedError, match="weights are in doubt after a failed attempt; only overwrites repair them"):
        receiver.prepare(request(A2))
    receiver.prepare(RETRY)
    assert receiver.phase is Phase.RECEIVING


def test_a_commit_found_after_the_fence_still_counts_for_who_completed_it() -> None:
    receiver = completed()
    receiver.mark_obsolete(A1)
    assert receiver.committed(K4)
    assert receiver.phase is Phase.IDLE


def test_another_candidate_on_weights_in_doubt_must_send_everything_until_that_is_complete() -> None:
    receiver = applying()
    receiver.arrive(arrival(0))
    receiver.applied(taken(receiver))
    receiver.mark_obsolete(A1)
    other = replace(RETRY, candidate="w4'")
    with pytest.raises(RejectedError, match="holds bits of candidate w4, this attempt carries w4'"):
        receiver.prepare(other)
    receiver.prepare(replace(other, is_dense=True))
    receiver.close_gate(A2)
    receiver.open_apply(A2)
    receiver.arrive(arrival(0, attempt=A2))
    receiver.applied(taken(receiver))
    receiver.mark_obsolete(A2)
    with pytest.raises(RejectedError, match="send every element"):
        receiver.prepare(replace(other, attempt=AttemptId("a3"), revision=12))


def taken(receiver: Reception) -> PayloadId:
    payload = receiver.take()
    assert payload is not None
    return payload


@pytest.mark.parametrize(
    ("resident", "text"),
    [
        (Resident(), "holds an unplaced checkpoint, expected 3"),
        (Resident(policy_version=PolicyVersion(2)), "holds policy version 2, expected 3"),
        (Resident(policy_version=PolicyVersion(3), fenced="lease ran out"), r"fenced \(lease ran out\)"),
    ],
)
def test_a_receiver_that_is_not_at_the_base_is_refused(resident: Resident, text: str) -> None:
    receiver = Reception(ReceiverId("r1"), resident=resident)
    with pytest.raises(RejectedError, match=text):
        receiver.prepare(request())
    assert receiver.attempt is None


def test_a_dense_attempt_takes_any_receiver_that_is_not_fenced() -> None:
    dense = request(mode=EncodingMode.OVERWRITE, is_dense=True)
    receiver = Reception(ReceiverId("r1"))
    receiver.prepare(dense)
    fenced = Reception(ReceiverId("r1"), resident=Resident(fenced="x"))
    with pytest.raises(RejectedError, match="fenced"):
        fenced.prepare(dense)


def test_a_fenced_receiver_takes_writes_and_serves_nothing_until_it_was_restored() -> None:
    receiver = applying()
    receiver.arrive(arrival(0))
    receiver.arrive(arrival(0, 1))
    receiver.fence("lease ran out")
    assert receiver.take() is None
    assert receiver.arrive(arrival(1)) is Verdict.DROP_LATE
    assert receiver.resident.is_gate_closed
    with pytest.raises(OperatorRequiredError, match=r"fenced \(lease ran out\)"):
        receiver.reopen_gate(A1, CommitRecord(PolicyVersion(3), BaselineId("b3")))
    receiver.restored(PolicyVersion(5))
    assert receiver.reopen_gate(None, CommitRecord(PolicyVersion(5), BaselineId("b5")))


def test_a_receiver_is_not_restored_in_the_middle_of_an_attempt() -> None:
    with pytest.raises(AttemptFailedError, match="cannot be restored during a1"):
        applying().restored(PolicyVersion(3))
    with pytest.raises(AttemptFailedError, match="cannot be restored during a1"):
        completed().restored(PolicyVersion(3))


def test_a_gate_is_not_opened_without_an_attempt_while_one_is_at_hand() -> None:
    assert not applying().reopen_gate(None, CommitRecord(PolicyVersion(3), BaselineId("b3")))


def test_no_phase_leads_back_into_a_failed_or_obsolete_attempt() -> None:
    for phase in (Phase.FAILED, Phase.OBSOLETE):
        assert Phase.APPLYING not in NEXT_PHASE[phase].values()
        assert {verb for verb, to in NEXT_PHASE[phase].items() if to is Phase.RECEIVING} == {Verb.PREPARE}


@pytest.mark.parametrize("wrong", [{"queue_slots": 0}, {"staging_limit_nbytes": -1}, {"max_payloads_per_owner": 0}])
def test_settings_without_room_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(RejectedError, match="at least one slot"):
        ReceptionSettings(**wrong)  # type: ignore[arg-type]


def test_owners_must_be_named_once() -> None:
    with pytest.raises(RejectedError, match="expected each once"):
        reception(request(owners=(OwnerId(0), OwnerId(0))))
