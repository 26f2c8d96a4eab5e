"""Deaths, sleeps and takeovers in one process: what is left of a refit, and that the next one ends bit-equal."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch

import deltarefit
from deltarefit.errors import DeadlineError
from deltarefit.runtime.clock import RandomIds, SystemClock
from deltarefit.runtime.engine import LocalEngine
from deltarefit.runtime.gate import LocalGate
from deltarefit.runtime.session import control_plane
from deltarefit.testing.faults import CorruptingSender, DelayingSender, FailingSender, FaultPlan, HoldingSender
from deltarefit.transport import open_run

from .pair import RECEIVER_SETTINGS, SETTINGS, Fused, Pair, Policy, dense_reload, perturb, raw, wait_until

pytestmark = pytest.mark.torch

LEASE_S = 2.0
QUICK = msgspec.structs.replace(SETTINGS, lease_s=LEASE_S)
QUICK_RECEIVER = msgspec.structs.replace(RECEIVER_SETTINGS, lease_s=LEASE_S)


class SleepyClock(SystemClock):
    """A machine's clock that can be made to have slept."""

    def __init__(self) -> None:
        self.slept_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.slept_s


class Died(BaseException):
    """What no code that is to survive a crash may catch."""


class DyingSender(FailingSender):
    """Ends the trainer in the middle of sending."""

    def send(self, payload_id, data):
        if self.plan.strikes(payload_id):
            raise Died
        self.inner.send(payload_id, data)


@pytest.fixture
def quick(tmp_path):
    """A trainer and two receivers with short leases."""
    with Pair(tmp_path, num_receivers=0) as pair:
        for number in range(2):
            model = Fused(pair.policy)
            pair.models.append(model)
            pair.receivers.append(attach(pair, model, f"rollout-{number}"))
        yield pair


def opened(pair, **options):
    """A publisher whose first refit will meet every receiver."""
    publisher = pair.publisher(**options)
    for receiver in pair.receivers:
        if receiver._thread is not None:
            receiver.wait_joined(10.0)
    return publisher


def attach(pair, model, name, clock=None):
    gate = LocalGate()
    receiver = deltarefit.Receiver(
        LocalEngine(model, model.load_weights, request_gate=gate),
        run=pair.run,
        name=name,
        request_gate=gate,
        settings=QUICK_RECEIVER,
        clock=clock,
    ).start()
    receiver.gate = gate
    pair.stack.callback(close_quietly, receiver)
    return receiver


def close_quietly(receiver):
    if receiver._thread is not None:
        receiver.close()


def die(receiver):
    """As a killed process: no goodbye, no further beat."""
    receiver._stopping.set()
    receiver._thread.join()
    receiver._thread = None
    receiver._presence._heartbeat.close(say_goodbye=False)


def die_as_trainer(publisher):
    publisher._hold._heartbeat.close(say_goodbye=False)
    publisher._hold = None


def assert_nothing_is_left(run):
    """No payload, no message, and no beacon but those of the living."""
    store = open_run(run, clock=SystemClock())
    assert store.listing("attempts") == []
    assert [info.key for info in store.listing("mail")] == []


class Deep(torch.nn.Module):
    """Many small tensors, so that there are many payloads; its loader copies each to its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16)) for _ in range(16))

    def load_weights(self, weights):
        own = dict(self.named_parameters())
        for name, tensor in weights:
            own[name].data.copy_(tensor)


def test_a_failure_at_a_receiver_ends_the_attempt_before_the_owners_are_through(tmp_path):
    run = (tmp_path / "run").as_uri()
    policy, model = Deep(), Deep()
    damage = FaultPlan(lambda name: name.sequence == 0)
    slow = FaultPlan(lambda name: name.attempt.startswith("v000001-a1-"), times=None)
    with (
        deltarefit.Receiver.attach(model, load_weights=model.load_weights, run=run, settings=RECEIVER_SETTINGS),
        deltarefit.Publisher(
            policy,
            run=run,
            settings=msgspec.structs.replace(SETTINGS, bucket_nbytes=16, chunk_nbytes=16),
            wrap_sender=lambda sender: DelayingSender(CorruptingSender(sender, damage), slow, delay_s=0.2, clock=SystemClock()),
        ) as publisher,
    ):
        for tensor in policy.parameters():
            tensor.data += 1
        report = publisher.refit()
    assert (damage.fired, report.attempts, report.payloads) == (1, 2, 16)
    assert "digest" in report.failures[0]
    assert slow.fired < 12, "an attempt that had failed went on"
    assert raw(model) == raw(policy)


def test_a_dead_receiver_is_retired_and_its_restart_gets_what_it_lacks(quick):
    publisher = opened(quick, settings=QUICK)
    perturb(quick.policy, 0)
    publisher.refit()
    die(quick.receivers[0])
    quick.models.pop(0)
    perturb(quick.policy, 1)
    report = publisher.refit()
    assert report.receivers == ("rollout-1",)
    quick.assert_equal()

    model = Fused(Policy())  # restarted with the checkpoint that the run began with
    back = attach(quick, model, "rollout-0")
    back.wait_joined(10.0)
    with pytest.raises(DeadlineError):
        back.serving(0.2).__enter__()
    perturb(quick.policy, 2)
    report = publisher.refit()
    assert (report.receivers, report.attempts) == (("rollout-0", "rollout-1"), 1)
    quick.models.append(model)
    quick.assert_equal()
    with back.serving(5.0):
        assert back.policy_version == 3
    assert_nothing_is_left(quick.run)


@pytest.mark.parametrize("when", ["between refits", "during a refit"])
def test_a_receiver_that_wakes_after_its_lease_fences_itself_and_comes_back(tmp_path, when):
    with Pair(tmp_path, num_receivers=0) as pair:
        clock = SleepyClock()
        pair.models = [Fused(pair.policy), Fused(pair.policy)]
        sleeper = attach(pair, pair.models[0], "sleeper", clock)
        attach(pair, pair.models[1], "rollout")
        strike = FaultPlan(lambda name: when == "during a refit" and name.attempt.startswith("v000002-a1"))

        class Sleeping(FailingSender):
            def send(self, payload_id, data):
                if self.plan.strikes(payload_id):
                    clock.slept_s += 10 * LEASE_S
                self.inner.send(payload_id, data)

        publisher = pair.publisher(settings=QUICK, wrap_sender=lambda sender: Sleeping(sender, strike))
        perturb(pair.policy, 0)
        publisher.refit()
        first = sleeper._presence.shown.incarnation
        if when == "between refits":
            clock.slept_s += 10 * LEASE_S
            wait_until(lambda: sleeper._presence.shown.incarnation != first)
            with sleeper.serving(10.0):  # it found by itself that it holds the committed version
                assert sleeper.policy_version == 1
        perturb(pair.policy, 1)
        report = publisher.refit()
        assert report.attempts == (1 if when == "between refits" else 2)
        assert sleeper._presence.shown.incarnation != first
        perturb(pair.policy, 2)
        assert publisher.refit().receivers == ("rollout", "sleeper")
        pair.assert_equal()
        with sleeper.serving(5.0):
            assert sleeper.policy_version == 3


def test_an_engine_with_the_committed_weights_joins_and_serves_at_once(quick):
    publisher = opened(quick, settings=QUICK)
    perturb(quick.policy, 0)
    publisher.refit()
    late = attach(quick, Fused(quick.policy), "late")
    with late.serving(10.0):
        pass
    late.wait_joined(10.0)
    with late.serving(1.0):
        assert late.policy_version == 1


@pytest.mark.parametrize("payload", [0, 2])
def test_a_trainer_that_dies_in_a_refit_and_comes_back_with_other_weights(tmp_path, payload):
    with Pair(tmp_path, num_receivers=0) as pair:
        pair.models = [Fused(pair.policy)]
        receiver = attach(pair, pair.models[0], "rollout")
        plan = FaultPlan(lambda name: name.sequence == payload and name.attempt.startswith("v000002"))
        settings = msgspec.structs.replace(QUICK, bucket_nbytes=128, chunk_nbytes=128)
        publisher = pair.publisher(settings=settings, wrap_sender=lambda sender: DyingSender(sender, plan))
        perturb(pair.policy, 0)
        publisher.refit()
        perturb(pair.policy, 1)
        with pytest.raises(Died):
            publisher.refit()
        die_as_trainer(publisher)
        pair.policy = Policy()
        perturb(pair.policy, 7)
        second = pair.publisher(settings=settings)
        assert second.policy_version == 1
        with pytest.raises(DeadlineError):
            receiver.serving(0.2).__enter__()
        perturb(pair.policy, 8)
        report = second.refit()
        assert (report.policy_version, report.attempts) == (2, 1)
        pair.assert_equal()
        with receiver.serving(5.0):
            assert receiver.policy_version == 2
        assert_nothing_is_left(pair.run)


def test_a_trainer_that_dies_in_the_very_first_refit(tmp_path):
    """Receivers then hold a mixture at version 0: no reason to say that they came with a wrong checkpoint."""
    with Pair(tmp_path, num_receivers=0) as pair:
        pair.models = [Fused(pair.policy)]
        attach(pair, pair.models[0], "rollout")
        settings = msgspec.structs.replace(QUICK, bucket_nbytes=128, chunk_nbytes=128)
        plan = FaultPlan(lambda name: name.sequence == 2)
        publisher = pair.publisher(settings=settings, wrap_sender=lambda sender: DyingSender(sender, plan))
        perturb(pair.policy, 0)
        with pytest.raises(Died):
            publisher.refit()
        die_as_trainer(publisher)
        second = pair.publisher(settings=settings)
        assert second.refit().policy_version == 1
        pair.assert_equal()


def test_a_trainer_that_was_given_up_for_dead_stops(quick):
    first = opened(quick, settings=QUICK)
    perturb(quick.policy, 0)
    first.refit()
    first._hold._heartbeat.close(say_goodbye=False)
    second = opened(quick, settings=QUICK)
    perturb(quick.policy, 1)
    second.refit()
    quick.assert_equal()
    with pytest.raises(deltarefit.CommitConflictError, match="took"):
        first.refit()
    quick.assert_equal()


def test_a_trainer_whose_lease_ran_out_goes_on_if_nobody_took_over(tmp_path):
    with Pair(tmp_path) as pair:
        clock = SleepyClock()
        publisher = pair.publisher(clock=clock)
        perturb(pair.policy, 0)
        publisher.refit()
        clock.slept_s += 100.0
        perturb(pair.policy, 1)
        assert publisher.refit().policy_version == 2
        pair.assert_equal()


def test_an_operator_aborts_a_refit_under_way(quick):
    holding: list[HoldingSender] = []

    def wrap(sender):
        holding.append(HoldingSender(sender, FaultPlan(lambda name: name.attempt.startswith("v000002-a1"))))
        return holding[0]

    publisher = opened(quick, settings=QUICK, wrap_sender=wrap)
    perturb(quick.policy, 0)
    publisher.refit()
    perturb(quick.policy, 1)

    def abort():
        assert holding[0].holding.wait(10.0)
        plane(quick.run).request_abort("the reward is wrong")
        SystemClock().sleep(1.5)  # the coordinator looks at the record once a second
        holding[0].release()

    thread = threading.Thread(target=abort)
    thread.start()
    with pytest.raises(deltarefit.OperatorRequiredError, match="the reward is wrong"):
        publisher.refit()
    thread.join()
    state = plane(quick.run).read()
    assert (state.record.policy_version, state.attempt, state.transition, state.abort) == (1, None, None, "")
    assert state.repair
    with pytest.raises(DeadlineError):
        quick.receivers[0].serving(0.2).__enter__()
    report = publisher.refit()
    assert report.policy_version == 2
    assert report.payload_nbytes > 24 * 16 * 2, "expected every element to be sent"
    quick.assert_equal()
    with quick.receivers[0].serving(5.0):
        assert quick.receivers[0].policy_version == 2
    assert_nothing_is_left(quick.run)


def test_a_refit_that_asked_for_a_person_goes_on_when_called_again(quick):
    plan = FaultPlan(lambda name: name.attempt.startswith("v000001"), times=2)
    publisher = opened(
        quick,
        settings=msgspec.structs.replace(QUICK, max_attempts=2),
        wrap_sender=lambda sender: CorruptingSender(sender, plan),
    )
    perturb(quick.policy, 0)
    with pytest.raises(deltarefit.OperatorRequiredError, match="deltarefit status"):
        publisher.refit()
    perturb(quick.policy, 1)  # other weights by now: every element is sent
    report = publisher.refit()
    assert (plan.fired, report.policy_version) == (2, 1)
    quick.assert_equal()


def test_an_abort_that_nobody_saw_does_not_stop_the_next_refit(quick):
    plan = FaultPlan(times=1)
    publisher = opened(
        quick,
        settings=msgspec.structs.replace(QUICK, max_attempts=1),
        wrap_sender=lambda sender: CorruptingSender(sender, plan),
    )
    perturb(quick.policy, 0)
    with pytest.raises(deltarefit.OperatorRequiredError):
        publisher.refit()
    plane(quick.run).request_abort("enough")
    assert publisher.refit().policy_version == 1
    quick.assert_equal()


def plane(run):
    return control_plane(open_run(run, clock=SystemClock()), SystemClock(), RandomIds())


def test_the_oracle_is_not_fooled():
    """The comparison that all of these tests rest on."""
    policy = Policy()
    expected = dense_reload(policy)
    with torch.no_grad():
        policy.first[0, 0] = -policy.first[0, 0]
    assert raw(Fused(policy)) != expected


def test_owners_that_could_not_take_the_candidate_over_try_again_or_start_anew(tmp_path, monkeypatch):
    """The version is committed then; the update of the baseline is repeated, or another Publisher begins a new baseline."""
    with Pair(tmp_path) as pair:
        publisher = pair.publisher()
        owner = publisher._source.owner
        commit, failures = owner.commit, []

        def failing():
            failures.append(1)
            raise OSError("no room on the device")

        monkeypatch.setattr(owner, "commit", failing)
        perturb(pair.policy, 0)
        with pytest.raises(
            deltarefit.OperatorRequiredError, match=r"policy version 1 .* is committed, but owners .*new Publisher"
        ):
            publisher.refit()
        with pytest.raises(DeadlineError):
            pair.receivers[0].serving(0.2).__enter__()
        monkeypatch.setattr(owner, "commit", commit)
        assert publisher.refit().policy_version == 2  # it ends version 1 first, then carries the weights at hand
        assert failures == [1]
        pair.assert_equal()

        monkeypatch.setattr(owner, "commit", failing)
        perturb(pair.policy, 1)
        with pytest.raises(deltarefit.OperatorRequiredError):
            publisher.refit()
        publisher.close()
        perturb(pair.policy, 2)
        second = pair.publisher()
        assert second.policy_version == 3
        assert second.refit().policy_version == 4
        pair.assert_equal()


def test_engines_come_and_go_while_training_goes_on(quick):
    publisher = opened(quick, settings=QUICK)
    perturb(quick.policy, 0)
    assert publisher.refit().receivers == ("rollout-0", "rollout-1")
    quick.receivers[0].close()
    quick.models.pop(0)
    perturb(quick.policy, 1)
    assert publisher.refit().receivers == ("rollout-1",)
    for number in (2, 3):
        quick.models.append(Fused(Policy() if number == 2 else quick.policy))
        quick.receivers.append(attach(quick, quick.models[-1], f"rollout-{number}"))
        quick.receivers[-1].wait_joined(10.0)
    perturb(quick.policy, 2)
    report = publisher.refit()
    assert (report.receivers, report.attempts) == (("rollout-1", "rollout-2", "rollout-3"), 1)
    quick.assert_equal()
    assert_nothing_is_left(quick.run)


def test_a_refit_waits_for_receivers_that_come_back(tmp_path):
    """The only receiver dies in the middle; started again, it takes part in the retry as the new one that it is."""
    with Pair(tmp_path, num_receivers=0) as pair:
        victim = attach(pair, Fused(pair.policy), "rollout")
        plan = FaultPlan(lambda name: name.attempt.startswith("v000002"))

        class Killing(FailingSender):
            def send(self, payload_id, data):
                if self.plan.strikes(payload_id):
                    die(victim)
                    threading.Timer(1.5 * LEASE_S, come_back).start()
                self.inner.send(payload_id, data)

        def come_back():
            pair.models.append(Fused(Policy()))
            pair.receivers.append(attach(pair, pair.models[0], "rollout"))

        publisher = pair.publisher(settings=QUICK, wrap_sender=lambda sender: Killing(sender, plan))
        perturb(pair.policy, 0)
        publisher.refit()
        perturb(pair.policy, 1)
        report = publisher.refit()
        assert (plan.fired, report.policy_version, report.attempts, report.receivers) == (1, 2, 2, ("rollout",))
        pair.assert_equal()
        assert_nothing_is_left(pair.run)
