"""A run whose control record is kept in a real etcd, while payloads, mail and beacons stay in the run's store."""

from __future__ import annotations

import itertools
import json

import msgspec
import pytest
from click.testing import CliRunner

import deltarefit
from deltarefit.cli.program import program
from deltarefit.control import ABSENT, EtcdRecordStore
from deltarefit.errors import RejectedError
from deltarefit.runtime.clock import SystemClock
from deltarefit.runtime.control_place import PLACE, etcd_store, place_record, record_store
from deltarefit.testing.faults import CorruptingSender, FaultPlan
from deltarefit.transport import open_run

from .pair import SETTINGS, Fused, Pair, perturb, raw

pytestmark = pytest.mark.torch
RUNS = itertools.count()


@pytest.fixture
def control(etcd_endpoint):
    return f"{etcd_endpoint.replace('http', 'etcd')}/deltarefit/placed-{next(RUNS)}"


def ask(*arguments: str):
    return CliRunner().invoke(program, arguments)


@pytest.mark.process
def test_everybody_finds_a_record_in_etcd_by_the_run_alone(tmp_path, control):
    damage = FaultPlan(lambda name: name.attempt.startswith("v000001-a1"))
    with Pair(tmp_path) as pair:  # its receiver is there before the run is
        placed = msgspec.structs.replace(SETTINGS, control=control, max_attempts=2)
        publisher = pair.publisher(settings=placed, wrap_sender=lambda sender: CorruptingSender(sender, damage))
        perturb(pair.policy, 0)
        assert publisher.refit().attempts == 2
        pair.assert_equal()
        assert not (tmp_path / "run" / "control" / "record.sqlite").exists()
        assert b'"policy_version":1' in etcd_store(control).read()[0]
        shown = json.loads(ask("status", "--run", pair.run, "--json", "--look", "2.5").stdout)
        assert (shown["policy_version"], shown["coordinator_is_alive"]) == (1, True)
        assert "no refit is under way" in ask("abort", "--run", pair.run, "--reason", "none").stderr
        checks = json.loads(ask("doctor", "--run", pair.run, "--watch", "0.2", "--json").stdout)["checks"]
        found = {check["name"]: check["found"] for check in checks}
        assert "in etcd" in found["conditional writes"]
        assert "policy version 1 is committed" in found["control record"]
        publisher.close()

        second = pair.publisher()  # says nothing about where the record is
        assert second.policy_version == 1
        late = Fused(pair.policy)
        with pair.attach(late, "late").serving(10.0):
            pass
        pair.models.append(late)
        perturb(pair.policy, 1)
        assert second.refit().receivers == ("late", "rollout-0")
        pair.assert_equal()
        with pytest.raises(deltarefit.RejectedError, match="live coordinator"):
            pair.publisher(settings=placed)
        with pytest.raises(deltarefit.RejectedError, match="stays there; leave control empty"):
            pair.publisher(settings=msgspec.structs.replace(SETTINGS, control=f"{control}-other"))
        assert raw(late) == raw(pair.models[0])


@pytest.mark.process
def test_a_run_keeps_its_record_where_it_began(tmp_path, control):
    with Pair(tmp_path) as pair:
        pair.publisher().close()
        with pytest.raises(deltarefit.RejectedError, match=r"is at file://.* itself and stays there"):
            pair.publisher(settings=msgspec.structs.replace(SETTINGS, control=control))


@pytest.mark.process
def test_two_trainers_that_make_a_run_at_once_with_different_places_do_not_both_go_on(tmp_path, control):
    """Either the one that writes the record sees the other's place, or the one that places it sees the other's record."""
    store = open_run((tmp_path / "run").as_uri(), clock=SystemClock())
    beside = record_store(store)
    assert beside.read() == (None, ABSENT)
    beside._found = beside._chosen()  # it looked right before the other one placed the record
    place_record(store, control)
    with pytest.raises(RejectedError, match="another trainer placed its control record"):
        beside.swap(ABSENT, b"{}")

    store = open_run((tmp_path / "other").as_uri(), clock=SystemClock())
    with pytest.raises(RejectedError, match="itself and stays there"):
        place_record(_Late(store), control)
    assert store.find(PLACE, max_nbytes=100) is None
    assert record_store(store).read()[0] == b"{}"


class _Late:
    """A store in which another trainer writes its record right before this one places its own."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put_if_absent(self, key, data):
        assert record_store(self._store).swap(ABSENT, b"{}")
        return self._store.put_if_absent(key, data)


@pytest.mark.parametrize(
    "url",
    ["http://h:2379/k", "etcd://h:2379", "etcd:///key", "etcd://user:secret@h:2379/k", "etcd://h/k?x=1", "etcd://h:port/k", ""],
)
def test_other_urls_are_refused_without_repeating_a_password(url):
    with pytest.raises(RejectedError, match="expected") as caught:
        etcd_store(url)
    assert "secret" not in str(caught.value)


def test_hosts_user_and_certificates_come_from_url_and_environment(tmp_path):
    store = etcd_store("etcd://a:1,b:2/run/7", {"ETCDCTL_USER": "me:pass:word"})
    assert isinstance(store, EtcdRecordStore)
    assert store.place == "etcd a:1, b:2 key run/7"
    assert (store._user, store._password, store._tls) == ("me", "pass:word", None)
    assert etcd_store("etcds://a:1/k", {})._tls is not None
    with pytest.raises(RejectedError, match="ETCDCTL_CACERT"):
        etcd_store("etcds://a:1/k", {"ETCDCTL_CACERT": str(tmp_path / "none")})
