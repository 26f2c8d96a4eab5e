"""Stores and proxies that now and then give less of an object than there is, and say nothing: status 200, a shorter body."""

from __future__ import annotations

import msgspec
import pytest

import deltarefit
from deltarefit.errors import TransportError
from deltarefit.runtime.clock import RandomIds, SystemClock
from deltarefit.runtime.control_place import PLACE, is_placed_elsewhere, record_store
from deltarefit.runtime.doctor import examine
from deltarefit.transport import RunStore, open_run

from .pair import SETTINGS, Fused, Pair, Policy, perturb, raw

pytestmark = pytest.mark.torch


class Cutting:
    """Gives 60 % of each chosen object when it is read for the first time."""

    def __init__(self, monkeypatch, chosen):
        self.struck = []
        original = RunStore._get_once

        def get(store, key, max_nbytes):
            data = original(store, key, max_nbytes)
            if chosen in key and key not in self.struck:
                self.struck.append(key)
                return data[: len(data) * 6 // 10]
            return data

        monkeypatch.setattr(RunStore, "_get_once", get)


@pytest.mark.parametrize("chosen", ["plans/", "/manifest/", "/payloads/", "mail/", "members/", "control/", ""])
def test_a_body_that_ends_early_is_read_again(tmp_path, monkeypatch, chosen):
    cutting = Cutting(monkeypatch, chosen)
    with Pair(tmp_path) as pair:
        pair.refit_at_once(pair.publisher(), 2)
    assert cutting.struck


@pytest.mark.parametrize("chosen", ["/digests", "plans/", "/manifest/", "/payloads/"])
def test_a_receiver_that_catches_up_reads_again_too(tmp_path, monkeypatch, chosen):
    with Pair(tmp_path) as pair:
        publisher = pair.publisher(settings=msgspec.structs.replace(SETTINGS, retained_versions=4))
        for step in range(2):
            perturb(pair.policy, step)
            publisher.refit()
        cutting = Cutting(monkeypatch, chosen)
        pair.models.append(Fused(Policy()))
        with pair.attach(pair.models[1], "late").serving(10.0):
            pair.assert_equal()
        assert cutting.struck


def found_by_doctor(run):
    return examine(run, clock=SystemClock(), ids=RandomIds(), watch_s=0.1).checks


def test_a_store_that_keeps_the_framing_of_uploads_is_found_out(tmp_path, monkeypatch):
    """Some stores keep the chunk sizes and checksums of an upload inside the object."""
    put = RunStore.put

    def framing(store, key, data):
        if "/payloads/" in key or "/doctor-" in key:
            data = b"%x;chunk-signature=0\r\n%b\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n" % (len(data), bytes(data))
        put(store, key, data)

    monkeypatch.setattr(RunStore, "put", framing)
    with Pair(tmp_path) as pair:
        before = raw(pair.models[0])
        publisher = pair.publisher(settings=msgspec.structs.replace(SETTINGS, max_attempts=1))
        perturb(pair.policy, 0)
        with pytest.raises(deltarefit.OperatorRequiredError, match=r"expected .*bytes, the object has \d+"):
            publisher.refit()
        assert raw(pair.models[0]) == before
        (found,) = [check for check in found_by_doctor(pair.run) if check.name == "permissions"]
        assert (found.status, "framing" in found.found) == ("failed", True)
        monkeypatch.setattr(RunStore, "put", put)
        assert publisher.refit().policy_version == 1
        pair.assert_equal()


def test_the_beginning_of_a_place_is_not_taken_for_the_place(tmp_path, monkeypatch):
    store = open_run((tmp_path / "run").as_uri(), clock=SystemClock())
    store.put(PLACE, b"etcd://127.0.0.1:1/deltarefit/run7")
    Cutting(monkeypatch, PLACE)
    assert is_placed_elsewhere(store)
    Cutting(monkeypatch, PLACE)
    with pytest.raises(TransportError, match="key deltarefit/run7: no answer"):
        record_store(store).read()
