"""Bound pieces do what apply_item does, and refuse what it refuses."""

import dataclasses

import numpy as np
import pytest
from kernel_cases import COMPILED, Guarded, random_words

from deltarefit import kernels
from deltarefit.canonical import TensorSpec
from deltarefit.errors import PayloadInvalidError, RejectedError
from deltarefit.kernels import BoundPieces, Isa
from deltarefit.pieces import Cast, Piece, StridedView, whole
from deltarefit.records import DeltaRecords, Encoding

ALL = [Isa.NUMPY, *COMPILED]
SPEC = TensorSpec("w", "BF16", (6, 8))
COLUMNS = [
    Piece(StridedView(2, (6, 3), (8, 1)), StridedView(4, (6, 3), (3, 1))),
    Piece(StridedView(6, (6, 2), (8, 1)), StridedView(40, (6, 2), (1, 6))),
]


def item_of(seed, density=0.4, encoding=Encoding.DIFFERENCE):
    rng = np.random.default_rng(seed)
    places = np.flatnonzero(rng.random(48) < density).astype(np.int64)
    records = DeltaRecords(SPEC, places, random_words(rng, places.size, 2), random_words(rng, places.size, 2))
    return kernels.code_records(records, encoding)


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize("cast", list(Cast))
def test_bound_pieces_equal_apply_item(isa, encoding, cast):
    pieces = [Piece(p.canonical, p.storage, cast) for p in COLUMNS]
    width = 4 if cast is Cast.WIDEN else 2
    for seed in range(5):
        item = item_of(seed, encoding=encoding)
        start = random_words(np.random.default_rng(100 + seed), 60, width)
        wanted, guarded = start.copy(), Guarded.of(start, 1)
        count = kernels.apply_item(wanted, pieces, item, isa=isa)
        assert BoundPieces(guarded.words, pieces, SPEC, isa=isa).apply_item(item) == count > 0
        assert np.array_equal(guarded.words, wanted)
        assert guarded.intact()


@pytest.mark.parametrize("isa", ALL)
def test_planes_that_are_strided_views_are_read_right(isa):
    item = item_of(1)
    spread = tuple(np.repeat(plane, 2)[::2] for plane in item.value_planes)
    words, wanted = np.zeros(60, np.uint16), np.zeros(60, np.uint16)
    kernels.apply_item(wanted, COLUMNS, item, isa=isa)
    BoundPieces(words, COLUMNS, SPEC, isa=isa).apply_item(dataclasses.replace(item, value_planes=spread))
    assert np.array_equal(words, wanted)


@pytest.mark.parametrize("isa", ALL)
def test_invalid_items_change_nothing(isa):
    words = np.zeros(60, np.uint16)
    bound = BoundPieces(words, COLUMNS, SPEC, isa=isa)
    item = item_of(2)
    late = np.full_like(item.location_planes[0], 200)
    for wrong in (
        dataclasses.replace(item, spec=TensorSpec("v", "BF16", (6, 8))),
        dataclasses.replace(item, count=item.count - 1),
        dataclasses.replace(item, location_planes=(late,)),
    ):
        with pytest.raises(PayloadInvalidError):
            bound.apply_item(wrong)
    assert not words.any()


@pytest.mark.parametrize(
    ("words", "pieces"),
    [
        (np.zeros(10, np.uint16), COLUMNS),
        (np.zeros(60, np.uint32), COLUMNS),
        (np.zeros(60, np.uint16), [Piece(whole((7, 8)), whole((7, 8)))]),
        (np.zeros(60, np.uint16), [Piece(p.canonical, p.storage, Cast.WIDEN) for p in COLUMNS]),
        (np.zeros(60, np.uint16), [Piece(StridedView(0, (2,), (1,)), StridedView(0, (2,), (0,)))]),
        (np.frombuffer(bytes(120), np.uint16), COLUMNS),
    ],
)
def test_pieces_that_do_not_fit_are_refused_when_they_are_bound(words, pieces):
    with pytest.raises(RejectedError):
        BoundPieces(words, pieces, SPEC)


def test_nothing_to_hold_changes_nothing():
    words = np.zeros(4, np.uint16)
    assert BoundPieces(words, [], SPEC).apply_item(item_of(3)) == 0
