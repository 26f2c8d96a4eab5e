"""The suites that every record store passes, and every control plane on it. Subclass, override the hooks, and pytest runs them.

::

    class TestMyStore(RecordStoreTests, ControlPlaneTests):
        @pytest.fixture
        def open_handle(self, tmp_path):
            return lambda: MyStore(tmp_path / "record")
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deltarefit.control import ABSENT, ControlPlane, ControlSettings, RecordStore, Tag
from deltarefit.errors import AttemptFailedError, CommitConflictError, RejectedError, TransportError
from deltarefit.ids import AttemptId, BaselineId, EncodingMode, PolicyVersion, ReceiverId
from deltarefit.protocol import CommitOutcome, CommitRecord, CommitRequest, ControlState, PrepareRequest
from deltarefit.protocol.record import MAX_CONTROL_NBYTES
from deltarefit.testing.control_faults import FaultyRecordStore, SwapFault, add_one

__all__ = ["ControlPlaneTests", "ProcessRaceTests", "RecordStoreTests", "plane_on"]

OpenHandle = Callable[[], RecordStore]
RACERS = 20
K0 = CommitRecord(PolicyVersion(0), BaselineId("b000000-start"), "d0")
R1, R2 = ReceiverId("r1"), ReceiverId("r2")
_nonces = itertools.count()


def plane_on(store: RecordStore, *, max_tries: int = 20) -> ControlPlane:
    """A control plane that pauses for almost no time."""
    waiting = threading.Event()

    def pause(seconds: float) -> None:
        waiting.wait(seconds)

    settings = ControlSettings(max_tries=max_tries, first_pause_s=0.0, max_pause_s=0.02)
    return ControlPlane(
        store,
        new_nonce=lambda: f"nonce-{next(_nonces)}",
        pause=pause,
        settings=settings,
    )


class _Handles:
    @pytest.fixture
    def open_handle(self) -> OpenHandle:
        """Override: each call opens another handle on one and the same record, which does not exist yet."""
        raise NotImplementedError


class RecordStoreTests(_Handles):
    """What ``RecordStore`` promises."""

    def test_a_record_that_does_not_exist_reads_as_absent(self, open_handle: OpenHandle) -> None:
        assert open_handle().read() == (None, ABSENT)
        assert open_handle().read() == (None, ABSENT)

    def test_create_works_once(self, open_handle: OpenHandle) -> None:
        assert open_handle().swap(ABSENT, b"first")
        assert not open_handle().swap(ABSENT, b"second")
        data, tag = open_handle().read()
        assert data == b"first"
        assert tag != ABSENT

    def test_a_swap_needs_the_tag_of_what_is_there(self, open_handle: OpenHandle) -> None:
        store, other = open_handle(), open_handle()
        store.swap(ABSENT, b"1")
        _, first = store.read()
        assert other.swap(first, b"2")
        assert not store.swap(first, b"3"), "a swap with an old tag took effect"
        assert not store.swap(ABSENT, b"4"), "a create took effect on a record that exists"
        data, second = store.read()
        assert data == b"2"
        assert second != first
        assert store.swap(second, b"5")
        assert other.read()[0] == b"5"

    def test_a_swap_from_a_tag_of_a_record_that_is_not_there_is_refused(self, open_handle: OpenHandle) -> None:
        store = open_handle()
        store.swap(ABSENT, b"1")
        _, tag = store.read()
        assert tag != ABSENT
        assert not store.swap(Tag("no-such-etag", "999999999"), b"2")
        assert store.read()[0] == b"1"

    def test_a_large_record_comes_back_whole_and_a_larger_one_is_refused(self, open_handle: OpenHandle) -> None:
        store = open_handle()
        large = bytes(range(256)) * (MAX_CONTROL_NBYTES // 256)
        assert store.swap(ABSENT, large)
        assert open_handle().read()[0] == large
        tag = store.read()[1]
        with pytest.raises(RejectedError, match="expected at most"):
            store.swap(tag, large + b"x")
        assert store.read()[0] == large

    def test_of_many_threads_that_create_exactly_one_wins(self, open_handle: OpenHandle) -> None:
        start = threading.Barrier(RACERS)

        def race(number: int) -> bool:
            store = open_handle()
            start.wait(30)
            return store.swap(ABSENT, b"%d" % number)

        with ThreadPoolExecutor(RACERS) as pool:
            won = list(pool.map(race, range(RACERS)))
        assert won.count(True) == 1
        assert open_handle().read()[0] == b"%d" % won.index(True)

    def test_of_many_threads_that_swap_from_one_tag_exactly_one_wins(self, open_handle: OpenHandle) -> None:
        open_handle().swap(ABSENT, b"start")
        _, tag = open_handle().read()
        start = threading.Barrier(RACERS)

        def race(number: int) -> bool:
            store = open_handle()
            start.wait(30)
            return store.swap(tag, b"%d" % number)

        with ThreadPoolExecutor(RACERS) as pool:
            won = list(pool.map(race, range(RACERS)))
        assert won.count(True) == 1
        assert open_handle().read()[0] == b"%d" % won.index(True)

    def test_no_count_is_lost_between_threads(self, open_handle: OpenHandle) -> None:
        def count(_: int) -> list[int]:
            store = open_handle()
            return [add_one(store) for _ in range(3)]

        with ThreadPoolExecutor(6) as pool:
            stored = [number for numbers in pool.map(count, range(6)) for number in numbers]
        assert sorted(stored) == list(range(1, 19))

    def test_every_handle_names_the_place(self, open_handle: OpenHandle) -> None:
        assert open_handle().place


class ProcessRaceTests(_Handles):
    """The same between processes. Needs a record that another process can open."""

    num_processes = RACERS
    counts_each = 2

    @pytest.fixture
    def recipe(self) -> dict[str, Any]:
        """Override: the argument of ``control_faults.open_record`` for the record that ``open_handle`` opens."""
        raise NotImplementedError

    def test_no_count_is_lost_between_processes(self, open_handle: OpenHandle, recipe: dict[str, Any]) -> None:
        racers = [_start_racer(self.counts_each, recipe) for _ in range(self.num_processes)]
        stored: list[int] = []
        for racer in racers:
            output, errors = racer.communicate(timeout=120)
            assert racer.returncode == 0, errors
            stored += [int(line) for line in output.split()]
        total = self.num_processes * self.counts_each
        assert sorted(stored) == list(range(1, total + 1)), (
            "two swaps from one state took effect, or one that was confirmed is gone"
        )
        assert open_handle().read()[0] == b"%d" % total

    def test_what_was_confirmed_survives_sigkill(self, open_handle: OpenHandle, recipe: dict[str, Any]) -> None:
        racer = _start_racer(100_000, recipe)
        assert racer.stdout is not None
        confirmed = [int(racer.stdout.readline()) for _ in range(20)]
        racer.kill()
        rest, _ = racer.communicate(timeout=30)
        last = [*confirmed, *(int(line) for line in rest.split("\n")[:-1])][-1]
        data, _ = open_handle().read()
        assert data is not None
        assert int(data) in (last, last + 1)
        # The write that was under way at the kill may be in the server still, and take effect after that look.
        assert int(data) < add_one(open_handle()) <= last + 2, "a killed process left the record locked"


def _start_racer(count: int, recipe: dict[str, Any]) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", "deltarefit.testing.control_faults", "count", str(count), json.dumps(recipe)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# ---------------------------------------------------------------------------------------------- the control plane on it


def prepare_request(state: ControlState, attempt: str = "a1", **changes: Any) -> PrepareRequest:
    """An attempt that starts from ``state``."""
    fields: dict[str, Any] = {
        "epoch": state.epoch,
        "attempt": AttemptId(attempt),
        "baseline": BaselineId(f"b-{attempt}"),
        "base": state.record,
        "mode": EncodingMode.MIXED,
        "is_dense": False,
        "candidate": "w1",
        "plan_digest": "plan",
        "required": frozenset({R1, R2}),
    }
    return PrepareRequest(**{**fields, **changes})


def commit_request(state: ControlState, attempt: str = "a1") -> CommitRequest:
    return CommitRequest(
        epoch=state.epoch,
        attempt=AttemptId(attempt),
        baseline=BaselineId(f"b-{attempt}"),
        acknowledged=frozenset({R1, R2}),
        policy_digest="d1",
    )


class ControlPlaneTests(_Handles):
    """The rules as they work on this store, with replies lost and writes that come late."""

    @pytest.fixture
    def faulty(self, open_handle: OpenHandle) -> FaultyRecordStore:
        return FaultyRecordStore(open_handle())

    @pytest.fixture
    def plane(self, faulty: FaultyRecordStore) -> ControlPlane:
        """Its store misbehaves once faults are planned."""
        return plane_on(faulty)

    @pytest.fixture
    def held(self, open_handle: OpenHandle) -> ControlState:
        """A run at version 0 that coordinator x holds in epoch 1."""
        plain = plane_on(open_handle())
        plain.create("run", "setup", K0)
        return plain.acquire("x", "setup")

    def test_a_whole_transition(self, plane: ControlPlane, held: ControlState) -> None:
        bound = plane.prepare(prepare_request(held))
        assert bound.attempt is not None
        assert bound.revision > held.revision
        assert plane.commit(commit_request(held)) is CommitOutcome.SUCCESS
        assert plane.read_commit(AttemptId("a1")) == CommitRecord(PolicyVersion(1), BaselineId("b-a1"), "d1")
        closed = plane.close_attempt(held.epoch, AttemptId("a1"))
        assert (closed.attempt, closed.transition) == (None, None)
        plane.release(held.epoch, "x")
        found = plane.read()
        assert found is not None
        assert (found.record.policy_version, found.coordinator, found.epoch) == (1, "", 1)

    def test_a_run_is_created_once_and_another_run_or_model_in_its_place_is_refused(self, plane: ControlPlane) -> None:
        assert plane.read() is None
        first = plane.create("run", "setup", K0)
        assert plane.create("run", "setup", CommitRecord(PolicyVersion(0), BaselineId("other"))) == first
        with pytest.raises(RejectedError, match="the place was used for another model or run"):
            plane.create("run", "other-setup", K0)
        with pytest.raises(RejectedError, match="the place was used for another model or run"):
            plane.create("other-run", "setup", K0)

    def test_nothing_can_be_done_to_a_run_that_does_not_exist(self, plane: ControlPlane) -> None:
        with pytest.raises(RejectedError, match="no such run"):
            plane.acquire("x", "setup")

    @pytest.mark.parametrize("fault", list(SwapFault), ids=lambda fault: fault.name)
    def test_a_fault_in_any_single_change_is_got_over(
        self, plane: ControlPlane, faulty: FaultyRecordStore, held: ControlState, fault: SwapFault
    ) -> None:
        faulty.plan(fault)
        bound = plane.prepare(prepare_request(held))
        assert bound.attempt is not None
        faulty.plan(fault)
        assert plane.commit(commit_request(held)) is CommitOutcome.SUCCESS
        faulty.plan(fault)
        plane.close_attempt(held.epoch, AttemptId("a1"))
        assert faulty.fired == 3, "the fault did not strike"
        faulty.release()
        found = plane.read()
        assert found is not None
        assert found.record == CommitRecord(PolicyVersion(1), BaselineId("b-a1"), "d1")
        assert found.attempt is None

    def test_a_reply_lost_over_and_over_does_not_read_as_a_defeat(
        self, plane: ControlPlane, faulty: FaultyRecordStore, held: ControlState
    ) -> None:
        plane.prepare(prepare_request(held))
        faulty.plan(SwapFault.REFUSE_AFTER)
        assert plane.commit(commit_request(held)) is CommitOutcome.SUCCESS
        faulty.plan(*[SwapFault.LOSE_REQUEST] * 5, SwapFault.LOSE_REPLY)
        plane.close_attempt(held.epoch, AttemptId("a1"))
        assert faulty.fired == 7

    def test_a_coordinator_that_was_taken_over_before_it_looked_is_told_so(
        self, plane: ControlPlane, faulty: FaultyRecordStore, held: ControlState, open_handle: OpenHandle
    ) -> None:
        """The reply of ``acquire`` is lost; before it looks, the next one took the run over. That one's epoch is not ours."""
        faulty.plan(SwapFault.LOSE_REPLY)
        other = plane_on(open_handle())
        looked = 0

        def take_over_before_the_next_look() -> tuple[bytes | None, Any]:
            nonlocal looked
            looked += 1
            if looked == 2:
                other.acquire("z", "setup", expired_epoch=2)
            return open_handle().read()

        faulty.read = take_over_before_the_next_look  # type: ignore[method-assign]
        with pytest.raises(CommitConflictError, match="y acquired the run, but z took it over at once"):
            plane.acquire("y", "setup", expired_epoch=held.epoch)

    def test_an_attempt_that_was_fenced_before_prepare_looked_is_not_reported_as_bound(
        self, plane: ControlPlane, faulty: FaultyRecordStore, held: ControlState, open_handle: OpenHandle
    ) -> None:
        faulty.plan(SwapFault.LOSE_REPLY)
        other = plane_on(open_handle())
        looked = 0

        def abort_before_the_next_look() -> tuple[bytes | None, Any]:
            nonlocal looked
            looked += 1
            if looked == 2:
                other.request_abort("wrong data")
            return open_handle().read()

        faulty.read = abort_before_the_next_look  # type: ignore[method-assign]
        with pytest.raises(AttemptFailedError, match="a1: bound, but fenced at once: wrong data"):
            plane.prepare(prepare_request(held))

    def test_a_commit_without_any_reply_is_unknown_and_read_commit_decides(
        self, faulty: FaultyRecordStore, held: ControlState, open_handle: OpenHandle
    ) -> None:
        plane_on(open_handle()).prepare(prepare_request(held))
        impatient = plane_on(faulty, max_tries=2)
        faulty.plan(SwapFault.LOSE_REQUEST, SwapFault.LOSE_REQUEST)
        assert impatient.commit(commit_request(held)) is CommitOutcome.UNKNOWN
        assert impatient.read_commit(AttemptId("a1")) == K0
        assert impatient.commit(commit_request(held)) is CommitOutcome.FAILED

    def test_a_commit_whose_reply_was_lost_for_good_is_found_by_read_commit(
        self, faulty: FaultyRecordStore, held: ControlState, open_handle: OpenHandle
    ) -> None:
        plane_on(open_handle()).prepare(prepare_request(held))
        faulty.plan(SwapFault.LOSE_REPLY)
        assert plane_on(faulty, max_tries=1).commit(commit_request(held)) is CommitOutcome.UNKNOWN
        assert plane_on(open_handle()).read_commit(AttemptId("a1")).policy_version == 1

    def test_a_commit_delayed_past_everything_does_not_take_effect(
        self, faulty: FaultyRecordStore, held: ControlState, open_handle: OpenHandle
    ) -> None:
        """The commit is on the wire while the attempt is fenced, read, closed, retried, committed and closed again."""
        plain = plane_on(open_handle())
        plain.prepare(prepare_request(held))
        faulty.plan(SwapFault.HOLD)
        assert plane_on(faulty, max_tries=1).commit(commit_request(held)) is CommitOutcome.UNKNOWN
        assert plain.read_commit(AttemptId("a1")) == K0
        plain.close_attempt(held.epoch, AttemptId("a1"))
        retry = prepare_request(held, "a2", mode=EncodingMode.OVERWRITE)
        plain.prepare(retry)
        assert plain.commit(commit_request(held, "a2")) is CommitOutcome.SUCCESS
        plain.close_attempt(held.epoch, AttemptId("a2"))
        assert faulty.release() == [False]
        found = plain.read()
        assert found is not None
        assert found.record.baseline == "b-a2"

    def test_a_commit_that_arrives_before_the_fence_is_seen_by_it(
        self, faulty: FaultyRecordStore, held: ControlState, open_handle: OpenHandle
    ) -> None:
        """The fence was decided on the old record; the held commit lands first; the fence loses its swap and reads success."""
        plane_on(open_handle()).prepare(prepare_request(held))
        faulty.plan(SwapFault.HOLD)
        plane_on(faulty, max_tries=1).commit(commit_request(held))
        fence = FaultyRecordStore(open_handle())
        fence.before_swap = faulty.release
        assert plane_on(fence).read_commit(AttemptId("a1")).policy_version == 1

    def test_of_many_that_take_over_from_one_dead_coordinator_exactly_one_wins(
        self, held: ControlState, open_handle: OpenHandle
    ) -> None:
        start = threading.Barrier(8)

        def take_over(number: int) -> bool:
            plane = plane_on(open_handle(), max_tries=100)
            start.wait(30)
            try:
                state = plane.acquire(f"new-{number}", "setup", expired_epoch=held.epoch)
            except RejectedError as error:
                assert "in use by live coordinator new-" in str(error)  # noqa: PT017
                return False
            return state.coordinator == f"new-{number}"

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(take_over, range(8))).count(True) == 1
        found = plane_on(open_handle()).read()
        assert found is not None
        assert found.epoch == 2

    def test_a_replaced_coordinator_gets_conflicts_and_changes_nothing(
        self, held: ControlState, open_handle: OpenHandle
    ) -> None:
        plane = plane_on(open_handle())
        plane.prepare(prepare_request(held))
        taken = plane.acquire("y", "setup", expired_epoch=held.epoch)
        assert plane.commit(commit_request(held)) is CommitOutcome.CONFLICT
        with pytest.raises(CommitConflictError, match="another coordinator took over"):
            plane.prepare(prepare_request(held, "a2", mode=EncodingMode.OVERWRITE))
        plane.release(held.epoch, "x")
        assert plane.read() == taken

    def test_a_store_out_of_reach_is_unknown_for_a_commit_and_an_error_for_the_rest(
        self, faulty: FaultyRecordStore, held: ControlState
    ) -> None:
        plane = plane_on(faulty, max_tries=2)
        plane.prepare(prepare_request(held))
        faulty.cut()
        assert plane.commit(commit_request(held)) is CommitOutcome.UNKNOWN
        with pytest.raises(TransportError, match="out of reach after 2 tries"):
            plane.read_commit(AttemptId("a1"))
        faulty.cut(False)
        assert plane.read_commit(AttemptId("a1")) == K0

    def test_two_committers_race_and_exactly_one_baseline_wins(self, held: ControlState, open_handle: OpenHandle) -> None:
        """The old coordinator commits while the new one takes over: either is possible, never both."""
        plain = plane_on(open_handle())
        plain.prepare(prepare_request(held))
        start = threading.Barrier(2)

        def commit() -> CommitOutcome:
            plane = plane_on(open_handle(), max_tries=100)
            start.wait(30)
            return plane.commit(commit_request(held))

        def take_over() -> CommitRecord:
            plane = plane_on(open_handle(), max_tries=100)
            start.wait(30)
            plane.acquire("y", "setup", expired_epoch=held.epoch)
            return plane.read_commit(AttemptId("a1"))

        with ThreadPoolExecutor(2) as pool:
            committed, read = pool.submit(commit), pool.submit(take_over)
            outcome, record = committed.result(60), read.result(60)
        assert outcome in (CommitOutcome.SUCCESS, CommitOutcome.CONFLICT)
        assert (record.policy_version == 1) == (outcome is CommitOutcome.SUCCESS)
