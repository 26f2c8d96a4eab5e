"""Receivers that come back over the retained chain of payloads, and what keeps that chain whole."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import torch

import deltarefit
from deltarefit.errors import CommitConflictError, DeadlineError
from deltarefit.plan import RefitPlan
from deltarefit.protocol import ControlState
from deltarefit.runtime.clock import RandomIds, SystemClock
from deltarefit.runtime.engine import LocalEngine
from deltarefit.runtime.gate import LocalGate
from deltarefit.runtime.retaining import read_digests
from deltarefit.runtime.session import control_plane
from deltarefit.runtime.sweeping import sweep
from deltarefit.testing.faults import CorruptingSender, FaultPlan
from deltarefit.transport import ObjectStoreSource, RunStore, keys, open_run, read_manifest
from deltarefit.transport import object_store as sweeping_room

from .pair import RECEIVER_SETTINGS, SETTINGS, Fused, Pair, Policy, dense_reload, perturb, raw, refit_on_ranks, wait_until

pytestmark = pytest.mark.torch

KEEPING = msgspec.structs.replace(SETTINGS, retained_versions=8, retained_nbytes=1 << 20, bucket_nbytes=256, chunk_nbytes=256)
LEASE_S = 2.0
KEEPING_QUICK = msgspec.structs.replace(KEEPING, lease_s=LEASE_S)
QUICK_RECEIVER = msgspec.structs.replace(RECEIVER_SETTINGS, lease_s=LEASE_S)


def policy_at(version: int) -> Policy:
    policy = Policy()
    for step in range(version):
        perturb(policy, step)
    return policy


def refits(pair, publisher, count):
    for _ in range(count):
        perturb(pair.policy, publisher.policy_version)
        report = publisher.refit()
    return report


def store_of(run) -> RunStore:
    return open_run(run, clock=SystemClock())


def record(run) -> ControlState:
    return control_plane(store_of(run), SystemClock(), RandomIds()).read()


def assert_chains_are_whole(run) -> int:
    """From every version that the record says to be a base, all payloads up to the committed one can be had."""
    store, state = store_of(run), record(run)
    for link in state.links:
        plan = RefitPlan.from_wire(store.get(keys.plan(link.plan_digest), max_nbytes=1 << 20))
        manifest = read_manifest(store, link.attempt)
        assert manifest.lacks(plan.num_owners) == ()
        for entry in manifest.entries:
            ObjectStoreSource(store).fetch(entry.payload_id(link.attempt), nbytes=entry.nbytes, digest=entry.digest)
        read_digests(store, link, plan.catalog)
    return len(state.links)


def assert_nothing_else_is_kept(run):
    """Of attempts, only what links need lies under the run."""
    linked = {link.attempt for link in record(run).links}
    left = [info.key for info in store_of(run).listing("attempts")]
    assert {keys.attempt_of(key) for key in left} == linked
    assert all(keys.is_link(key) for key in left)


class LoggedEngine(LocalEngine):
    """Counts what is written and by which attempts; ``strike`` may fail an application."""

    def __init__(self, model, **options):
        super().__init__(model, model.load_weights, **options)
        self.applied: list[str] = []
        self.strike = lambda number: None

    def apply(self, data):
        decoded = data if not isinstance(data, bytes) else self.decode(data)
        self.strike(len(self.applied))
        self.applied.append(decoded.payload.header.attempt)
        return super().apply(decoded)


def join(pair, model, name="back", *, key=None, settings=RECEIVER_SETTINGS, strike=None, clock=None):
    gate = LocalGate()
    engine = LoggedEngine(model, request_gate=gate, key=key)
    engine.strike = strike or engine.strike
    receiver = deltarefit.Receiver(engine, run=pair.run, name=name, request_gate=gate, settings=settings, clock=clock)
    receiver.engine = engine
    pair.stack.callback(receiver.close)
    receiver.start().wait_joined(10.0)
    return receiver


# --- coming back --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [0, 3])
def test_a_receiver_with_any_retained_version_serves_the_committed_one_without_a_refit(pair, base):
    publisher = pair.publisher(settings=KEEPING)
    refits(pair, publisher, 4)
    model = Fused(policy_at(base))
    back = join(pair, model)
    with back.serving(10.0):
        assert back.policy_version == 4
        assert raw(model) == dense_reload(pair.policy)
    assert set(back.engine.applied) == {f"chain-{base}-4"}, "expected one folded set of changes"
    pair.models.append(model)
    report = refits(pair, publisher, 1)
    assert (report.receivers, report.attempts) == (("back", "rollout-0"), 1)
    assert report.payload_nbytes < 4 * 256 + len(raw(model)["fused"]) // 2, "nothing had to be repaired"
    pair.assert_equal()
    assert_nothing_else_is_kept(pair.run)


def test_weights_of_no_retained_version_wait_for_the_next_refit(pair, caplog):
    publisher = pair.publisher(settings=msgspec.structs.replace(KEEPING, retained_versions=2))
    refits(pair, publisher, 4)
    assert [link.base_version for link in record(pair.run).links] == [2, 3]
    model = Fused(policy_at(1))
    before = raw(model)
    back = join(pair, model)
    with pytest.raises(DeadlineError):
        back.serving(0.3).__enter__()
    assert raw(model) == before
    assert "none of policy versions 2 to 4: payloads up to version 2 are not retained any more" in caplog.text
    pair.models.append(model)
    refits(pair, publisher, 1)
    pair.assert_equal()
    with back.serving(5.0):
        assert back.policy_version == 5


def test_the_chain_holds_payloads_of_committed_attempts_only(tmp_path):
    plan = FaultPlan(lambda name: name.attempt.startswith("v000002-a1"))
    with Pair(tmp_path) as pair:
        publisher = pair.publisher(settings=KEEPING, wrap_sender=lambda sender: CorruptingSender(sender, plan))
        refits(pair, publisher, 3)
        links = record(pair.run).links
        assert plan.fired == 1
        assert [link.attempt.split("-")[:2] for link in links] == [["v000001", "a1"], ["v000002", "a2"], ["v000003", "a1"]]
        assert_nothing_else_is_kept(pair.run)
        model = Fused(Policy())
        with join(pair, model).serving(10.0):
            assert raw(model) == dense_reload(pair.policy)


def test_several_owners_and_a_key(tmp_path):
    run = (tmp_path / "run").as_uri()
    key = b"k" * 32
    with Pair(tmp_path, num_receivers=0) as pair:
        pair.models = [Fused(pair.policy)]
        pair.attach(pair.models[0], "rollout-0", key=key)
        publisher = pair.publisher(settings=KEEPING, key=key)
        refits(pair, publisher, 3)
        model = Fused(policy_at(1))
        with join(pair, model, key=key).serving(10.0):
            assert raw(model) == dense_reload(pair.policy)

    run = (tmp_path / "ranks").as_uri()
    with Pair(tmp_path / "other", num_receivers=0) as pair:
        pair.run = run
        pair.models = [Fused(pair.policy)]
        pair.attach(pair.models[0], "rollout-0")
        policies = [Policy(), Policy()]
        reports = refit_on_ranks(2, run, policies, 3, settings=KEEPING)
        assert reports[0][-1].policy_version == 3
        assert assert_chains_are_whole(run) == 3


class Computed(torch.nn.Module):
    """Its loader computes one tensor, of which storage cannot prove the canonical bits, and skips another."""

    def __init__(self, weights) -> None:
        super().__init__()
        self.plain = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16), requires_grad=False)
        self.decay = torch.nn.Parameter(torch.zeros(12), requires_grad=False)
        self.load_weights(weights)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "plain":
                self.plain.data.copy_(tensor)
            elif name == "a_log":
                self.decay.data.copy_(-torch.exp(tensor.float()))


class Source(torch.nn.Module):
    def __init__(self, version: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, length in (("plain", 64), ("a_log", 12), ("skipped", 16)):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(length, generator=generator).bfloat16()))
        for _ in range(version):
            self.step()

    def step(self):
        with torch.no_grad():
            for tensor in self.parameters():
                tensor[::5] *= 1.5


def test_an_engine_that_computes_one_tensor_and_skips_another_comes_back(tmp_path, caplog):
    """What storage cannot prove is sent whole each time while payloads are retained."""
    run = (tmp_path / "run").as_uri()
    source = Source()

    def attach(model, name):
        return deltarefit.Receiver.attach(
            model, load_weights=model.load_weights, run=run, name=name, settings=RECEIVER_SETTINGS
        )

    first = Computed(source.state_dict().items())
    with attach(first, "first"), deltarefit.Publisher(source, run=run, settings=KEEPING) as publisher:
        for _ in range(3):
            source.step()
            publisher.refit()
        model = Computed(Source(1).state_dict().items())
        with attach(model, "back") as back, back.serving(10.0):
            assert back.policy_version == 3
            assert raw(model) == raw(first) == raw(Computed(source.state_dict().items()))
    assert "receiver first: its engine takes nothing of 1 of 3 tensors, nor would it in a full reload: skipped" in caplog.text


def test_a_receiver_that_slept_through_refits_catches_up_by_itself(tmp_path):
    class SleepyClock(SystemClock):
        slept_s = 0.0

        def monotonic_s(self):
            return super().monotonic_s() + self.slept_s

    clock = SleepyClock()
    with Pair(tmp_path, num_receivers=0) as pair:
        pair.models = [Fused(pair.policy), Fused(pair.policy)]
        receivers = []
        for model, name, own in ((pair.models[0], "sleeper", clock), (pair.models[1], "rollout", None)):
            gate = LocalGate()
            engine = LoggedEngine(model, request_gate=gate)
            receiver = deltarefit.Receiver(
                engine, run=pair.run, name=name, request_gate=gate, settings=QUICK_RECEIVER, clock=own
            )
            receiver.engine = engine
            pair.stack.callback(receiver.close)
            receivers.append(receiver.start())
        sleeper = receivers[0]
        publisher = pair.publisher(settings=KEEPING_QUICK)
        for receiver in receivers:
            receiver.wait_joined(10.0)
        refits(pair, publisher, 1)
        sleeper._stopping.set()
        sleeper._thread.join()
        sleeper._presence._heartbeat._stop.set()  # frozen: neither beats nor looks
        clock.slept_s += 10 * LEASE_S
        assert refits(pair, publisher, 2).receivers == ("rollout",)
        sleeper._stopping.clear()
        sleeper._thread = None
        sleeper._presence._heartbeat = type(sleeper._presence._heartbeat)(
            sleeper._presence._heartbeat._beacon, sleeper._presence.lease, clock, sleeper._presence._heartbeat._info
        )
        clock.slept_s += 10 * LEASE_S
        sleeper.start()
        wait_until(lambda: sleeper.policy_version == 3)
        assert sleeper.engine.applied[-1].startswith("chain-1-3")
        pair.assert_equal()
        sleeper.wait_joined(5.0)
        assert refits(pair, publisher, 1).receivers == ("rollout", "sleeper")
        pair.assert_equal()


# --- when it does not work ----------------------------------------------------------------------------------------------


def damage(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("what", ["payload damaged", "payload gone", "manifest gone", "digests damaged"])
def test_a_chain_that_is_not_whole_writes_nothing(pair, what):
    publisher = pair.publisher(settings=KEEPING)
    refits(pair, publisher, 3)
    store = store_of(pair.run)
    link = record(pair.run).links[1]
    payloads = store.directory / keys.payload_prefix(link.attempt)
    match what:
        case "payload damaged":
            damage(max(payloads.iterdir()))
        case "payload gone":
            max(payloads.iterdir()).unlink()
        case "manifest gone":
            store.delete_prefix(keys.manifest_prefix(link.attempt))
        case "digests damaged":
            damage(store.directory / keys.digests(link.attempt))
    model = Fused(Policy())
    before = raw(model)
    back = join(pair, model)
    with pytest.raises(DeadlineError):
        back.serving(0.3).__enter__()
    assert (raw(model), back.engine.applied) == (before, [])
    pair.models.append(model)
    assert refits(pair, publisher, 1).receivers == ("back", "rollout-0")
    pair.assert_equal()


def test_what_dies_half_way_serves_nothing_until_the_next_refit(pair):
    publisher = pair.publisher(settings=KEEPING)
    refits(pair, publisher, 3)

    def strike(number):
        raise OSError("the device is gone")

    model = Fused(Policy())
    back = join(pair, model, strike=strike)
    with pytest.raises(DeadlineError):
        back.serving(0.3).__enter__()
    assert back.policy_version == 0
    back.engine.strike = lambda number: None
    pair.models.append(model)
    assert refits(pair, publisher, 1).receivers == ("back", "rollout-0")
    pair.assert_equal()
    with back.serving(5.0):
        assert back.policy_version == 4


def test_bits_that_the_digests_do_not_prove_are_not_served(pair):
    publisher = pair.publisher(settings=KEEPING)
    refits(pair, publisher, 3)
    model = Fused(Policy())
    back = join(pair, model, strike=lambda number: model.fused.data.view(torch.uint8)[7].bitwise_xor_(1))
    with pytest.raises(DeadlineError):
        back.serving(0.3).__enter__()
    back.engine.strike = lambda number: None
    assert back.engine.applied, "expected the chain to be applied"
    pair.models.append(model)
    refits(pair, publisher, 1)
    pair.assert_equal()


def test_differences_and_masks_of_one_element_are_not_merged(pair):
    publisher = pair.publisher(settings=KEEPING)
    refits(pair, publisher, 1)
    publisher.close()
    publisher = pair.publisher(settings=msgspec.structs.replace(KEEPING, difference="xor"))
    with torch.no_grad():
        pair.policy.first.mul_(1.5)
    publisher.refit()
    back = join(pair, Fused(Policy()))
    with pytest.raises(DeadlineError):
        back.serving(0.3).__enter__()
    assert back.engine.applied == []
    one = join(pair, Fused(policy_at(1)), "one")
    with one.serving(10.0):
        assert one.policy_version == 2


# --- retention ----------------------------------------------------------------------------------------------------------


def test_a_dense_attempt_and_a_trainer_that_retains_nothing_end_the_chain(pair):
    publisher = pair.publisher(settings=KEEPING)
    refits(pair, publisher, 2)
    publisher.close()
    perturb(pair.policy, 77)
    publisher = pair.publisher(settings=KEEPING)  # with other weights than the committed ones: it sends every element
    publisher.refit()
    assert record(pair.run).links == ()
    assert_nothing_else_is_kept(pair.run)
    refits(pair, publisher, 1)
    assert [link.base_version for link in record(pair.run).links] == [3]
    publisher.close()
    publisher = pair.publisher()
    assert assert_chains_are_whole(pair.run) == 1, "taking the run over removes nothing that is retained"
    refits(pair, publisher, 1)
    assert record(pair.run).links == ()
    assert store_of(pair.run).listing("attempts") == []


def test_the_chain_costs_no_more_than_it_may(pair):
    publisher = pair.publisher(settings=msgspec.structs.replace(KEEPING, retained_nbytes=1 << 20))
    refits(pair, publisher, 3)
    links = record(pair.run).links
    assert all(link.nbytes > 0 for link in links)
    stored = sum(info.nbytes for info in store_of(pair.run).listing("attempts") if "/payloads/" in info.key)
    assert stored == sum(link.nbytes for link in links)
    publisher.close()
    few = links[1].nbytes + links[2].nbytes + links[2].nbytes // 2
    publisher = pair.publisher(settings=msgspec.structs.replace(KEEPING, retained_nbytes=few))
    refits(pair, publisher, 1)
    links = record(pair.run).links
    assert 1 <= len(links) < 4
    assert sum(link.nbytes for link in links) <= few
    assert_nothing_else_is_kept(pair.run)


class Died(BaseException):
    """What no code that is to survive a crash may catch."""


def test_a_death_between_any_two_deletions_leaves_no_chain_with_a_gap(tmp_path, monkeypatch):
    """Links go from the record first, by the commit itself; then their objects, in any order and number."""
    with Pair(tmp_path) as pair:
        shorter = msgspec.structs.replace(KEEPING, retained_versions=2)
        publisher = pair.publisher(settings=shorter)
        refits(pair, publisher, 2)
        delete = sweeping_room.RunStore._delete_once
        deaths = 0
        for step in range(8):
            left = step

            def dying(store, batch):
                nonlocal left
                for key in batch:
                    if key.startswith("attempts/"):
                        if left == 0:
                            raise Died
                        left -= 1
                    delete(store, [key])

            monkeypatch.setattr(RunStore, "_delete_once", dying)
            perturb(pair.policy, publisher.policy_version)
            try:
                publisher.refit()
            except Died:
                deaths += 1
            monkeypatch.setattr(RunStore, "_delete_once", delete)
            assert assert_chains_are_whole(pair.run) == 2
            if left == 0:
                publisher._hold._heartbeat.close(say_goodbye=True)
                publisher._hold = None
                publisher = reopened(pair, shorter)
        assert deaths >= 4
        assert_nothing_else_is_kept(pair.run)
        model = Fused(policy_at(publisher.policy_version - 1))
        with join(pair, model).serving(10.0):
            assert raw(model) == dense_reload(pair.policy)


def reopened(pair, settings):
    """Another trainer on the same run, after the first one's lease."""
    state = record(pair.run)
    control_plane(store_of(pair.run), SystemClock(), RandomIds()).release(state.epoch, state.coordinator)
    return pair.publisher(settings=settings)


def test_a_coordinator_that_dies_after_its_commit_leaves_the_link_to_its_successor(tmp_path, monkeypatch):
    pair = Pair(tmp_path, num_receivers=0)
    with pair:
        pair.models = [Fused(pair.policy)]
        pair.receivers = [pair.attach(pair.models[0], "rollout-0", settings=QUICK_RECEIVER)]
        succeed(pair, monkeypatch)


def succeed(pair, monkeypatch):
    publisher = pair.publisher(settings=KEEPING_QUICK)
    refits(pair, publisher, 1)

    def dying():
        raise Died

    monkeypatch.setattr(publisher._source.owner, "commit", dying)
    perturb(pair.policy, 1)
    with pytest.raises(Died):
        publisher.refit()
    publisher._hold._heartbeat.close(say_goodbye=False)
    publisher._hold = None
    assert record(pair.run).record.policy_version == 2
    second = pair.publisher(settings=KEEPING_QUICK)
    assert second.policy_version == 2
    assert assert_chains_are_whole(pair.run) == 2
    model = Fused(Policy())
    with join(pair, model, settings=QUICK_RECEIVER).serving(10.0):
        assert raw(model) == dense_reload(pair.policy)
    assert_nothing_else_is_kept(pair.run)


def test_what_only_mattered_during_an_attempt_is_not_retained(pair):
    publisher = pair.publisher(settings=KEEPING)
    refits(pair, publisher, 1)
    store, link = store_of(pair.run), record(pair.run).links[0]
    store.put(keys.halt(link.attempt), b"")
    store.put(keys.progress(link.attempt, "owner-0"), b"far")
    control = control_plane(store, SystemClock(), RandomIds())
    sweep(store, control, epoch=record(pair.run).epoch, gone=())
    assert_nothing_else_is_kept(pair.run)
    assert assert_chains_are_whole(pair.run) == 1


def test_parts_of_objects_whose_writer_was_killed_go_once_they_are_old(pair):
    publisher = pair.publisher(settings=KEEPING)
    refits(pair, publisher, 1)
    mail = store_of(pair.run).directory / "mail" / "coordinator-1"
    mail.mkdir(parents=True, exist_ok=True)
    old, new = mail / "00000000-000000000009-a4cd09a8-rollout-0#1", mail / "00000000-000000000009-a4cd09a8-rollout-1#2"
    for path in (old, new):
        path.write_bytes(b"")
    os.utime(old, (SystemClock().wall_s() - 100,) * 2)
    refits(pair, publisher, 1)
    assert (old.exists(), new.exists()) == (False, True)
    new.unlink()
    assert_nothing_else_is_kept(pair.run)


class HoursAhead(SystemClock):
    def wall_s(self):
        return super().wall_s() + 7200.0


def test_a_trainer_whose_clock_is_ahead_leaves_alone_what_others_are_writing(pair):
    publisher = pair.publisher(settings=KEEPING, clock=HoursAhead())
    refits(pair, publisher, 1)
    under_way = store_of(pair.run).directory / "members" / "rollout-9#1"
    under_way.write_bytes(b"half")
    refits(pair, publisher, 1)
    assert under_way.exists()


def test_a_holder_that_was_replaced_while_it_swept_removes_nothing(pair):
    publisher = pair.publisher(settings=KEEPING)
    refits(pair, publisher, 2)
    epoch = record(pair.run).epoch
    publisher.close()
    second = pair.publisher(settings=KEEPING)
    store, control = store_of(pair.run), control_plane(store_of(pair.run), SystemClock(), RandomIds())
    assert sweep(store, control, epoch=epoch, gone=()) == 0
    assert assert_chains_are_whole(pair.run) == 2

    def keeps_what_it_lists():
        refits(pair, second, 1)  # commits while the sweep stands between its listing and its deletions
        return []

    with pytest.raises(CommitConflictError):
        sweeping_room.sweep_attempts(store, keep=lambda: (_ for _ in ()).throw(CommitConflictError("replaced")))
    newest = record(pair.run).links[-1].attempt
    sweeping_room.sweep_attempts(store, keep=keeps_what_it_lists)
    assert record(pair.run).links[-1].attempt != newest
    assert store.listing(keys.payload_prefix(record(pair.run).links[-1].attempt)), "what came after the listing stays"
