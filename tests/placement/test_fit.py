"""From position pairs to pieces, and from flat indices to positions through them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltarefit.pieces import Cast, Piece, StridedView
from deltarefit.placement import fit_pieces
from deltarefit.placement.fit import split_ascending
from deltarefit.placement.locate import locate


def positions(view):
    return [
        view.offset + sum(i * s for i, s in zip(place, view.stride, strict=True))
        for place in itertools.product(*map(range, view.shape))
    ]


def pairs(pieces):
    return sorted(pair for piece in pieces for pair in zip(positions(piece.canonical), positions(piece.storage), strict=True))


def fit(canonical, storage=None, **limits):
    canonical = np.asarray(canonical, np.int64).reshape(-1)
    storage = np.arange(canonical.size) if storage is None else np.asarray(storage, np.int64).reshape(-1)
    pieces = fit_pieces(canonical, storage, **limits)
    if pieces is not None:
        assert pairs(pieces) == sorted(zip(canonical.tolist(), storage.tolist(), strict=True))
        assert all(piece == piece.normalised() and piece.is_ascending() for piece in pieces)
    return pieces


GRID = np.arange(6 * 8 * 4).reshape(6, 8, 4)


@pytest.mark.parametrize(
    ("canonical", "count"),
    [
        (GRID, 1),
        (GRID[2:4], 1),
        (GRID[:, 1:5, :], 1),
        (GRID[:, :, 1:3], 1),
        (GRID.transpose(2, 0, 1), 1),
        (GRID[:, ::2], 1),
        (GRID.reshape(6, 2, 4, 4).transpose(1, 0, 2, 3), 1),
        (np.concatenate([GRID[4:], GRID[:2]]), 2),
        (np.concatenate([GRID[:, 3:], GRID[:, :3]], axis=1), 12),
        (GRID[::-1], 6),
        (GRID[[3, 0, 5, 1]], 4),
        (GRID[:0], 0),
    ],
)
def test_regular_placements_are_few_pieces(canonical, count):
    assert len(fit(canonical)) <= count


def test_a_placement_without_structure_exceeds_the_limit():
    order = np.random.default_rng(0).permutation(500)
    assert fit(order, limit=50) is None
    assert len(fit(order, limit=1000)) > 50


def test_the_cast_is_kept():
    assert {piece.cast for piece in fit_pieces(np.arange(4), np.arange(4), Cast.WIDEN)} == {Cast.WIDEN}


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4),
    st.permutations(range(4)),
    st.integers(0, 30),
)
def test_random_permuted_boxes_are_covered_exactly_once(axes, order, offset):
    shape = [length for length, _ in axes]
    full = [length + gap for length, gap in axes]
    grid = np.arange(np.prod(full)).reshape(full)[tuple(slice(0, n) for n in shape)]
    chosen = [axis for axis in order if axis < len(shape)]
    fit(grid.transpose(chosen) + offset)


@given(st.lists(st.integers(0, 40), unique=True, max_size=25), st.randoms(use_true_random=False))
def test_any_injection_is_covered_exactly_once(canonical, random):
    storage = list(range(0, 3 * len(canonical), 3))
    random.shuffle(storage)
    assert fit(canonical, storage) is not None


def test_one_element_with_several_homes_is_cut_into_slices():
    spread = Piece(StridedView(3, (4, 2), (0, 1)), StridedView(0, (4, 2), (2, 1)))
    parts = split_ascending(spread)
    assert len(parts) == 4
    assert pairs(parts) == pairs([spread])


@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.booleans())
def test_locating_is_the_inverse_of_enumerating(offset, rows, columns, step, gap, transposed):
    canonical = StridedView(offset, (rows, columns), (columns * step + gap, step))
    storage = StridedView(5, (rows, columns), (1, rows) if transposed else (columns, 1))
    piece = Piece(canonical, storage).normalised()
    every = np.arange(piece.canonical.last + 10)
    places, found = locate(piece, every)
    assert sorted(zip(every[places].tolist(), found.tolist(), strict=True)) == pairs([piece])
    assert sorted(piece.storage.positions().tolist()) == sorted(found.tolist())


def test_positions_of_rank_0_and_empty_views():
    assert StridedView(7, (), ()).positions().tolist() == [7]
    assert StridedView(7, (2, 0), (1, 1)).positions().size == 0
    assert StridedView(1, (2, 2), (0, 3)).positions().tolist() == [1, 4, 1, 4]
