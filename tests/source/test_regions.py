"""Pieces moved from a row-major tensor onto the strided view that holds it."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltarefit import kernels
from deltarefit.errors import RejectedError
from deltarefit.pieces import Piece, StridedView, strided, whole
from deltarefit.source import onto_shard, onto_view, pack, window


def pairs(pieces):
    """(flat index, storage position) of every element."""
    found = []
    for piece in pieces:
        for place in np.ndindex(piece.canonical.shape):
            sides = (piece.canonical, piece.storage)
            found.append(tuple(view.offset + sum(p * s for p, s in zip(place, view.stride, strict=True)) for view in sides))
    return sorted(found)


@st.composite
def views(draw):
    """A view with strides that come from a permuted, padded allocation."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    stride, step = [0] * len(shape), 1
    for axis in order:
        stride[axis] = step
        step *= shape[axis] + draw(st.integers(0, 2))
    return StridedView(draw(st.integers(0, 3)), shape, tuple(stride))


@st.composite
def piece_of(draw, num_elements):
    """Runs or strided runs of the row-major tensor, as a converter's pieces address it."""
    start = draw(st.integers(0, num_elements - 1))
    step = draw(st.sampled_from([1, 1, 1, 2, 3, 4, 6]))
    length = draw(st.integers(1, (num_elements - 1 - start) // step + 1))
    return Piece(StridedView(7, (length,), (1,)), StridedView(start, (length,), (step,)))


@given(st.data())
def test_every_element_keeps_its_flat_index_and_moves_to_its_address(data):
    view = data.draw(views())
    positions = np.empty(view.num_elements, int)
    for flat, place in enumerate(np.ndindex(view.shape)):
        positions[flat] = view.offset + sum(p * s for p, s in zip(place, view.stride, strict=True))
    piece = data.draw(piece_of(view.num_elements))
    try:
        moved = onto_view([piece], view)
    except RejectedError:
        assert piece.storage.stride[0] > 1  # a stride that follows no dimension
        return
    assert pairs(moved) == sorted((k, positions[s]) for k, s in pairs([piece]))


def test_a_contiguous_tensor_needs_one_piece():
    view = StridedView(5, (4, 6), (6, 1))
    moved = onto_view([Piece(whole((24,)), whole((24,)))], view)
    assert [piece.normalised() for piece in moved] == [Piece(whole((24,)), StridedView(5, (24,), (1,)))]


def test_a_transposed_tensor_needs_one_piece():
    moved = onto_view([Piece(whole((12,)), whole((12,)))], StridedView(0, (3, 4), (1, 3)))
    assert pairs(moved) == sorted((i * 4 + j, i + j * 3) for i in range(3) for j in range(4))
    assert len(moved) == 1


def test_a_piece_past_the_tensor_is_refused():
    with pytest.raises(RejectedError, match="reaches past the 6 elements"):
        onto_view([Piece(whole((7,)), whole((7,)))], whole((2, 3)))


def test_the_window_is_the_least_that_must_be_read():
    pieces = [
        Piece(StridedView(0, (2,), (1,)), StridedView(10, (2,), (1,))),
        Piece(StridedView(2, (2,), (1,)), StridedView(20, (2,), (3,))),
    ]
    first, count, moved = window(pieces)
    storage = np.arange(30, dtype="<u2")
    assert (first, count) == (10, 14)
    assert kernels.gather(storage[first : first + count], moved).tolist() == kernels.gather(storage, pieces).tolist()
    assert window([]) == (0, 0, ())


@st.composite
def shards(draw):
    """Intervals per dimension of a small tensor, in any order, and a strided view that holds their product."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    held = []
    for length in shape:
        cuts = sorted(draw(st.sets(st.integers(0, length), min_size=2, max_size=5))) if length > 1 else [0, length]
        intervals = [pair for n, pair in enumerate(itertools.pairwise(cuts)) if n % 2 == 0]
        held.append(tuple(draw(st.permutations(intervals))))
    lengths = tuple(sum(stop - start for start, stop in intervals) for intervals in held)
    return shape, held, whole(lengths)


@given(st.data())
def test_a_shard_holds_exactly_its_part_of_every_piece(data):
    shape, held, local = data.draw(shards())
    positions = {}
    for place in np.ndindex(local.shape):
        coordinates = [
            [k for start, stop in intervals for k in range(start, stop)][p] for intervals, p in zip(held, place, strict=True)
        ]
        flat = sum(c * s for c, s in zip(coordinates, whole(shape).stride, strict=True))
        positions[flat] = sum(p * s for p, s in zip(place, local.stride, strict=True))
    piece = data.draw(piece_of(whole(shape).num_elements))
    try:
        moved = onto_shard([piece], shape, held, local)
    except RejectedError:
        assert piece.storage.stride[0] > 1
        return
    assert pairs(moved) == sorted((k, positions[s]) for k, s in pairs([piece]) if s in positions)


def test_a_shard_of_another_shape_than_its_intervals_is_refused():
    with pytest.raises(RejectedError, match=r"shard of shape \(2,\)"):
        onto_shard([], (4,), [((0, 3),)], whole((2,)))


def test_an_empty_shard_holds_nothing():
    assert onto_shard([Piece(whole((6,)), whole((6,)))], (2, 3), [(), ((0, 3),)], whole((0, 3))) == ()


def test_packed_pieces_are_what_their_views_hold_one_behind_another():
    storage = np.arange(100, dtype=np.uint16)
    pieces = (
        Piece(whole((4, 3)), StridedView(5, (4, 3), (1, 20))),
        Piece(StridedView(12, (0,), (1,)), StridedView(0, (0,), (1,))),
        Piece(StridedView(12, (5,), (1,)), StridedView(70, (5,), (2,))),
    )
    packed, views = pack(pieces)
    words = np.concatenate([strided(storage, view).reshape(-1) for view in views])
    assert words.size == 17
    assert [piece.canonical for piece in packed] == [pieces[0].canonical, pieces[2].canonical]
    for piece, original in zip(packed, (pieces[0], pieces[2]), strict=True):
        assert np.array_equal(strided(words, piece.storage), strided(storage, original.storage))
