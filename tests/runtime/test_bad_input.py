"""What a user gets wrong: each a clear error, nothing written, nothing left locked."""

from __future__ import annotations

import os

import msgspec
import pytest
import torch

import deltarefit
from deltarefit.runtime.clock import SystemClock
from deltarefit.runtime.messages import Call, Restore, encode_message
from deltarefit.testing.collective import run_ranks
from deltarefit.transport import Mailbox, open_run

from .pair import RECEIVER_SETTINGS, SETTINGS, Fused, Pair, Policy, perturb, raw

pytestmark = pytest.mark.torch

IMPATIENT = msgspec.structs.replace(SETTINGS, join_timeout_s=0.5)


def test_a_receiver_with_another_checkpoint_is_refused_naming_the_tensors(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        other = Policy()
        with torch.no_grad():
            other.second[0, 0] += 1
        model = Fused(other)
        before = raw(model)
        pair.attach(model, "rollout")
        publisher = pair.publisher()
        perturb(pair.policy, 0)
        with pytest.raises(
            deltarefit.RejectedError, match=r"rollout holds other weights .* 1 of 3 tensors differ, first second"
        ):
            publisher.refit()
        assert raw(model) == before
        assert publisher.policy_version == 0
        # Once it holds the right checkpoint, the same publisher goes on: nothing was left locked.
        model.load_weights(Policy().state_dict().items())
        pair.models.append(model)
        publisher.refit()
        pair.assert_equal()


def test_a_run_that_a_live_trainer_holds_is_refused_and_free_after_it_closed(tmp_path):
    with Pair(tmp_path) as pair:
        first = pair.publisher()
        with pytest.raises(deltarefit.RejectedError, match="in use by live coordinator"):
            deltarefit.Publisher(Policy(), run=pair.run, settings=SETTINGS)
        perturb(pair.policy, 0)
        first.refit()
        pair.assert_equal()
        first.close()
        second = pair.publisher()
        perturb(pair.policy, 1)
        assert second.refit().policy_version == 2
        pair.assert_equal()


def test_what_came_with_a_message_that_makes_no_sense_is_read_all_the_same(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        receiver = pair.attach(Fused(pair.policy), "rollout", start=False)
        pair.publisher()
        while not receiver._standing.is_joined:
            receiver.step(0.0)
        before = receiver._presence.shown.incarnation
        box = Mailbox(open_run(pair.run, clock=SystemClock()), "operator", clock=SystemClock(), nonce="00000001")
        box.post("rollout", b"no call")
        box.post("rollout", encode_message(Call("restore", 1, before, Restore())))
        with pytest.raises(deltarefit.RefitError, match="message from operator: expected Call"):
            receiver.step(0.0)
        assert receiver._presence.shown.incarnation == before
        receiver.step(0.0)
        assert receiver._presence.shown.incarnation != before


def test_a_run_of_another_model_is_refused(tmp_path):
    with Pair(tmp_path) as pair:
        pair.publisher().close()
        with pytest.raises(deltarefit.RejectedError, match="another model"):
            deltarefit.Publisher(torch.nn.Linear(3, 3), run=pair.run, settings=SETTINGS)


def test_no_receiver_is_an_error_that_says_what_to_start(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        publisher = pair.publisher(settings=IMPATIENT)
        with pytest.raises(deltarefit.RejectedError, match=r"0 of 1 receivers joined .*Receiver\.attach"):
            publisher.refit()


def test_a_tensor_that_the_engine_does_not_know_is_refused_before_a_byte_is_sent(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        model = Fused(pair.policy)
        pair.policy.register_parameter("unheard", torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))
        before = raw(model)
        receiver = pair.attach(model, "rollout")
        publisher = pair.publisher()
        with pytest.raises(deltarefit.RejectedError, match="unheard"):
            publisher.refit()
        assert receiver.failure is not None
        with pytest.raises(deltarefit.RejectedError, match="unheard"):
            receiver.wait_joined(5.0)
        assert raw(model) == before


def test_an_object_that_is_no_model_and_no_engine_is_refused(tmp_path):
    run = (tmp_path / "run").as_uri()
    with pytest.raises(deltarefit.RejectedError, match="expected a torch module"):
        deltarefit.Publisher({"weight": torch.zeros(3)}, run=run)
    with pytest.raises(deltarefit.RejectedError, match="expected a vLLM or SGLang engine"):
        deltarefit.Receiver.attach(object(), run=run, settings=RECEIVER_SETTINGS)


@pytest.mark.parametrize("run", ["", "run7", "ftp://host/run", "s3://"])
def test_a_run_that_is_no_url_is_refused(run):
    with pytest.raises(deltarefit.RejectedError):
        deltarefit.Publisher(Policy(), run=run)


def test_a_closed_publisher_refuses(pair):
    publisher = pair.publisher()
    publisher.close()
    publisher.close()
    with pytest.raises(deltarefit.RejectedError, match="closed"):
        publisher.refit()


@pytest.mark.parametrize("call", ["refit", "publish"])
def test_a_model_that_lost_a_parameter_is_refused_and_goes_on_once_it_has_it_again(pair, call):
    publisher = pair.publisher()
    before = raw(pair.models[0])
    lost, pair.policy.first = pair.policy.first, None
    with pytest.raises(deltarefit.RejectedError, match=r"tensor first: is not in the model any more"):
        getattr(publisher, call)()
    assert raw(pair.models[0]) == before
    pair.policy.first = lost
    pair.refit_at_once(publisher, 1)


def test_a_model_that_changed_on_one_rank_is_refused_on_all_at_once(tmp_path):
    """Else the others would wait for that rank as long as the process group lets them."""

    def rank_main(collective):
        policy = Policy()
        run = (tmp_path / "run").as_uri()
        with deltarefit.Publisher(policy, run=run, settings=IMPATIENT, collective=collective) as publisher:
            if collective.rank == 1:
                policy.extra = torch.nn.Linear(2, 2)
            with pytest.raises(deltarefit.RejectedError, match=r"extra.weight, extra.bias: 2 tensors were added"):
                publisher.refit()

    assert run_ranks(2, rank_main) == [None, None]


def test_a_fork_of_a_trainer_or_receiver_is_refused_and_leaves_its_parent_alone(pair):
    """It has none of the threads, so it would wait for ever; and what it closes is its parent's."""
    publisher, receiver = pair.publisher(), pair.receivers[0]
    pair.refit_at_once(publisher, 1)
    calls = {
        "refit": publisher.refit,
        "publish": publisher.publish,
        "audit": publisher.audit,
        "serving": lambda: receiver.serving(1.0).__enter__(),
        "wait_joined": receiver.wait_joined,
    }
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = []
        for name, call in calls.items():
            try:
                call()
            except BaseException as error:
                told.append(f"{name}: {type(error).__name__}: {error}")
        publisher.close()
        receiver.close()
        os.write(writing, "\n".join(told).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read().splitlines()
    os.waitpid(child, 0)
    assert [line.partition(":")[0] for line in told] == list(calls)
    assert all(f"RejectedError: {name}" in line and "a fork of" in line for name, line in zip(calls, told, strict=True))
    perturb(pair.policy, 1)
    assert publisher.refit().attempts == 1
    pair.assert_equal()


def test_settings_refuse_unknown_names_and_read_sizes():
    with pytest.raises(deltarefit.RejectedError, match="known settings"):
        deltarefit.PublisherSettings.from_mapping({"bucket_size": 3})
    with pytest.raises(deltarefit.RejectedError, match="expected a number"):
        deltarefit.PublisherSettings.from_mapping({"bucket_nbytes": "many"})
    settings = deltarefit.PublisherSettings.from_mapping({"bucket_nbytes": "256MiB", "lease_s": 3})
    assert (settings.bucket_nbytes, settings.lease_s) == (256 * 2**20, 3.0)
    environment = {"DELTAREFIT_MIN_RECEIVERS": "4", "PATH": "/bin"}
    assert deltarefit.PublisherSettings.from_environment(environment, "DELTAREFIT_").min_receivers == 4


def test_settings_come_from_a_toml_table(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('[publisher]\nbucket_nbytes = "1GiB"\naudit_every = 5\n')
    settings = deltarefit.PublisherSettings.from_toml(path, "publisher")
    assert (settings.bucket_nbytes, settings.audit_every) == (2**30, 5)
    path.write_text("[publisher\n")
    with pytest.raises(deltarefit.RejectedError, match="expected a TOML file"):
        deltarefit.PublisherSettings.from_toml(path, "publisher")
