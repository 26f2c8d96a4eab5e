"""How far a refit is, as others see it."""

from __future__ import annotations

import json
import threading

import pytest
from click.testing import CliRunner
from tests.runtime.pair import SETTINGS, Pair, perturb

import deltarefit
from deltarefit.cli.program import program
from deltarefit.cli.watching import lines
from deltarefit.errors import RejectedError, TransportError
from deltarefit.ids import AttemptId, attempt_id
from deltarefit.runtime.clock import Deadline, RandomIds, SystemClock
from deltarefit.runtime.progress import Progress, ProgressBoard, read_progress
from deltarefit.runtime.progress_view import RefitView, RunView
from deltarefit.testing.faults import FaultPlan, HoldingSender
from deltarefit.transport import keys, open_run

ATTEMPT = attempt_id(4, 1, "00000000")


def wait_until(condition):
    deadline = Deadline(SystemClock(), 20)
    while not condition():
        assert not deadline.expired
        SystemClock().sleep(0.01)


@pytest.fixture
def store():
    return open_run(f"memory://{RandomIds().nonce()}", clock=SystemClock())


def test_board_shows_the_latest_and_nothing_after_its_end(store):
    board = ProgressBoard(store, every_s=0.005)
    now = [Progress(who="owner 0", done_nbytes=1, total_nbytes=8)]
    with board.showing(ATTEMPT, lambda: now[0]):
        wait_until(lambda: read_progress(store, ATTEMPT) == now)
        now[0] = Progress(who="owner 0", done_nbytes=4, total_nbytes=8, elapsed_s=3.0)
        wait_until(lambda: read_progress(store, ATTEMPT) == now)
    assert now[0].left_s == 3.0
    store.delete_prefix(keys.attempt_prefix(ATTEMPT))
    SystemClock().sleep(0.05)
    assert store.listing(keys.ATTEMPTS) == []


def test_quick_work_writes_nothing(store):
    with ProgressBoard(store).showing(ATTEMPT, lambda: Progress(who="owner 0")):
        pass
    assert store.listing(keys.ATTEMPTS) == []


def test_a_store_that_refuses_harms_nothing(store):
    class Refusing:
        def put(self, key, data):
            asked.set()
            raise TransportError("no")

    asked = threading.Event()
    with ProgressBoard(Refusing(), every_s=0.001).showing(ATTEMPT, lambda: Progress(who="owner 0")):
        assert asked.wait(10)


def test_what_is_no_progress_is_not_shown(store):
    store.put(keys.progress(ATTEMPT, "owner-0"), b"\xc1 something else")
    assert read_progress(store, ATTEMPT) == []


VIEW = RefitView(
    policy_version=3, attempt="v000004-a2-0", num_attempts=2, mode="overwrite", activity="Flush: waiting for b", activity_s=2.5,
    announced=4, announced_nbytes=4096, ended_owners=1,
    participants=(
        Progress(who="owner 0", done_nbytes=25, total_nbytes=100, payloads=1, payload_nbytes=1024, elapsed_s=1.0),
        Progress(who="receiver b", payloads=1, payload_nbytes=1024, elapsed_s=1.0),
    ),
)  # fmt: skip


def test_one_look_in_words():
    shown = lines(VIEW)
    assert shown[0] == "policy version 3 is committed; attempt v000004-a2-0 (overwrite, the second)"
    assert "Flush: waiting for b (for 2.5 s)" in shown[1]
    assert "4 payloads, 4 KiB, 1 owners have sent all" in shown[2]
    assert "[######..................]  25% compared; sent 1 payloads, 1 KiB, 1 s, 3 s left to compare" in shown[3]
    assert "[######..................]  25% applied" in shown[4]


def test_between_refits_it_says_so():
    view = RefitView(
        policy_version=3, attempt="", num_attempts=0, mode="", activity="", activity_s=0.0, announced=0, announced_nbytes=0,
        ended_owners=0, participants=(),
    )  # fmt: skip
    assert lines(view) == ["policy version 3 is committed; no refit is under way"]


@pytest.mark.torch
def test_a_refit_under_way_is_seen_from_outside(tmp_path):
    with Pair(tmp_path) as pair:
        holding = []

        def wrap(sender):
            holding.append(HoldingSender(sender, FaultPlan(lambda name: True)))
            return holding[0]

        publisher = pair.publisher(settings=SETTINGS, wrap_sender=wrap)
        perturb(pair.policy, 1)
        reports = []
        refit = threading.Thread(target=lambda: reports.append(publisher.refit()))
        refit.start()
        pair.stack.callback(holding[0].release)
        assert holding[0].holding.wait(20)
        view = RunView(pair.run, clock=SystemClock(), ids=RandomIds())
        wait_until(lambda: len(view.look().participants) == 2)
        seen = view.look()
        assert (seen.policy_version, seen.num_attempts, seen.mode) == (0, 1, "mixed")
        owner = next(one for one in seen.participants if one.who == "owner 0")
        assert owner.done_nbytes == owner.total_nbytes > 0
        result = CliRunner().invoke(program, ["status", "--run", pair.run, "--watch", "--for", "0", "--json"])
        assert json.loads(result.output)["attempt"] == seen.attempt
        result = CliRunner().invoke(program, ["status", "--run", pair.run, "--watch", "--for", "0"])
        assert "owner 0" in result.output
        holding[0].release()
        refit.join(20)
        assert reports[0].attempts == 1
        assert read_progress(open_run(pair.run, clock=SystemClock()), AttemptId(seen.attempt)) == []
        assert view.look().attempt == ""
        pair.assert_equal()


def test_no_run_no_view(tmp_path):
    with pytest.raises(RejectedError, match="no run at"):
        RunView((tmp_path / "nowhere").as_uri(), clock=SystemClock(), ids=RandomIds())
    assert deltarefit.__version__
