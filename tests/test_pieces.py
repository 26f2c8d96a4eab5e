"""Pieces and stored-bit views: unit tests, and properties over random boxes and tensors."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltarefit.bits import (
    DTYPES,
    dtype_name,
    logical_words,
    spec_of,
    storage_id,
    storage_view,
    storage_words,
    tensor_from_words,
)
from deltarefit.canonical import DTYPE_NBYTES, TensorSpec, word_dtype
from deltarefit.errors import RejectedError
from deltarefit.pieces import Cast, Piece, StridedView, canonical_bounds, merge_pieces, whole

pytestmark = pytest.mark.torch


def positions(view):
    """All element positions in row-major order, by plain enumeration."""
    return [
        view.offset + sum(i * s for i, s in zip(place, view.stride, strict=True))
        for place in itertools.product(*map(range, view.shape))
    ]


def pairs(piece):
    return list(zip(positions(piece.canonical), positions(piece.storage), strict=True))


@st.composite
def boxes(draw, max_rank=4):
    """A box of a row-major tensor, laid out in a storage with its axes in any order and with gaps."""
    shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=max_rank))
    low = [draw(st.integers(0, n - 1)) for n in shape]
    length = [draw(st.integers(1, n - first)) for n, first in zip(shape, low, strict=True)]
    strides = whole(shape).stride
    canonical = StridedView(sum(a * b for a, b in zip(low, strides, strict=True)), tuple(length), tuple(strides))
    order = draw(st.permutations(range(len(shape))))
    storage_stride, step = [0] * len(shape), draw(st.integers(1, 2))
    for axis in order:
        storage_stride[axis] = step
        step *= length[axis] + draw(st.integers(0, 1))
    storage = StridedView(draw(st.integers(0, 5)), tuple(length), tuple(storage_stride))
    axes = draw(st.permutations(range(len(shape))))

    def turned(view):
        return StridedView(view.offset, tuple(view.shape[a] for a in axes), tuple(view.stride[a] for a in axes))

    return Piece(turned(canonical), turned(storage)), math.prod(shape)


@given(boxes())
def test_normalising_keeps_the_pairs_and_visits_flat_indices_in_order(drawn):
    piece, _ = drawn
    normal = piece.normalised()
    assert sorted(pairs(normal)) == sorted(pairs(piece))
    assert positions(normal.canonical) == sorted(positions(piece.canonical))
    assert normal.is_ascending()
    assert normal.normalised() == normal
    assert all(n > 1 for n in normal.canonical.shape) or normal.canonical.shape == (1,)


@given(boxes())
def test_bounds_are_the_first_and_the_last_position(drawn):
    piece, _ = drawn
    for view in (piece.canonical, piece.storage):
        assert (view.first, view.last) == (min(positions(view)), max(positions(view)))
        assert view.num_elements == len(positions(view))
    assert canonical_bounds(piece) == (piece.canonical.first, piece.canonical.last)


@given(st.lists(boxes(), min_size=1, max_size=5))
def test_merged_groups_hold_every_piece_once_and_ascend(drawn):
    pieces = [piece for piece, _ in drawn]
    groups = merge_pieces(pieces)
    assert sorted(pair for group in groups for piece in group for pair in pairs(piece)) == sorted(
        pair for piece in pieces for pair in pairs(piece)
    )
    for group in groups:
        visited = [position for piece in group for position in positions(piece.canonical)]
        assert visited == sorted(set(visited))


def test_column_blocks_interleave_and_end_up_in_different_groups():
    left = Piece(StridedView(0, (3, 2), (4, 1)), StridedView(0, (3, 2), (2, 1)))
    right = Piece(StridedView(2, (3, 2), (4, 1)), StridedView(6, (3, 2), (2, 1)))
    below = Piece(StridedView(12, (4,), (1,)), StridedView(12, (4,), (1,)))
    assert [len(group) for group in merge_pieces([right, below, left])] == [2, 1]


def test_whole_row_major_tensors_collapse_to_one_axis():
    view = whole((2, 3, 4))
    assert view.stride == (12, 4, 1)
    assert Piece(view, view).normalised().canonical == StridedView(0, (24,), (1,))
    assert whole((2, 0, 3)).num_elements == 0
    assert whole(()).num_elements == 1


def test_empty_and_single_pieces_keep_one_axis():
    empty = Piece(StridedView(3, (2, 0), (0, 1)), StridedView(9, (2, 0), (7, 1)), Cast.WIDEN).normalised()
    assert (empty.canonical.shape, empty.storage.offset, empty.cast, empty.canonical.last) == ((0,), 9, Cast.WIDEN, 2)
    single = Piece(StridedView(3, (), ()), StridedView(9, (), ())).normalised()
    assert (single.canonical.shape, single.canonical.last) == ((1,), 3)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: StridedView(0, (2, 3), (1,)), "differ in rank"),
        (lambda: StridedView(-1, (2,), (1,)), "negative"),
        (lambda: StridedView(0, (-2,), (1,)), "negative"),
        (lambda: StridedView(0, (2,), (-1,)), "negative"),
        (lambda: Piece(StridedView(0, (2,), (1,)), StridedView(0, (3,), (1,))), "shapes"),
        (lambda: merge_pieces([Piece(StridedView(0, (2, 2), (1, 1)), StridedView(0, (2, 2), (2, 1)))]), "row-major"),
    ],
)
def test_nonsense_is_refused(make, match):
    with pytest.raises(RejectedError, match=match):
        make()


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_dtype_passes_bit_for_bit(dtype):
    spec = TensorSpec("w", dtype, (3, 4))
    bits = np.random.default_rng(0).integers(0, 2 if dtype == "BOOL" else 256, spec.nbytes, np.uint8).view(word_dtype(dtype))
    if dtype == "BOOL":
        bits &= 1
    tensor = tensor_from_words(bits.copy(), spec)
    assert dtype_name(tensor.dtype) == dtype
    assert tensor.element_size() == DTYPE_NBYTES[dtype]
    assert spec_of("w", tensor) == spec
    np.testing.assert_array_equal(logical_words(tensor), bits)
    np.testing.assert_array_equal(logical_words(tensor.t()), bits.reshape(3, 4).T.reshape(-1))


@settings(max_examples=50)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_logical_words_follow_the_shape_and_storage_views_the_memory(shape, random):
    base = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    axes = list(range(len(shape)))
    random.shuffle(axes)
    tensor = base.permute(axes)
    np.testing.assert_array_equal(
        logical_words(tensor), np.ascontiguousarray(base.numpy().transpose(axes)).reshape(-1).view(np.uint32)
    )
    view = storage_view(tensor)
    np.testing.assert_array_equal(storage_words(tensor)[positions(view)], logical_words(tensor))
    assert storage_id(tensor) == storage_id(base)


def test_words_share_memory_with_their_tensor():
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    storage_words(tensor[2:])[3] = 0x8000
    assert logical_words(tensor).tolist() == [0, 0, 0, 0x8000]
    assert str(tensor[3].item()) == "-0.0"
    words = np.zeros(4, np.uint16)
    made = tensor_from_words(words, TensorSpec("w", "BF16", (2, 2)))
    words[1] = 0x3F80
    assert made[0, 1] == 1


def test_read_only_words_are_copied():
    words = np.zeros(4, np.uint16)
    words.flags.writeable = False
    made = tensor_from_words(words, TensorSpec("w", "BF16", (4,)))
    made.fill_(1)
    assert not words.any()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: storage_words(torch.empty(2, device="meta")), "host memory"),
        (lambda: dtype_name(torch.complex128), "expected one of"),
        (lambda: tensor_from_words(np.zeros(3, np.uint16), TensorSpec("w", "BF16", (4,))), "got 3"),
        (lambda: tensor_from_words(np.zeros(4, np.uint32), TensorSpec("w", "BF16", (4,))), "uint32"),
    ],
)
def test_bit_views_refuse_what_they_cannot_spell(call, match):
    with pytest.raises(RejectedError, match=match):
        call()


def test_rank_0_and_empty_tensors():
    assert logical_words(torch.tensor(1.0)).tolist() == [0x3F800000]
    assert logical_words(torch.empty(0, 4)).size == 0
    assert tensor_from_words(np.zeros(0, np.uint16), TensorSpec("w", "BF16", (0, 4))).shape == (0, 4)
    assert storage_id(torch.empty(0)) == 0
