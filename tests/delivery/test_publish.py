"""Asynchronous delivery: engines serve until all payloads have arrived; training computes on and may not step."""

from __future__ import annotations

import threading
from dataclasses import replace

import msgspec
import pytest
import torch
from tests.runtime.pair import RECEIVER_SETTINGS, SETTINGS, Fused, Pair, Policy, dense_reload, perturb, raw

import deltarefit
from deltarefit.errors import DeadlineError
from deltarefit.runtime.clock import Deadline, SystemClock
from deltarefit.runtime.events import StageEvent
from deltarefit.runtime.messages import DropCaches
from deltarefit.testing.collective import run_ranks
from deltarefit.testing.faults import CorruptingSender, DroppingSender, FaultPlan, HoldingSender

pytestmark = pytest.mark.torch

CLOCK = SystemClock()
SMALL = msgspec.structs.replace(SETTINGS, bucket_nbytes=1, chunk_nbytes=1)
"""A payload per tensor."""


def wait_until(condition, timeout_s=20.0):
    deadline = Deadline(CLOCK, timeout_s)
    while not condition():
        assert not deadline.expired
        CLOCK.sleep(0.005)


@pytest.fixture
def held(tmp_path):
    """A publisher whose last payload waits for a release, and what happened at its receiver."""
    with Pair(tmp_path) as pair:
        senders = []

        def wrap(sender):
            senders.append(HoldingSender(sender, FaultPlan(lambda name: name.sequence == 2)))
            return senders[0]

        publisher = pair.publisher(settings=SMALL, wrap_sender=wrap)
        stages: list[StageEvent] = []
        pair.receivers[0].subscribe(stages.append)
        perturb(pair.policy, 0)
        try:
            yield pair, publisher, senders[0], stages
        finally:
            senders[0].release()


def test_engine_serves_the_old_version_until_everything_has_arrived(held):
    pair, publisher, sender, stages = held
    before = raw(pair.models[0])
    handle = publisher.publish()
    assert sender.holding.wait(20)
    wait_until(lambda: sum(stage.stage == "fetch" for stage in stages) == 2)
    CLOCK.sleep(0.1)
    with pair.receivers[0].serving(1.0):  # the gate is open
        assert raw(pair.models[0]) == before
        assert pair.receivers[0].policy_version == 0
    decoded = [stage.payload for stage in stages if stage.stage == "decode"]
    assert len(decoded) == 2, "payloads are checked while the engine serves"
    assert "apply" not in {stage.stage for stage in stages}
    assert not handle.is_done
    assert handle.progress.payloads == 2
    with pytest.raises(DeadlineError, match=r"policy version 1 takes more than 0\.01 s"):
        handle.wait(0.01)
    sender.release()
    report = handle.wait(20)
    assert (report.delivery, report.attempts, report.payloads) == ("asynchronous", 1, 3)
    assert handle.wait() == report
    pair.assert_equal()
    applied = [stage for stage in stages if stage.stage == "apply"]
    assert [stage.payload for stage in applied] == sorted(stage.payload for stage in applied)
    pause = next(stage for stage in stages if stage.stage == "pause")
    assert pause.t0_s <= applied[0].t0_s
    assert pause.t0_s >= max(stage.t1_s for stage in stages if stage.stage in ("fetch", "decode"))
    assert report.pause_s == pytest.approx(pause.t1_s - pause.t0_s)


def test_without_memory_for_it_nothing_is_decoded_while_the_engine_serves(held):
    """As the paper has it: compressed payloads wait, and are decoded once the gate is closed."""
    pair, publisher, sender, stages = held
    (receiver,) = pair.receivers
    receiver._application._limits = replace(receiver._application._limits, decoded_nbytes=0)
    handle = publisher.publish()
    sender.release()
    handle.wait(20)
    pair.assert_equal()
    pause = next(stage for stage in stages if stage.stage == "pause")
    assert min(stage.t0_s for stage in stages if stage.stage == "decode") >= pause.t0_s


def test_a_request_that_runs_when_everything_is_here_ends_under_the_old_version(held):
    pair, publisher, sender, stages = held
    old = raw(pair.models[0])
    with pair.receivers[0].serving():
        handle = publisher.publish()
        sender.release()
        wait_until(lambda: sum(stage.stage == "fetch" for stage in stages) == 3)
        CLOCK.sleep(0.2)
        assert raw(pair.models[0]) == old
        assert "apply" not in {stage.stage for stage in stages}
    handle.wait(20)
    pair.assert_equal()


def test_training_computes_on_but_a_step_is_refused_until_the_handle_is_done(held):
    pair, publisher, sender, _ = held
    optimizer = torch.optim.SGD(pair.policy.parameters(), lr=0.1)
    other = torch.nn.Linear(2, 2)
    others_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    handle = publisher.publish()
    assert sender.holding.wait(20)
    loss = (pair.policy.second @ pair.policy.first).float().square().mean()
    loss.backward()
    before = raw(pair.policy)
    with pytest.raises(deltarefit.RejectedError, match=r"policy version 1 is being published; call handle\.wait\(\)"):
        optimizer.step()
    assert raw(pair.policy) == before
    other(torch.ones(1, 2)).sum().backward()
    others_optimizer.step()  # another model's parameters are its own affair
    sender.release()
    assert handle.wait(20).attempts == 1
    pair.assert_equal()
    optimizer.step()
    assert raw(pair.policy) != before
    publisher.refit()
    pair.assert_equal()


def test_a_step_over_parameters_that_were_replaced_is_refused_too(held):
    pair, publisher, sender, _ = held
    for name, parameter in list(pair.policy.named_parameters()):
        setattr(pair.policy, name, torch.nn.Parameter(parameter.detach().clone()))
    optimizer = torch.optim.SGD(pair.policy.parameters(), lr=0.1)
    handle = publisher.publish()
    with pytest.raises(deltarefit.RejectedError, match="policy version 1 is being published"):
        optimizer.step()
    sender.release()
    handle.wait(20)
    pair.assert_equal()


@pytest.mark.parametrize("write", ["in place", "behind torch's back", "another Parameter"])
def test_a_parameter_that_changed_before_the_end_is_found_and_named(held, write):
    """Receivers and record hold what was sent; only the trainer's baseline cannot follow, so the next refit starts anew."""
    pair, publisher, sender, _ = held
    sent = dense_reload(pair.policy)
    handle = publisher.publish()
    assert sender.holding.wait(20)
    worker = publisher._owners._worker
    wait_until(lambda: worker._proof is not None and worker._proof.done())  # a write during the proof fails the attempt instead
    if write == "behind torch's back":
        pair.policy.first.data.view(torch.int16).view(-1)[0] ^= 1
    elif write == "another Parameter":
        pair.policy.first = torch.nn.Parameter(pair.policy.first.detach() + 1)
    else:
        with torch.no_grad():
            pair.policy.first[0, 0] += 1
    sender.release()
    with pytest.raises(deltarefit.OperatorRequiredError, match=r"first.*changed after this transition first read it"):
        handle.wait(30)
    assert raw(pair.models[0]) == sent


def test_gates_reopen_before_owners_copy_and_the_copy_is_still_held_to_what_was_sent(held):
    """The baseline is copied outside the pause; a write in between is found, and receivers serve what the record names."""
    pair, publisher, sender, stages = held
    sent = dense_reload(pair.policy)
    caller = publisher._session.caller
    post = caller.post

    def post_then_write(asked, body, timeout_s):
        pending = post(asked, body, timeout_s)
        if isinstance(body, DropCaches):
            wait_until(lambda: "pause" in {stage.stage for stage in stages})
            with torch.no_grad():
                pair.policy.first[0, 0] += 1
        return pending

    caller.post = post_then_write
    handle = publisher.publish()
    sender.release()
    with pytest.raises(deltarefit.OperatorRequiredError, match=r"first.*changed after this transition first read it"):
        handle.wait(20)
    with pair.receivers[0].serving(1.0):
        assert raw(pair.models[0]) == sent
        assert pair.receivers[0].policy_version == 1


def test_the_baseline_is_copied_before_the_handle_is_done(held):
    _, publisher, sender, _ = held
    copied = []
    publisher.subscribe(lambda stage: copied.append(stage) if stage.stage == "baseline" else None)
    handle = publisher.publish()
    sender.release()
    report = handle.wait(20)
    (copy,) = copied
    assert report.stage_s["baseline"] == pytest.approx(copy.t1_s - copy.t0_s), "its time is the refit's, not the pause's"
    assert publisher._owners._worker.committed_digests() == {
        name: digest.hex() for name, digest in publisher._source.owner.recount().items()
    }, "the baseline's words are those of the committed digests"


def test_one_call_at_a_time(held):
    _, publisher, sender, _ = held
    handle = publisher.publish()
    for call in (publisher.publish, publisher.refit, publisher.audit):
        with pytest.raises(deltarefit.RejectedError, match="wait for its handle first"):
            call()
    sender.release()
    handle.wait(20)
    assert publisher.refit().policy_version == 2


def test_a_lost_payload_fails_the_attempt_before_any_gate_closes(tmp_path):
    """The engine serves throughout, its bits stay, and the retry stages overwrites."""
    with Pair(tmp_path) as pair:
        plan = FaultPlan(lambda name: name.sequence == 1)
        publisher = pair.publisher(settings=SMALL, wrap_sender=lambda sender: DroppingSender(sender, plan))
        stages: list[StageEvent] = []
        closings = []
        engine = pair.receivers[0]._engine
        close_gate = engine.close_gate
        engine.close_gate = lambda timeout_s: (closings.append(pair.receivers[0]._application.attempt), close_gate(timeout_s))
        pair.receivers[0].subscribe(stages.append)
        perturb(pair.policy, 0)
        report = publisher.publish().wait(60)
        assert plan.fired == 1
        assert report.attempts == 2
        assert len(closings) == 1
        assert "-a2-" in closings[0]
        assert {stage.attempt for stage in stages if stage.stage == "apply"} == set(closings)
        pair.assert_equal()


def test_a_damaged_payload_is_repaired_and_the_gate_reopens_once(tmp_path):
    with Pair(tmp_path, num_receivers=2) as pair:
        plan = FaultPlan(lambda name: name.sequence == 2)
        publisher = pair.publisher(
            settings=msgspec.structs.replace(SMALL, min_receivers=2), wrap_sender=lambda sender: CorruptingSender(sender, plan)
        )
        pauses = [[], []]
        for receiver, found in zip(pair.receivers, pauses, strict=True):
            receiver.subscribe(lambda stage, found=found: found.append(stage) if stage.stage == "pause" else None)
        perturb(pair.policy, 0)
        report = publisher.publish().wait(60)
        assert report.attempts == 2
        assert [len(found) for found in pauses] == [1, 1]
        pair.assert_equal()


def test_no_request_ever_sees_a_mixture(tmp_path):
    """Each response is the digest of all weights: it must be that of one version."""
    with Pair(tmp_path) as pair:
        plan = FaultPlan(lambda name: name.sequence == 1 and name.attempt.startswith("v000003"))
        publisher = pair.publisher(settings=SMALL, wrap_sender=lambda sender: CorruptingSender(sender, plan))
        seen, over = [], threading.Event()

        def serve():
            while not over.is_set():
                with pair.receivers[0].serving():
                    seen.append(tuple(sorted(raw(pair.models[0]).items())))

        legal = {tuple(sorted(raw(pair.models[0]).items()))}
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            for step in range(6):
                perturb(pair.policy, step)
                legal.add(tuple(sorted(dense_reload(pair.policy).items())))
                (publisher.publish().wait(60) if step % 2 else publisher.refit())
        finally:
            over.set()
            thread.join(20)
        assert plan.fired == 1
        assert len(legal) == 7
        assert set(seen) <= legal
        pair.assert_equal()


def test_staged_payloads_beyond_the_limit_go_to_disk_and_come_back(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        model = Fused(pair.policy)
        spill = tmp_path / "spill"
        spill.mkdir()
        settings = msgspec.structs.replace(RECEIVER_SETTINGS, staging_nbytes=1, spill_directory=str(spill))
        pair.models.append(model)
        receiver = pair.stack.enter_context(
            deltarefit.Receiver.attach(model, load_weights=model.load_weights, run=pair.run, name="r", settings=settings)
        )
        spilled = []
        receiver.subscribe(lambda stage: spilled.extend(spill.glob("*/*")) if stage.stage == "apply" else None)
        publisher = pair.publisher(settings=SMALL)
        perturb(pair.policy, 0)
        assert publisher.publish().wait(20).attempts == 1
        pair.assert_equal()
        assert list(spill.iterdir()) == []


def test_a_disk_that_is_full_at_staging_ends_in_a_clear_error(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        model = Fused(pair.policy)
        before = raw(model)
        settings = msgspec.structs.replace(RECEIVER_SETTINGS, staging_nbytes=1, spill_directory="/proc/self")
        receiver = pair.stack.enter_context(
            deltarefit.Receiver.attach(model, load_weights=model.load_weights, run=pair.run, name="r", settings=settings)
        )
        publisher = pair.publisher(settings=msgspec.structs.replace(SMALL, max_attempts=2))
        perturb(pair.policy, 0)
        with pytest.raises(deltarefit.OperatorRequiredError, match=r"cannot be staged on disk in /proc/self.*spill_directory"):
            publisher.publish().wait(30)
        with receiver.serving(1.0):  # the gate was never closed
            assert raw(model) == before


def test_closing_a_publisher_waits_for_its_refit(held):
    pair, publisher, sender, _ = held
    handle = publisher.publish()
    assert sender.holding.wait(20)
    threading.Timer(0.2, sender.release).start()
    publisher.close()
    assert handle.is_done
    assert handle.wait().policy_version == 1
    pair.assert_equal()


def test_every_rank_publishes_and_waits(tmp_path):
    with Pair(tmp_path) as pair:
        policies = [Policy() for _ in range(2)]

        def rank_main(collective):
            rank = collective.rank
            with deltarefit.Publisher(policies[rank], run=pair.run, settings=SMALL, collective=collective) as publisher:
                reports = []
                for step in range(3):
                    perturb(policies[rank], step)
                    reports.append(publisher.publish().wait(60))
                return reports

        reports = run_ranks(2, rank_main)
        assert reports[0] == reports[1]
        assert [report.policy_version for report in reports[0]] == [1, 2, 3]
        assert raw(pair.models[0]) == dense_reload(policies[0])
