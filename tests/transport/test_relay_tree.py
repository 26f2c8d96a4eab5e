"""The tree is balanced, and the frames are what they say."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltarefit.errors import RejectedError, TransportError
from deltarefit.transport.relay import frame
from deltarefit.transport.relay.tree import depth, rotate, split


def reach(below, fan_out):
    """Every peer below, with its distance."""
    found = []
    for part in split(below, fan_out):
        found.append((part[0], 1))
        found += [(peer, hops + 1) for peer, hops in reach(part[1:], fan_out)]
    return found


@given(st.integers(0, 200), st.integers(1, 8))
def test_every_peer_is_reached_once_by_the_shortest_tree(count, fan_out):
    hops = dict(reach(list(range(count)), fan_out))
    assert sorted(hops) == list(range(count))
    deepest = max(hops.values(), default=0)
    assert deepest == depth(count, fan_out)
    # No tree of that fan-out is flatter: one of depth d has at most fan_out + fan_out^2 + … + fan_out^d peers below its root.
    assert sum(fan_out**level for level in range(1, deepest)) < max(count, 1)


@given(st.integers(0, 100), st.integers(1, 9))
def test_parts_differ_by_one_at_most_and_keep_their_order(count, fan_out):
    parts = split(list(range(count)), fan_out)
    assert [peer for part in parts for peer in part] == list(range(count))
    assert len(parts) == min(count, fan_out)
    if parts:
        assert max(map(len, parts)) == math.ceil(count / fan_out)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_owners_take_roots_in_turn():
    peers = ("a", "b", "c")
    assert [rotate(peers, owner)[0] for owner in range(5)] == ["a", "b", "c", "a", "b"]
    assert sorted(rotate(peers, 4)) == sorted(peers)
    assert rotate((), 3) == ()


@pytest.mark.parametrize("fan_out", [0, -1, 65])
def test_impossible_fan_out_is_rejected(fan_out):
    with pytest.raises(RejectedError, match="fan-out"):
        split([1], fan_out)


PEER = frame.Peer("n0", "10.0.0.1", 7000)
MESSAGES = [
    frame.Hello("s3://b/r", "n0", bytes(16)),
    frame.Welcome("n0", bytes(16), bytes(16)),
    frame.Proof(bytes(16)),
    frame.Route("v000001-a1-00000000", 3, (PEER, PEER), 2),
    frame.Offer(1, "v000001-a1-00000000", 3, 4, 5),
    frame.Have(1, 2),
    frame.Done(1),
    frame.Failed(1, "why"),
    frame.Alive(),
    frame.Call("stop", "v000001-a1-00000000", 0, (PEER,), 2, 1.5),
    frame.Reply(3, ("n1",)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_comes_out_as_it_went_in(message):
    whole = frame.encode(message)
    kind, nbytes = frame.body_nbytes(whole[: frame.HEADER.size])
    assert (kind, nbytes) == (frame.MESSAGE, len(whole) - frame.HEADER.size)
    assert frame.decode(whole[frame.HEADER.size :]) == message


@given(st.binary(max_size=64))
def test_any_body_is_a_message_or_refused(body):
    try:
        frame.decode(body)
    except TransportError:
        return


@given(st.binary(min_size=8, max_size=8))
def test_any_header_is_ours_or_refused_before_its_body_is_read(header):
    try:
        _, nbytes = frame.body_nbytes(header)
    except TransportError:
        return
    assert nbytes <= frame.MAX_BODY_NBYTES


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (frame.HEADER.pack(b"GE", 1, 1, 5), "something else"),
        (frame.HEADER.pack(b"dr", 1, 2, 5), "same deltarefit everywhere"),
        (frame.HEADER.pack(b"dr", 1, 1, frame.MAX_BODY_NBYTES + 1), "at most"),
        (frame.HEADER.pack(b"dr", 2, 1, 11), "a frame of 11 bytes"),
        (frame.HEADER.pack(b"dr", 3, 1, 5), "something else"),
    ],
)
def test_header_is_refused(header, why):
    with pytest.raises(TransportError, match=why):
        frame.body_nbytes(header)


@pytest.mark.parametrize(
    "row",
    [
        [5, 1, "v1", -1, 4, 5],
        [5, 1, "../x", 3, 4, 5],
        [5, 1, "v1", 3, 4, 2**50],
        [5, 1, "v1", 3, 4],
        [10, "rm", "v1", 0, [], 2, 1.0],
    ],
)
def test_message_with_a_value_out_of_bounds_is_refused(row):
    with pytest.raises(TransportError):
        frame.decode(msgspec.msgpack.encode(row))


def test_data_head_says_where_its_bytes_belong():
    buffer = bytearray(64)
    head = frame.write_data_head(buffer, 7, 2**40, 10)
    assert frame.body_nbytes(buffer[: frame.HEADER.size]) == (frame.DATA, frame.DATA_HEAD.size + 10)
    assert frame.DATA_HEAD.unpack_from(buffer, frame.HEADER.size) == (7, 2**40)
    assert head == frame.HEADER.size + frame.DATA_HEAD.size
