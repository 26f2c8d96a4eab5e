"""The object-store backend against a server that breaks the rules, and the probe that finds such servers."""

from __future__ import annotations

import contextlib

import pytest
from obstore.store import LocalStore, MemoryStore

from deltarefit.control import ABSENT, ObjectRecordStore, SwapUncertainError, probe_conditional_writes
from deltarefit.errors import RejectedError, TransportError
from deltarefit.ids import BaselineId, PolicyVersion
from deltarefit.protocol import CommitRecord
from deltarefit.testing.control_suite import plane_on

K0 = CommitRecord(PolicyVersion(0), BaselineId("b0"))


@pytest.fixture
def record(tiny_s3):
    return ObjectRecordStore(tiny_s3.store(), "run/control.json", place="s3://bucket/run/control.json")


def test_it_works_when_the_server_behaves(record, tiny_s3):
    assert record.swap(ABSENT, b"1")
    _, tag = record.read()
    assert record.swap(tag, b"2")
    assert record.read()[0] == b"2"
    probe_conditional_writes(tiny_s3.store(), "run/probe")
    assert list(tiny_s3.objects) == ["/bucket/run/control.json"], "the probe left something behind"


@pytest.mark.parametrize("is_create", [True, False], ids=["create", "update"])
def test_a_409_is_no_defeat(record, tiny_s3, is_create):
    """AWS answers 409 to conditional writes that overlap: nothing was decided, the caller looks again and finds nobody."""
    tag = ABSENT
    if not is_create:
        record.swap(ABSENT, b"0")
        _, tag = record.read()
    tiny_s3.answers = [(409, False)]
    with contextlib.suppress(SwapUncertainError):  # either way of reporting it is fine
        assert record.swap(tag, b"1") is False
    assert tiny_s3.answers == [], "the 409 was not sent"
    assert record.read() == (None if is_create else b"0", tag)
    plane = plane_on(ObjectRecordStore(tiny_s3.store(), "run/other"))
    tiny_s3.answers = [(409, False)] if is_create else [(200, True), (409, False)]
    plane.create("run", "setup", K0)
    assert plane.acquire("x", "setup").coordinator == "x"
    assert tiny_s3.answers == []


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("takes_effect", [True, False])
def test_a_server_error_says_nothing_about_the_swap(record, tiny_s3, status, takes_effect):
    tiny_s3.answers = [(status, takes_effect)]
    with pytest.raises(SwapUncertainError, match=r"s3://bucket/run/control\.json: no clear reply"):
        record.swap(ABSENT, b"1")
    assert record.read()[0] == (b"1" if takes_effect else None)


def test_a_write_that_the_client_repeats_after_a_lost_reply_is_recognised_as_ours(tiny_s3):
    """The client itself sends the conditional write again and gets 412, though it was its own write that came first."""
    plane = plane_on(ObjectRecordStore(tiny_s3.store(max_retries=3), "run/control.json"))
    plane.create("run", "setup", K0)
    tiny_s3.answers = [(500, True)]
    before = tiny_s3.puts
    assert plane.acquire("x", "setup").epoch == 1
    assert tiny_s3.puts >= before + 1
    assert plane.read().epoch == 1


@pytest.mark.parametrize(
    ("ignored", "text"), [("If-None-Match", "ignores If-None-Match"), ("If-Match", "ignores If-Match with an old ETag")]
)
def test_a_server_that_ignores_conditions_is_refused_and_told_what_to_do(tiny_s3, ignored, text):
    tiny_s3.ignores = frozenset({ignored})
    with pytest.raises(RejectedError, match=text) as caught:
        probe_conditional_writes(tiny_s3.store(), "run/probe")
    assert "two coordinators could both commit" in str(caught.value)
    assert tiny_s3.objects == {}


def test_on_such_a_server_two_coordinators_would_both_win(tiny_s3):
    """Why the probe is there: without conditions both swaps from one tag take effect."""
    tiny_s3.ignores = frozenset({"If-Match"})
    record = ObjectRecordStore(tiny_s3.store(), "k")
    record.swap(ABSENT, b"0")
    _, tag = record.read()
    assert [record.swap(tag, b"1"), record.swap(tag, b"2")] == [True, True]


def test_a_store_without_conditional_update_is_refused(tmp_path):
    store = LocalStore(tmp_path)
    with pytest.raises(RejectedError, match="this store has no conditional writes"):
        probe_conditional_writes(store, "probe")
    assert list(tmp_path.iterdir()) == []


def test_a_probe_of_a_good_store_leaves_nothing(tmp_path):
    store = MemoryStore()
    probe_conditional_writes(store, "run/probe-1")
    assert store.list().collect() == []


def test_a_store_that_cannot_be_reached_is_a_transport_error(tiny_s3):
    tiny_s3.reads = [500, 500]
    record = ObjectRecordStore(tiny_s3.store(), "k")
    with pytest.raises(TransportError, match="k: cannot be read"):
        record.read()


@pytest.mark.parametrize("verb", ["read", "swap"])
def test_a_store_that_forbids_is_refused_by_name(tiny_s3, verb):
    record = ObjectRecordStore(tiny_s3.store(), "k")
    tiny_s3.reads, tiny_s3.answers = [403], [(403, False)]
    with pytest.raises(RejectedError, match=r"k: (reading|writing) is not allowed"):
        record.read() if verb == "read" else record.swap(ABSENT, b"1")


def test_a_store_without_any_tag_is_refused(tiny_s3):
    tiny_s3.objects["/bucket/k"] = b"1"
    tiny_s3.has_etags = False
    with pytest.raises(RejectedError, match="neither an ETag nor a version"):
        ObjectRecordStore(tiny_s3.store(), "k").read()


def test_a_huge_object_in_the_records_place_is_refused_before_it_is_fetched(tiny_s3):
    tiny_s3.objects["/bucket/k"] = bytes((1 << 20) + 1)
    with pytest.raises(RejectedError, match="1048577 bytes, expected at most 1048576"):
        ObjectRecordStore(tiny_s3.store(), "k").read()


def test_an_update_of_a_record_that_was_deleted_is_refused(record, tiny_s3):
    record.swap(ABSENT, b"1")
    _, tag = record.read()
    tiny_s3.objects.clear()
    assert not record.swap(tag, b"2")
    tiny_s3.answers = [(404, False)]  # as moto does
    assert not record.swap(tag, b"2")
