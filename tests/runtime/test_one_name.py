"""Two receivers of one name: the later one takes part, the earlier one serves nothing, whatever else goes wrong."""

from __future__ import annotations

import threading

import pytest
import torch

import deltarefit
from deltarefit.errors import TransportError
from deltarefit.runtime.clock import SystemClock
from deltarefit.runtime.gate import LocalGate
from deltarefit.transport import RunStore

from .pair import Fused, Pair, perturb, wait_until

pytestmark = pytest.mark.torch

CLOCK = SystemClock()
UNREACHABLE = ("put", "put_if_absent", "get", "get_as", "find", "get_range", "head", "listing", "children", "delete")
REPLACED = "another receiver started under this name"


class Watched(LocalGate):
    """Counts how often it was told to close, and does not do so as often as asked."""

    def __init__(self, failures=0):
        super().__init__()
        self.failures = failures
        self.told = 0

    def close(self, *args, **options):
        self.told += 1
        if self.told <= self.failures:
            raise deltarefit.AttemptFailedError("the engine did not answer")
        super().close(*args, **options)


def test_of_two_receivers_of_one_name_the_later_one_takes_part_and_the_other_shuts_its_gate(pair):
    """They share a mailbox and a sign of life, so one of them would serve old weights without a word."""
    (earlier,) = pair.receivers
    publisher = pair.publisher()
    later = Fused(pair.policy)
    receiver = pair.attach(later, earlier.name)
    wait_until(lambda: earlier.failure is not None)
    with pytest.raises(deltarefit.RejectedError, match="another receiver started under this name"), earlier.serving(1.0):
        pass
    pair.models = [later]
    pair.refit_at_once(publisher, 2)
    earlier.close()
    perturb(pair.policy, 7)
    assert publisher.refit().attempts == 1, "the earlier one took nothing of the later one's along"
    pair.assert_equal()
    assert receiver.failure is None
    receiver.close()
    again = pair.attach(later, earlier.name)  # a restart is no second receiver
    perturb(pair.policy, 8)
    publisher.refit()
    pair.assert_equal()
    assert again.failure is None


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 0.99])
def test_the_earlier_one_sees_the_later_one_whenever_that_starts(pair, share):
    """Both beat equally often: one that looked between its beats only might see its own beat for ever."""
    (earlier,) = pair.receivers
    renew_s = earlier._presence.lease.renew_s
    CLOCK.sleep(share * renew_s)
    later = pair.attach(Fused(pair.policy), earlier.name)
    wait_until(lambda: earlier.failure is not None)
    assert REPLACED in str(earlier.failure)
    CLOCK.sleep(2 * renew_s)
    assert later.failure is None
    assert not later._presence.is_replaced


def test_a_lease_that_runs_out_while_the_store_is_out_of_reach_shuts_the_gate(pair, monkeypatch):
    """Nothing that has to be read may stand before it."""
    publisher = pair.publisher()
    pair.refit_at_once(publisher, 1)
    (receiver,) = pair.receivers

    def unreachable(store, key, *args, **options):
        raise TransportError(f"{key}: no route to the store")

    with monkeypatch.context() as patch:
        for call in UNREACHABLE:
            patch.setattr(RunStore, call, unreachable)
        wait_until(lambda: not receiver._gate.is_open)
    with receiver.serving(20.0):
        assert receiver.policy_version == 1


def test_an_engine_that_did_not_stop_for_the_later_one_is_told_again(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        gate = Watched(failures=2)
        earlier = pair.attach(Fused(pair.policy), "rollout", request_gate=gate)
        pair.attach(Fused(pair.policy), "rollout")
        wait_until(lambda: earlier.failure is not None)
        assert gate.told == 3
        assert not gate.is_open
        assert REPLACED in str(earlier.failure)


def test_a_receiver_that_was_refused_makes_room_as_well(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        models = Fused(pair.policy), Fused(pair.policy)
        pair.policy.register_parameter("unheard", torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))
        earlier = pair.attach(models[0], "rollout")
        pair.publisher()
        wait_until(lambda: "unheard" in str(earlier.failure))
        pair.attach(models[1], "rollout")
        wait_until(lambda: REPLACED in str(earlier.failure))


def test_requests_that_wait_for_a_gate_that_will_not_open_are_told_why(pair):
    (earlier,) = pair.receivers
    earlier._gate.close(1.0)
    told = []

    def request():
        try:
            with earlier.serving(None):
                told.append("served")
        except deltarefit.RejectedError as error:
            told.append(str(error))

    waiting = threading.Thread(target=request, daemon=True)
    waiting.start()
    pair.attach(Fused(pair.policy), earlier.name)
    waiting.join(20.0)
    assert len(told) == 1
    assert REPLACED in told[0]
