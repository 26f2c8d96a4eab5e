"""Large shards in parts: the same elements, each once, in bounded lists that all ranks make alike."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltarefit.pieces import Piece, StridedView, whole
from deltarefit.source import PART_NBYTES, SourceSettings, cut_into_parts


def pairs(pieces):
    """(flat index, position in storage) of every element."""
    return [
        pair
        for piece in pieces
        for pair in zip(piece.canonical.positions().tolist(), piece.storage.positions().tolist(), strict=True)
    ]


@given(st.data())
def test_parts_hold_every_element_once_and_are_bounded(data):
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    view = whole(shape)
    order = data.draw(st.permutations(range(len(shape))))
    pieces = [
        Piece(
            view,
            StridedView(
                0, view.shape, tuple(whole([shape[k] for k in order]).stride[order.index(k)] for k in range(len(shape)))
            ),
        )
    ]
    target = data.draw(st.integers(2, 200))
    parts = cut_into_parts(pieces, 2, target)
    assert sorted(pair for part in parts for pair in pairs(part)) == sorted(pairs(pieces))
    assert all(sum(piece.num_elements for piece in part) * 2 <= target for part in parts)
    indices = [[flat for flat, _ in pairs(part)] for part in parts]
    assert all(max(before) < min(after) for before, after in itertools.pairwise(indices))


def test_copies_that_lie_differently_are_cut_alike():
    shape = (60, 40)
    plain = Piece(whole(shape), StridedView(7, shape, (50, 1)))
    transposed = Piece(whole(shape), StridedView(0, shape, (1, 60)))
    one, other = (cut_into_parts([piece], 2, 1000) for piece in (plain, transposed))
    assert len(one) == 5
    assert [[p.canonical for p in part] for part in one] == [[p.canonical for p in part] for part in other]


def test_parts_are_of_about_equal_size():
    view = whole((151936, 2048))
    sizes = [sum(piece.num_elements for piece in part) for part in cut_into_parts([Piece(view, view)], 2)]
    assert len(sizes) == 10
    assert max(sizes) - min(sizes) < 2 * 2048 * 10
    assert max(sizes) * 2 <= PART_NBYTES == SourceSettings().chunk_nbytes


def test_what_is_small_or_empty_is_one_part():
    view, empty = whole((4, 4)), whole((0, 4))
    assert [len(part) for part in cut_into_parts([Piece(view, view)], 2)] == [1]
    assert cut_into_parts([Piece(empty, empty)], 2) == [()]
    assert cut_into_parts([], 2) == [()]


def test_several_pieces_fill_parts_in_the_order_of_their_flat_indices():
    rows = [Piece(StridedView(start, (4,), (1,)), StridedView(100 - start, (4,), (1,))) for start in (12, 0, 4, 8)]
    parts = cut_into_parts(rows, 2, 16)
    assert [[piece.canonical.offset for piece in part] for part in parts] == [[0, 4], [8, 12]]
    assert np.array_equal(parts[1][0].storage.positions(), np.arange(92, 96))
