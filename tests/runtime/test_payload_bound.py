"""``max_payload_nbytes``: what is announced larger is refused before anything of it is read, whichever way it comes."""

from __future__ import annotations

import os

import msgspec
import pytest

import deltarefit
from deltarefit.errors import DeadlineError, RejectedError
from deltarefit.ids import OwnerId, PayloadId, attempt_id
from deltarefit.runtime.clock import SystemClock
from deltarefit.transport import BoundedSource, NodeCache, ObjectStoreSource, keys, open_run, payload_digest
from deltarefit.transport.relay import RelaySource
from deltarefit.transport.relay.shelf import payload_path

from .pair import RECEIVER_SETTINGS, SETTINGS, Fused, Pair, perturb, raw

CLOCK = SystemClock()
NAME = PayloadId(attempt_id(1, 1, "00000000"), 0, OwnerId(0))
HUGE = 15 << 30
TEXT = r"expected at most 1000 bytes \(max_payload_nbytes\), {} are announced; .* Raise max_payload_nbytes"


def test_a_store_is_not_even_asked_for_what_is_too_large(tmp_path):
    class Untouched:
        def fetch(self, payload_id, *, nbytes, digest):
            raise AssertionError("it was fetched")

    with pytest.raises(RejectedError, match=TEXT.format(HUGE)):
        BoundedSource(Untouched(), 1000).fetch(NAME, nbytes=HUGE, digest="")


def test_what_fits_comes_through(tmp_path):
    store = open_run((tmp_path / "run").as_uri(), clock=CLOCK)
    data = bytes(1000)
    store.put(keys.payload(NAME), data)
    source = BoundedSource(NodeCache(ObjectStoreSource(store), tmp_path / "cache", clock=CLOCK), 1000)
    (tmp_path / "cache").mkdir()
    assert source.fetch(NAME, nbytes=1000, digest=payload_digest(data)) == data


def test_what_a_relay_brought_is_not_read_if_it_is_too_large(tmp_path):
    """A file of that length is there, so reading it would end in no other error."""
    path = payload_path(tmp_path, NAME)
    path.parent.mkdir(parents=True)
    path.touch()
    os.truncate(path, HUGE)
    with RelaySource(tmp_path, "r", clock=CLOCK, max_nbytes=1000) as source:
        nbytes = source.arrived(NAME)
        with pytest.raises(RejectedError, match=TEXT.format(HUGE)):
            source.take(NAME, nbytes=nbytes)
        with pytest.raises(RejectedError, match=TEXT.format(HUGE)):
            source.fetch(NAME, nbytes=HUGE, digest="")


@pytest.mark.torch
@pytest.mark.parametrize("way", ["object_store", "relay"])
def test_a_refit_whose_payloads_are_too_large_for_a_receiver_writes_nothing_and_names_the_setting(tmp_path, way):
    shared = tmp_path / "node"
    shared.mkdir()
    with Pair(tmp_path, num_receivers=0) as pair:
        if way == "relay":
            relay = deltarefit.RelayServiceSettings(shared_directory=str(shared), lease_s=5.0)
            pair.stack.enter_context(deltarefit.RelayService(pair.run, settings=relay))
        model = Fused(pair.policy)
        pair.models.append(model)
        before = raw(model)
        narrow = msgspec.structs.replace(RECEIVER_SETTINGS, max_payload_nbytes=100, shared_directory=str(shared))
        pair.attach(model, "rollout-0", settings=narrow)
        publisher = pair.publisher(settings=msgspec.structs.replace(SETTINGS, max_attempts=1, transport=way))
        perturb(pair.policy, 0)
        with pytest.raises(
            deltarefit.OperatorRequiredError, match=r"rollout-0: .*expected at most 100 bytes \(max_payload_nbytes"
        ):
            publisher.refit()
        assert raw(model) == before


@pytest.mark.torch
def test_join_timeout_is_how_long_wait_joined_waits(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        model = Fused(pair.policy)
        short = msgspec.structs.replace(RECEIVER_SETTINGS, join_timeout_s=0.25)
        receiver = pair.attach(model, "rollout-0", settings=short)
        began_s = CLOCK.monotonic_s()
        with pytest.raises(DeadlineError, match="no trainer opened"):
            receiver.wait_joined()
        assert 0.25 <= CLOCK.monotonic_s() - began_s < 10.0
