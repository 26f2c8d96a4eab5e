"""What could not start, or could not say goodbye, leaves nothing running in its process."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest

import deltarefit
from deltarefit.errors import RefitError, TransportError
from deltarefit.runtime import relay_service
from deltarefit.runtime.clock import SystemClock
from deltarefit.runtime.standing import Standing
from deltarefit.testing.collective import run_ranks
from deltarefit.transport import RunStore, keys, open_run, read_beacons

from .pair import RECEIVER_SETTINGS, SETTINGS, Fused, Pair, Policy

pytestmark = pytest.mark.torch

CLOCK = SystemClock()


@pytest.fixture
def address():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    return f"127.0.0.1:{port}"


def started_since(before):
    """What would go on by itself. Receivers that other tests let die may still start threads for a single task."""
    lasting = {"deltarefit-heartbeat", "deltarefit-metrics", "deltarefit-relay-beacon"}
    return [thread.name for thread in threading.enumerate() if thread not in before and thread.name in lasting]


def unreachable(store, key="control", *args, **options):
    raise TransportError(f"{key}: no route to the store")


def test_a_publisher_that_is_refused_can_be_made_again_in_the_same_process(tmp_path, address):
    """Until the lease of the trainer before it ran out, say: what it serves must be free for the next try."""
    with Pair(tmp_path) as pair:
        first = pair.publisher()
        before = threading.enumerate()
        settings = msgspec.structs.replace(SETTINGS, metrics_address=address)
        for _ in range(2):
            with pytest.raises(deltarefit.RejectedError, match="in use by live coordinator"):
                deltarefit.Publisher(Policy(), run=pair.run, settings=settings)
        assert started_since(before) == []
        first.close()
        pair.refit_at_once(pair.publisher(settings=settings), 1)


def test_an_address_that_one_rank_cannot_serve_is_refused_on_all_at_once(tmp_path, address):
    with socket.socket() as taken:
        host, _, port = address.partition(":")
        taken.bind((host, int(port)))
        taken.listen()

        def rank_main(collective):
            settings = msgspec.structs.replace(SETTINGS, metrics_address=address)
            with pytest.raises(deltarefit.RejectedError, match=f"metrics address {address}"):
                deltarefit.Publisher(Policy(), run=(tmp_path / "run").as_uri(), settings=settings, collective=collective)

        assert run_ranks(2, rank_main) == [None, None]


def test_a_receiver_that_cannot_start_shows_no_sign_of_life_any_more(tmp_path, address, monkeypatch):
    with Pair(tmp_path, num_receivers=0) as pair:
        before = threading.enumerate()
        settings = msgspec.structs.replace(RECEIVER_SETTINGS, metrics_address=address)
        model, store = Fused(pair.policy), open_run(pair.run, clock=CLOCK)

        def fail(standing):
            assert [one.name for one in read_beacons(store)] == ["rollout"]
            raise TransportError("control/record: no route to the store")

        with monkeypatch.context() as patch:
            patch.setattr(Standing, "shut_if_left_behind", fail)
            with pytest.raises(TransportError, match="no route"):
                pair.attach(model, "rollout", settings=settings)
        assert started_since(before) == []
        assert read_beacons(store) == []
        pair.models = [model]
        pair.attach(model, "rollout", settings=settings)
        pair.refit_at_once(pair.publisher(), 1)


@pytest.mark.parametrize("side", ["receiver", "publisher"])
def test_closing_while_the_store_is_out_of_reach_ends_all_the_same(tmp_path, monkeypatch, side):
    """A heartbeat that goes on would hold the run, or the name, for nobody."""
    with Pair(tmp_path, num_receivers=0) as pair:
        before = threading.enumerate()
        open_one = pair.publisher if side == "publisher" else lambda: pair.attach(Fused(pair.policy), "rollout")
        one = open_one()
        assert "deltarefit-heartbeat" in started_since(before)
        with monkeypatch.context() as patch:
            for call in ("put", "find", "get", "delete", "head"):
                patch.setattr(RunStore, call, unreachable)
            if side == "publisher":
                patch.setattr(type(one._hold.control), "read", unreachable)
                with pytest.raises(RefitError, match="no route"):
                    one.close()
            else:
                one.close()
        assert started_since(before) == []


def test_a_relay_that_cannot_start_leaves_its_port(tmp_path, address, monkeypatch):
    run = (tmp_path / "run").as_uri()
    settings = deltarefit.RelayServiceSettings(shared_directory=str(tmp_path))

    def fail(*args, **options):
        raise deltarefit.RejectedError("etcd://nowhere: cannot be used")

    before = threading.enumerate()
    with monkeypatch.context() as patch:
        patch.setattr(relay_service, "control_plane", fail)
        with pytest.raises(deltarefit.RejectedError, match="nowhere"):
            deltarefit.RelayService(run, listen=address, settings=settings)
    assert started_since(before) == []
    with deltarefit.RelayService(run, listen=address, settings=settings) as relay:
        assert open_run(run, clock=CLOCK).head(keys.relay(relay.name)) is not None
