"""Refits over relays that stand by themselves: one crossing per payload, and the store when the tree cannot serve everyone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from tests.runtime.pair import RECEIVER_SETTINGS, SETTINGS, Fused, Pair, perturb, raw

import deltarefit
from deltarefit.ids import AttemptId, BaselineId, EncodingMode
from deltarefit.protocol import PrepareRequest
from deltarefit.runtime.clock import ManualClock, RandomIds, SystemClock
from deltarefit.runtime.node_share import open_node_share
from deltarefit.runtime.relay_service import RelayService
from deltarefit.runtime.session import control_plane
from deltarefit.runtime.settings import RelayServiceSettings
from deltarefit.testing.faults import CorruptingSender, FaultPlan
from deltarefit.transport import keys, open_run

pytestmark = pytest.mark.torch


class Nodes:
    """Rollout nodes on this machine: each has a shared directory, perhaps a relay, and engines."""

    def __init__(self, pair, tmp_path):
        self.pair = pair
        self.tmp_path = tmp_path

    def root(self, number):
        path = self.tmp_path / f"node-{number}"
        path.mkdir(exist_ok=True)
        return str(path)

    def relay(self, number, **options):
        service = RelayService(
            self.pair.run, settings=RelayServiceSettings(shared_directory=self.root(number), lease_s=5.0), **options
        )
        return self.pair.stack.enter_context(service)

    def engine(self, number, name, **options):
        model = Fused(self.pair.policy)
        settings = msgspec.structs.replace(RECEIVER_SETTINGS, shared_directory=self.root(number))
        self.pair.models.append(model)
        return self.pair.stack.enter_context(
            deltarefit.Receiver.attach(
                model, load_weights=model.load_weights, run=self.pair.run, name=name, settings=settings, **options
            )
        )


@pytest.fixture
def nodes(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        yield Nodes(pair, tmp_path)


def test_each_payload_crosses_once_however_many_nodes(nodes):
    relays = [nodes.relay(number) for number in range(3)]
    for number in range(3):
        nodes.engine(number, f"r{number}")
    publisher = nodes.pair.publisher(settings=msgspec.structs.replace(SETTINGS, min_receivers=3))
    for step in range(3):
        perturb(nodes.pair.policy, step)
        before = sum(relay.received_nbytes - relay.forwarded_nbytes for relay in relays)
        report = publisher.refit()
        nodes.pair.assert_equal()
        assert (report.transport, report.attempts, report.payloads) == ("relay", 1, 1)
        assert report.cross_nbytes == report.payload_nbytes
        crossed = sum(relay.received_nbytes - relay.forwarded_nbytes for relay in relays) - before
        assert crossed == report.payload_nbytes  # what relays got beyond what relays passed on came from the owner
        assert report.bounds.transport.where == "owner 0"
    assert sum(relay.received_nbytes for relay in relays) > 0
    store = open_run(nodes.pair.run, clock=SystemClock())
    assert store.listing(keys.ATTEMPTS) == []


def test_nothing_of_an_attempt_stays_on_the_shelves(nodes, tmp_path):
    nodes.relay(0)
    nodes.engine(0, "r0")
    publisher = nodes.pair.publisher()
    perturb(nodes.pair.policy, 1)
    publisher.refit()
    share = open_node_share(nodes.root(0), nodes.pair.run, RandomIds())
    assert [path.name for path in share.relay.iterdir()] == ["readers"]


def test_several_engines_of_a_node_read_one_relay(nodes):
    relay = nodes.relay(0)
    for number in range(3):
        nodes.engine(0, f"r{number}")
    publisher = nodes.pair.publisher(settings=msgspec.structs.replace(SETTINGS, min_receivers=3))
    perturb(nodes.pair.policy, 1)
    report = publisher.refit()
    nodes.pair.assert_equal()
    assert report.transport == "relay"
    assert relay.received_nbytes == report.payload_nbytes


def test_auto_takes_the_store_where_a_node_has_no_relay(nodes, caplog):
    nodes.relay(0)
    nodes.engine(0, "r0")
    nodes.engine(1, "r1")
    publisher = nodes.pair.publisher(settings=msgspec.structs.replace(SETTINGS, min_receivers=2))
    perturb(nodes.pair.policy, 1)
    report = publisher.refit()
    nodes.pair.assert_equal()
    assert report.transport == "object_store"
    assert "no relay on the nodes of r1" in caplog.text
    nodes.relay(1)
    perturb(nodes.pair.policy, 2)
    assert publisher.refit().transport == "object_store"  # the engine came before its node had a share to name
    nodes.pair.assert_equal()


def test_a_wish_for_relays_that_cannot_be_had_is_refused_before_anything_is_sent(nodes):
    nodes.engine(0, "r0")
    publisher = nodes.pair.publisher(settings=msgspec.structs.replace(SETTINGS, transport="relay"))
    before = raw(nodes.pair.models[0])
    perturb(nodes.pair.policy, 1)
    with pytest.raises(deltarefit.RejectedError, match=r"nodes of r0; start one .*deltarefit relay --run"):
        publisher.refit()
    assert raw(nodes.pair.models[0]) == before


def test_a_payload_damaged_on_its_way_to_the_relay_is_repaired_over_the_store(nodes):
    nodes.relay(0)
    nodes.engine(0, "r0")
    plan = FaultPlan()
    publisher = nodes.pair.publisher(wrap_sender=lambda sender: CorruptingSender(sender, plan))
    perturb(nodes.pair.policy, 1)
    report = publisher.refit()
    assert plan.fired == 1
    assert (report.attempts, report.transport) == (2, "object_store")
    nodes.pair.assert_equal()
    perturb(nodes.pair.policy, 2)
    assert publisher.refit().transport == "relay"
    nodes.pair.assert_equal()


def test_a_relay_that_left_is_not_chosen(nodes):
    relay = nodes.relay(0)
    nodes.engine(0, "r0")
    publisher = nodes.pair.publisher()
    relay.close()
    perturb(nodes.pair.policy, 1)
    assert publisher.refit().transport == "object_store"
    nodes.pair.assert_equal()


def test_a_key_is_needed_on_both_sides(nodes):
    nodes.relay(0, key=b"k" * 32)
    nodes.engine(0, "r0", key=b"k" * 32)
    publisher = nodes.pair.publisher(key=b"k" * 32)
    perturb(nodes.pair.policy, 1)
    assert publisher.refit().transport == "relay"
    nodes.pair.assert_equal()


def test_a_second_relay_on_a_node_is_refused(nodes):
    nodes.relay(0)
    with pytest.raises(deltarefit.RejectedError, match="another relay serves this node"):
        nodes.relay(0)


@pytest.mark.parametrize("address", ["here", ":1", "h:x", "h:70000"])
def test_addresses_that_are_none_are_refused(nodes, address):
    with pytest.raises(deltarefit.RejectedError, match="expected HOST:PORT"):
        nodes.relay(0, listen=address)


def test_processes_of_a_node_agree_on_its_name(tmp_path):
    shares = [open_node_share(str(tmp_path), "s3://bucket/run", RandomIds()) for _ in range(3)]
    other = open_node_share(str(tmp_path), "s3://bucket/other", RandomIds())
    assert len({share.node for share in shares}) == 1
    assert other.node != shares[0].node


def test_the_last_process_of_a_node_removes_what_it_shared(tmp_path):
    first, second = (open_node_share(str(tmp_path), "s3://bucket/run", RandomIds()) for _ in range(2))
    first.close()
    first.close()
    assert open_node_share(str(tmp_path), "s3://bucket/run", RandomIds()).node == second.node
    second.close()
    assert list(tmp_path.iterdir()) == [], "the third one was forgotten, and so left, too"


def test_payloads_of_a_relay_that_may_come_back_are_not_removed(tmp_path):
    share = open_node_share(str(tmp_path), "s3://bucket/run", RandomIds())
    kept = share.relay / "attempt" / "0-0"
    kept.parent.mkdir()
    kept.write_bytes(b"payload")
    share.close()
    again = open_node_share(str(tmp_path), "s3://bucket/run", RandomIds())
    assert (again.node, kept.read_bytes()) == (share.node, b"payload")


def test_whoever_comes_while_the_last_one_leaves_finds_a_directory(tmp_path):
    """Many processes come and go at once: each has a name for the node, and nothing is left in the end."""

    def come_and_go(_):
        share = open_node_share(str(tmp_path), "s3://bucket/run", RandomIds())
        assert share is not None
        assert (share.directory / "node").read_text() == share.node
        share.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(come_and_go, range(200)))
    assert list(tmp_path.iterdir()) == []


def test_a_shared_directory_that_cannot_be_used_shares_nothing(tmp_path, caplog):
    assert open_node_share(str(tmp_path / "absent"), "s3://bucket/run", RandomIds()) is None
    assert "nothing is shared" in caplog.text
    assert ManualClock().monotonic_s() == 0


def test_a_relay_forgets_what_ended_while_it_was_away_and_nothing_else(nodes, tmp_path):
    """It was dead or frozen when the others cleaned up; what is bound to the record stays."""
    publisher = nodes.pair.publisher(settings=msgspec.structs.replace(SETTINGS, min_receivers=0))
    service = nodes.relay(0)
    clock = SystemClock()
    store = open_run(nodes.pair.run, clock=clock)
    control = control_plane(store, clock, RandomIds())
    state = control.read()
    bound = AttemptId("v000001-a2-bound")
    control.prepare(
        PrepareRequest(
            epoch=state.epoch,
            attempt=bound,
            baseline=BaselineId("b1"),
            base=state.record,
            mode=EncodingMode.MIXED,
            is_dense=False,
            candidate="w",
            plan_digest="p",
            required=frozenset(),
            min_receivers=0,
        )
    )
    share = open_node_share(nodes.root(0), nodes.pair.run, RandomIds())
    for attempt in ("v000001-a1-ended", bound):
        folder = share.relay / attempt / "payloads"
        folder.mkdir(parents=True)
        (folder / "0000000000-000000.part").write_bytes(b"half a payload")
    service._tidy()
    assert {path.name for path in share.relay.iterdir()} >= {"v000001-a1-ended", bound}, "too young to judge"
    service._tidy()
    left = {path.name for path in share.relay.iterdir()}
    assert bound in left
    assert "v000001-a1-ended" not in left
    publisher.close()
