"""Manifests: what they list, and every way in which one is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltarefit.errors import PayloadInvalidError
from deltarefit.ids import OwnerId, attempt_id
from deltarefit.runtime.clock import ManualClock
from deltarefit.transport import Manifest, ManifestWriter, OwnerEnd, PayloadEntry, keys, open_run, read_manifest
from deltarefit.transport.manifest import MAX_MANIFEST_NBYTES

ATTEMPT = attempt_id(3, 1, "0123abcd")
DIGEST = "0" * 32


def entry(sequence: int, owner: int, nbytes: int = 10) -> PayloadEntry:
    return PayloadEntry(sequence, owner, nbytes, f"{sequence:016x}{owner:016x}")


ENTRIES = st.dictionaries(st.tuples(st.integers(0, 20), st.integers(0, 5)), st.integers(0, 2**34), max_size=12)


@given(ENTRIES)
def test_manifest_returns_what_was_put_in(listed):
    entries = tuple(entry(s, o, n) for (s, o), n in sorted(listed.items()))
    manifest = Manifest(ATTEMPT, entries)
    assert Manifest.decode(manifest.encode(), attempt=ATTEMPT) == manifest


@given(st.binary(max_size=60))
def test_any_bytes_are_a_manifest_or_refused(data):
    try:
        manifest = Manifest.decode(data, attempt=ATTEMPT)
    except PayloadInvalidError:
        return
    assert manifest.attempt == ATTEMPT


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_changed_manifest_is_refused_or_still_consistent(place, change):
    entries = tuple(entry(s, o) for s in range(3) for o in range(2))
    end = OwnerEnd.of(0, [e for e in entries if e.owner == 0])
    data = bytearray(Manifest(ATTEMPT, entries, (end,)).encode())
    data[place % len(data)] ^= change
    try:
        manifest = Manifest.decode(bytes(data), attempt=ATTEMPT)
    except PayloadInvalidError:
        return
    assert all(OwnerEnd.of(e.owner, [x for x in manifest.entries if x.owner == e.owner]) == e for e in manifest.ended)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([ATTEMPT, [[0, 0, 1, DIGEST], [0, 0, 1, DIGEST]], []], "each once"),
        ([ATTEMPT, [[1, 0, 1, DIGEST], [0, 0, 1, DIGEST]], []], "order"),
        ([ATTEMPT, [[0, -1, 1, DIGEST]], []], ">= 0"),
        ([ATTEMPT, [[0, 0, 2**40, DIGEST]], []], "<= 17179869184"),
        ([ATTEMPT, [[0, 0, 1, "x" * 32]], []], "regex"),
        ([ATTEMPT, [[0, 0, 1, DIGEST, 9]], []], "at most length 4"),
        ([ATTEMPT, [], [[0, 1, DIGEST]]], "owner 0 ended with 1 payloads"),
        ([ATTEMPT, [[1, 0, 1, DIGEST]], [[0, 1, DIGEST]]], "owner 0 ended"),
        ([ATTEMPT, [], [[1, 0, OwnerEnd.of(1, []).digest], [0, 0, OwnerEnd.of(0, []).digest]]], "ended owners"),
        ([ATTEMPT, [[0, 0, 1, DIGEST]], [[0, 1, DIGEST]]], "owner 0 ended"),
        (["v000003-a2-ffffffff", [], []], "is of attempt"),
        ([ATTEMPT, "no list", []], "array"),
    ],
)
def test_manifest_is_refused(row, why):
    with pytest.raises(PayloadInvalidError, match=why):
        Manifest.decode(msgspec.msgpack.encode(row), attempt=ATTEMPT)


def test_oversized_manifest_is_refused_before_it_is_read():
    with pytest.raises(PayloadInvalidError, match="at most"):
        Manifest.decode(bytes(MAX_MANIFEST_NBYTES + 1), attempt=ATTEMPT)


def test_owner_end_changes_with_every_fact():
    base = OwnerEnd.of(0, [entry(0, 0), entry(1, 0)])
    assert OwnerEnd.of(0, [entry(1, 0), entry(0, 0)]) == base, "order of giving does not matter"
    assert OwnerEnd.of(0, [entry(0, 0), entry(1, 0, 11)]).digest != base.digest
    assert OwnerEnd.of(0, [entry(0, 0), entry(2, 0)]).digest != base.digest
    assert OwnerEnd.of(0, [entry(0, 0)]).digest != base.digest


@pytest.fixture
def store():
    opened = open_run("memory://manifests", clock=ManualClock())
    opened.delete_prefix("attempts")
    return opened


def test_owners_parts_join_in_declared_order(store):
    assert read_manifest(store, ATTEMPT) == Manifest(ATTEMPT)
    writers = [ManifestWriter(store, ATTEMPT, OwnerId(owner)) for owner in range(3)]
    for sequence in range(2):
        for owner in (2, 0):
            writers[owner].add(entry(sequence, owner))
    ends = [writers[owner].end() for owner in (0, 1)]
    manifest = read_manifest(store, ATTEMPT)
    assert [(e.sequence, e.owner) for e in manifest.entries] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert manifest.ended == tuple(ends)
    assert manifest.lacks(3) == (2,)
    assert [end.count for end in ends] == [2, 0]


def test_part_that_lists_another_owner_is_refused(store):
    ManifestWriter(store, ATTEMPT, OwnerId(1)).add(entry(0, 1))
    part = store.get(keys.manifest_part(ATTEMPT, 1), max_nbytes=1000)
    store.put(keys.manifest_part(ATTEMPT, 4), part)
    store.delete([keys.manifest_part(ATTEMPT, 1)])
    with pytest.raises(PayloadInvalidError, match="not only its own"):
        read_manifest(store, ATTEMPT)
