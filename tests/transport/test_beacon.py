"""Beacons: life is judged by what the reader sees change, on the reader's clock."""

from __future__ import annotations

import itertools

import pytest

from deltarefit.errors import RejectedError
from deltarefit.runtime.clock import ManualClock
from deltarefit.transport import Beacon, BeaconWatch, keys, open_run, read_beacon, read_beacons

RUN = itertools.count()


@pytest.fixture
def store():
    return open_run(f"memory://beacons-{next(RUN)}", clock=ManualClock())


def test_beacons_say_what_their_writers_said(store):
    Beacon(store, keys.member("b"), nonce="00000001", info=b"bee").beat()
    first = Beacon(store, keys.member("a"), nonce="00000002")
    assert [reading.name for reading in read_beacons(store)] == ["b"], "nothing before the first beat"
    first.beat(b"changed")
    first.beat()
    readings = read_beacons(store)
    assert [(r.name, r.nonce, r.counter, r.info) for r in readings] == [
        ("a", "00000002", 2, b"changed"),
        ("b", "00000001", 1, b"bee"),
    ]
    first.remove()
    first.remove()
    assert [reading.name for reading in read_beacons(store)] == ["b"]


def test_coordinator_has_a_beacon_beside_the_control_record(store):
    store.put(keys.control("record"), b"not a beacon")
    Beacon(store, keys.control("coordinator"), nonce="00000001", info=b"here").beat()
    assert [reading.info for reading in read_beacons(store, keys.CONTROL)] == [b"here"]


def test_age_grows_while_nothing_moves_and_restarts_with_every_change(store):
    clock = ManualClock()
    watch = BeaconWatch(store, clock=clock)
    beacon = Beacon(store, keys.member("a"), nonce="00000001")
    beacon.beat()
    assert watch.look()["a"].age_s == 0.0
    clock.advance(5)
    assert watch.look()["a"].age_s == 5.0
    beacon.beat()
    assert watch.look()["a"].age_s == 0.0
    clock.advance(2)
    restarted = Beacon(store, keys.member("a"), nonce="00000002")
    for _ in range(2):
        restarted.beat()
    assert watch.look()["a"].age_s == 0.0, "the same counter of another start is a change"
    restarted.remove()
    assert watch.look() == {}


def test_foreign_objects_are_no_beacons(store, caplog):
    store.put(keys.member("x"), b"something else")
    Beacon(store, keys.member("a"), nonce="00000001").beat()
    store.put(keys.member("b"), store.get(keys.member("a"), max_nbytes=1000))
    assert [reading.name for reading in read_beacons(store)] == ["a"]
    assert "members/x is not a beacon" in caplog.text


def test_too_much_info_is_refused(store):
    with pytest.raises(RejectedError, match="at most"):
        Beacon(store, keys.member("a"), nonce="00000001", info=bytes(40_000))


def test_one_beacon_is_read_by_its_key(store, caplog):
    assert read_beacon(store, keys.member("a")) is None
    Beacon(store, keys.member("a"), nonce="00000001", info=b"here").beat()
    assert read_beacon(store, keys.member("a")).info == b"here"
    store.put(keys.member("b"), store.get(keys.member("a"), max_nbytes=1000))
    assert read_beacon(store, keys.member("b")) is None, "it names another member"
    store.put(keys.member("a"), b"something else")
    assert read_beacon(store, keys.member("a")) is None
    assert "not a beacon" in caplog.text


@pytest.mark.parametrize("order", ["ab", "ba", "aab", "bba"])
def test_of_two_writers_that_yield_the_earlier_one_stops_whoever_beats_next(store, order):
    """Both beat equally often, and a beat that was under way when the other began may come once more."""
    key = keys.member("a")
    writers = {"a": Beacon(store, key, nonce="00000001", yields=True), "b": Beacon(store, key, nonce="00000002", yields=True)}
    writers["a"].beat()
    writers["b"].beat()
    for name in order:
        writers[name].beat()
    assert [writers[name].is_replaced for name in "ab"] == [True, False]
    writers["a"].remove()
    assert read_beacon(store, key).nonce == "00000002", "a goodbye of the earlier one takes nothing away"
    writers["b"].remove()
    assert read_beacon(store, key) is None


def test_a_beat_of_the_earlier_writer_that_comes_late_stops_nobody_but_it(store):
    key = keys.member("a")
    earlier, later = (Beacon(store, key, nonce=nonce, yields=True) for nonce in ("00000001", "00000002"))
    earlier.beat()
    late = store.get(key, max_nbytes=1000)
    later.beat()
    store.put(key, late)
    later.beat()
    earlier.beat()
    assert (earlier.is_replaced, later.is_replaced) == (True, False)
