"""Prewarm is remembered, and run again by itself once the engine has moved its weights or laid them out anew."""

from __future__ import annotations

import contextlib
import itertools

import msgspec
import pytest
import torch

import deltarefit
from deltarefit.errors import AttemptFailedError, RejectedError
from deltarefit.receiver import ReceiverSettings
from deltarefit.runtime.clock import ManualClock
from deltarefit.runtime.engine import LocalEngine

from .pair import RECEIVER_SETTINGS, SETTINGS, Fused, Pair, Policy, perturb

pytestmark = pytest.mark.torch


class Counting(Fused):
    """Counts calls of its loader."""

    calls = 0

    def load_weights(self, weights):
        self.calls += 1
        super().load_weights(weights)


@pytest.fixture
def counted(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        pair.models.append(Counting(pair.policy))
        pair.receivers.append(pair.attach(pair.models[0], "rollout-0"))
        yield pair


def test_refits_do_not_learn_the_layout_again(counted):
    publisher = counted.publisher()
    perturb(counted.policy, 0)
    publisher.refit()
    calls = counted.models[0].calls
    for seed in (1, 2):
        perturb(counted.policy, seed)
        publisher.refit()
    publisher.audit()
    assert counted.models[0].calls == calls


@pytest.mark.parametrize("audit_every", [0, 1])
@pytest.mark.parametrize("held", ["its own bits", "the start checkpoint"])
def test_storage_that_moved_between_refits_is_learned_again_and_looked_at(counted, audit_every, held):
    model = counted.models[0]
    publisher = counted.publisher(settings=msgspec.structs.replace(SETTINGS, audit_every=audit_every))
    perturb(counted.policy, 0)
    publisher.refit()
    model.fused.data = model.fused.data.clone()
    if held == "the start checkpoint":
        model.load_weights(Policy().state_dict().items())
    moved_to = model.fused.data_ptr()
    perturb(counted.policy, 1)
    report = publisher.refit()
    assert "storage of fused changed since prewarm; this receiver has prewarmed again" in " ".join(report.failures)
    assert report.attempts <= 3
    assert model.fused.data_ptr() == moved_to
    counted.assert_equal()
    perturb(counted.policy, 2)
    assert publisher.refit().attempts == 1
    counted.assert_equal()
    assert publisher.audit().is_clean


def test_an_audit_that_meets_moved_storage_has_it_learned_again(counted):
    publisher = counted.publisher()
    perturb(counted.policy, 0)
    publisher.refit()
    model = counted.models[0]
    model.fused.data = model.fused.data.clone()
    assert "has prewarmed again" in publisher.audit().receivers[0].failure
    assert publisher.audit().is_clean


def test_another_layout_of_the_same_storage_is_learned_again(tmp_path):
    """As after expert load balancing: the loader places the same names elsewhere, and says so by its layout tag."""
    layout = ["first first"]

    class Swapping(Fused):
        def load_weights(self, weights):
            size = 24 * 16
            second_first = layout[0] == "second first"
            start = 8 * 24 if second_first else 0
            other = 0 if second_first else size
            for name, tensor in weights:
                if name == "scale":
                    self.scale.copy_(tensor)
                elif name == "first":
                    self.fused.data[start : start + size].view(24, 16).copy_(tensor)
                else:
                    self.fused.data[other : other + 8 * 24].view(8, 24).copy_(tensor)

    with Pair(tmp_path, num_receivers=0) as pair:
        model = Swapping(pair.policy)
        pair.attach(model, "rollout", rank_settings=ReceiverSettings(layout_tag=lambda: layout[0]))
        publisher = pair.publisher()
        for step in range(4):
            if step == 2:
                layout[0] = "second first"
            perturb(pair.policy, step)
            report = publisher.refit()
            assert ("the engine's settings changed" in " ".join(report.failures)) == (step == 2)
            fresh = Swapping(pair.policy)
            assert torch.equal(model.fused.view(torch.int16), fresh.fused.view(torch.int16))


def test_a_layout_that_can_no_longer_be_refitted_is_refused_by_name(counted):
    publisher = counted.publisher()
    perturb(counted.policy, 0)
    publisher.refit()
    counted.models[0].fused.data = torch.zeros(0, dtype=torch.bfloat16)
    perturb(counted.policy, 1)
    with pytest.raises((RejectedError, deltarefit.OperatorRequiredError), match=r"fused: has shape \(0,\)"):
        publisher.refit()


def test_parameters_that_the_checkpoint_lacks_can_be_allowed(tmp_path):
    class WithAdapter(Fused):
        def __init__(self, policy):
            super().__init__(policy)
            self.adapter = torch.nn.Parameter(torch.ones(3))

    with Pair(tmp_path, num_receivers=0) as pair:
        model = WithAdapter(pair.policy)
        pair.attach(model, "rollout", rank_settings=ReceiverSettings(may_lack=("adapter",), verify_writes=True))
        publisher = pair.publisher()
        perturb(pair.policy, 0)
        publisher.refit()
        assert publisher.audit().is_clean
        assert model.adapter.tolist() == [1, 1, 1]


def test_an_engine_that_cannot_prewarm_now_is_asked_ever_more_rarely(tmp_path):
    """A server that is down is not flooded with tries; once it is back, its receiver joins."""
    clock = ManualClock()
    tries: list[float] = []

    class Down(LocalEngine):
        is_up = False

        def prewarm(self, catalog):
            tries.append(clock.monotonic_s())
            if not self.is_up:
                raise AttemptFailedError("no server answers")
            return super().prewarm(catalog)

    with Pair(tmp_path, num_receivers=0) as pair:
        pair.publisher()
        model = Fused(pair.policy)
        engine = Down(model, model.load_weights)
        settings = msgspec.structs.replace(RECEIVER_SETTINGS, lease_s=5.0)
        receiver = deltarefit.Receiver(engine, run=pair.run, name="late", settings=settings, clock=clock)
        pair.stack.callback(receiver.close)

        def step_until(num_tries):
            for _ in range(20_000):
                with contextlib.suppress(AttemptFailedError):
                    receiver.step(0.1)
                if len(tries) == num_tries:
                    return
            raise AssertionError(f"{len(tries)} tries in vain")

        step_until(8)
        pauses = [after - before for before, after in itertools.pairwise(tries)]
        assert pauses == pytest.approx([1, 2, 4, 8, 16, 30, 30], abs=0.25)
        engine.is_up = True
        step_until(9)
        receiver.wait_joined(1.0)
