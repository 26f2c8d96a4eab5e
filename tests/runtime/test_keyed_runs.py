"""Runs with a key: messages of whoever lacks it have no effect, and whoever has another one is told so at once."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from click.testing import CliRunner

import deltarefit
from deltarefit.cli.program import program
from deltarefit.run_key import key_print
from deltarefit.runtime.clock import RandomIds, SystemClock
from deltarefit.runtime.messages import Call, Restore, encode_message
from deltarefit.runtime.restoring import restore_receiver
from deltarefit.transport import Mailbox, mailbox, open_run

from .pair import RECEIVER_SETTINGS, SETTINGS, Fused, Pair, perturb, raw, wait_until

pytestmark = pytest.mark.torch

CLOCK = SystemClock()
KEY, OTHER = b"k" * 32, b"the text of another key"
PATIENT = msgspec.structs.replace(SETTINGS, join_timeout_s=600.0)
"""A test that has to wait for any of these times does not end."""


@pytest.fixture
def keyed(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        model = Fused(pair.policy)
        pair.models.append(model)
        pair.receivers.append(pair.attach(model, "rollout-0", key=KEY))
        yield pair


def test_an_order_of_somebody_without_the_key_is_not_obeyed(keyed, caplog):
    publisher = keyed.publisher(key=KEY)
    perturb(keyed.policy, 0)
    publisher.refit()
    receiver = keyed.receivers[0]
    before = receiver._presence.shown.incarnation
    store = open_run(keyed.run, clock=CLOCK)
    order = encode_message(Call("restore-00000000", 1, before, Restore()))
    for nonce, key in (("00000001", None), ("00000002", OTHER)):
        Mailbox(store, f"operator-{nonce}", clock=CLOCK, nonce=nonce, key=key).post("rollout-0", order)
    wait_until(lambda: caplog.text.count("sealed with another key") >= 2)
    perturb(keyed.policy, 1)
    publisher.refit()
    assert receiver._presence.shown.incarnation == before
    keyed.assert_equal()
    Mailbox(store, "operator-00000003", clock=CLOCK, nonce="00000003", key=KEY).post("rollout-0", order)
    wait_until(lambda: receiver._presence.shown.incarnation != before)


def test_everybody_seals_with_the_runs_key(keyed, monkeypatch):
    sealed = []
    seal = mailbox._seal
    monkeypatch.setattr(mailbox, "_seal", lambda to, parts, data, key: sealed.append((to, key)) or seal(to, parts, data, key))
    publisher = keyed.publisher(key=KEY)
    perturb(keyed.policy, 0)
    publisher.refit()
    restore_receiver(keyed.run, "rollout-0", clock=CLOCK, ids=RandomIds(), wait_s=20.0, key=KEY)
    assert {to.partition("-")[0] for to, _ in sealed} == {"coordinator", "rollout"}
    assert {key for _, key in sealed} == {KEY}


@pytest.mark.parametrize(("trainers", "receivers"), [(KEY, None), (None, KEY), (KEY, OTHER)])
def test_receivers_with_another_key_refuse_to_join_and_both_sides_say_why(tmp_path, trainers, receivers):
    with Pair(tmp_path, num_receivers=0) as pair:
        model = Fused(pair.policy)
        before = raw(model)
        receiver = pair.attach(model, "rollout-0", key=receivers)
        publisher = pair.publisher(key=trainers, settings=PATIENT)
        with pytest.raises(deltarefit.RejectedError, match=r"has another run key than this side: .* or --key-file") as caught:
            receiver.wait_joined(20.0)
        for key in (trainers, receivers):
            assert (key_print(key) or "none") in str(caught.value)
        perturb(pair.policy, 0)
        with pytest.raises(deltarefit.RejectedError, match=r"rollout-0.* has another run key"):
            publisher.refit()
        assert raw(model) == before


def test_a_trainer_that_comes_back_with_another_key_is_refused_and_receivers_go_on(keyed, caplog):
    publisher = keyed.publisher(key=KEY)
    perturb(keyed.policy, 0)
    publisher.refit()
    held = raw(keyed.models[0])
    publisher.close()
    with caplog.at_level(logging.ERROR):
        wrong = keyed.publisher(key=OTHER, settings=PATIENT)
        perturb(keyed.policy, 1)
        with pytest.raises(deltarefit.RejectedError, match="receiver rollout-0 has another run key"):
            wrong.refit()
        wait_until(lambda: "takes no part in what it asks for: the trainer that took the run over" in caplog.text)
    wrong.close()
    assert raw(keyed.models[0]) == held
    with keyed.receivers[0].serving(1.0):
        assert keyed.receivers[0].policy_version == 1
    right = keyed.publisher(key=KEY)
    right.refit()
    keyed.assert_equal()


def test_restore_needs_the_key_and_says_so(keyed, tmp_path):
    publisher = keyed.publisher(key=KEY)
    perturb(keyed.policy, 0)
    publisher.refit()
    order = ["receiver", "restore", "--run", keyed.run, "--name", "rollout-0", "--wait", "20"]
    wrong, right = tmp_path / "wrong", tmp_path / "right"
    wrong.write_bytes(OTHER)
    right.write_bytes(KEY + b"\n")
    for more in ([], ["--key-file", str(wrong)]):
        result = CliRunner().invoke(program, [*order, *more])
        assert (result.exit_code, "receiver rollout-0 has another run key" in result.stderr) == (1, True)
    result = CliRunner().invoke(program, [*order, "--key-file", str(right)])
    assert (result.exit_code, "serves" in result.stdout) == (0, True), result.output


def test_a_relay_with_another_key_takes_no_part_and_is_named(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        shared = tmp_path / "node"
        shared.mkdir()
        settings = deltarefit.RelayServiceSettings(shared_directory=str(shared), lease_s=5.0)
        relay = pair.stack.enter_context(deltarefit.RelayService(pair.run, key=OTHER, settings=settings))
        model = Fused(pair.policy)
        pair.models.append(model)
        on_node = msgspec.structs.replace(RECEIVER_SETTINGS, shared_directory=str(shared))
        pair.attach(model, "rollout-0", key=KEY, settings=on_node)
        insisting = msgspec.structs.replace(SETTINGS, transport="relay")
        with pair.publisher(key=KEY, settings=insisting) as publisher:
            perturb(pair.policy, 0)
            with pytest.raises(deltarefit.RejectedError, match=rf"relay {relay.name} has another run key"):
                publisher.refit()
        report = pair.publisher(key=KEY).refit()
        assert (report.transport, report.attempts) == ("object_store", 1)
        pair.assert_equal()


def test_nobody_is_refused_for_what_a_dead_trainer_left(tmp_path):
    """The key is changed after a crash: receivers that start first wait for the next trainer."""
    with Pair(tmp_path, num_receivers=0) as pair:
        quick = msgspec.structs.replace(SETTINGS, lease_s=1.0)
        dead = pair.publisher(key=OTHER, settings=quick)
        dead._hold._heartbeat.close(say_goodbye=False)
        model = Fused(pair.policy)
        pair.models.append(model)
        receiver = pair.attach(model, "rollout-0", key=KEY, settings=msgspec.structs.replace(RECEIVER_SETTINGS, lease_s=1.0))
        CLOCK.sleep(0.5)
        assert receiver.failure is None
        publisher = pair.publisher(key=KEY, settings=quick)
        perturb(pair.policy, 0)
        assert publisher.refit().receivers == ("rollout-0",)
        pair.assert_equal()


def test_a_lease_that_is_longer_than_the_trainers_is_refused(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        model = Fused(pair.policy)
        receiver = pair.attach(model, "rollout-0", settings=msgspec.structs.replace(RECEIVER_SETTINGS, lease_s=6.0))
        pair.publisher()
        with pytest.raises(deltarefit.RejectedError, match=r"receiver rollout-0: lease_s 6, the trainer's is 5; .*set lease_s"):
            receiver.wait_joined(20.0)


def test_no_trainer_is_refused_for_what_a_dead_receiver_left(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        quick = msgspec.structs.replace(SETTINGS, lease_s=1.0)
        briefly = msgspec.structs.replace(RECEIVER_SETTINGS, lease_s=1.0)
        dead = pair.attach(Fused(pair.policy), "dead", key=OTHER, settings=briefly)
        dead._presence._heartbeat.close(say_goodbye=False)
        dead._stopping.set()
        model = Fused(pair.policy)
        pair.models.append(model)
        publisher = pair.publisher(key=KEY, settings=quick)
        perturb(pair.policy, 0)
        with ThreadPoolExecutor(1) as pool:
            refitted = pool.submit(publisher.refit)
            CLOCK.sleep(0.5)
            pair.attach(model, "rollout-0", key=KEY, settings=briefly)
            assert refitted.result(30.0).receivers == ("rollout-0",)
        pair.assert_equal()
