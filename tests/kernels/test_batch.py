"""Many tensors in one call give what one call each gives, on any number of threads and every instruction set."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from kernel_cases import COMPILED

from deltarefit import kernels
from deltarefit.canonical import TensorSpec
from deltarefit.errors import PayloadInvalidError, RejectedError
from deltarefit.kernels import BoundDigest, BoundPieces, Isa, PreparedApply, batch, code_records, digest_many
from deltarefit.pieces import Cast, Piece, StridedView
from deltarefit.records import DeltaRecords, Encoding

ROWS, COLUMNS, TENSORS = 37, 8, 9
SIZE = ROWS * COLUMNS * TENSORS
ALL = [Isa.NUMPY, *COMPILED]


@pytest.fixture(autouse=True)
def _small_shares(monkeypatch):
    monkeypatch.setattr(batch, "_CHANGES", 1)
    monkeypatch.setattr(batch, "_DIGESTED", 1)


def interleaved(cast=Cast.SAME):
    """Pieces of tensors whose elements lie beside each other in one storage: place p belongs to tensor p % TENSORS."""
    flat = StridedView(0, (ROWS * COLUMNS,), (1,))
    return [(Piece(flat, StridedView(number, (ROWS * COLUMNS,), (TENSORS,)), cast),) for number in range(TENSORS)]


def bound_to(words, isa=None):
    found = []
    for number, pieces in enumerate(interleaved()):
        spec = TensorSpec(f"t{number}", "BF16" if words.itemsize == 2 else "F8_E4M3", (ROWS * COLUMNS,))
        found.append((spec, BoundPieces(words, pieces, spec, isa=isa)))
    return found


def random_items(spec, encoding, dtype, rng):
    """Two items of one tensor, of different elements."""
    halves = np.array_split(np.flatnonzero(rng.random(spec.num_elements) < 0.4), 2)
    return [
        code_records(DeltaRecords(spec, places, *(rng.integers(0, 256, places.size).astype(dtype) for _ in "no")), encoding)
        for places in halves
    ]


def prepared(work):
    return PreparedApply([pieces for pieces, _ in work], [item for _, item in work])


def random_work(words, encoding, isa=None):
    rng = np.random.default_rng(5)
    dtype = words.dtype.str
    return [(pieces, item) for spec, pieces in bound_to(words, isa) for item in random_items(spec, encoding, dtype, rng)]


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("dtype", ["<u2", "u1"])
@pytest.mark.parametrize("encoding", list(Encoding))
def test_threads_write_what_one_thread_writes(dtype, encoding, isa):
    start = np.random.default_rng(1).integers(0, 256, SIZE).astype(dtype)
    together, alone = start.copy(), start.copy()
    work = random_work(together, encoding, isa)
    assert prepared(work).run(num_threads=3) == sum(item.count for _, item in work)
    for pieces, item in random_work(alone, encoding, Isa.NUMPY):
        pieces.apply_item(item)
    assert np.array_equal(together, alone)
    assert not np.array_equal(together, start)


def test_shares_are_worked_on_by_threads_and_cover_everything_once(monkeypatch):
    done = []
    batch._in_shares([3] * 50, lambda first, last: done.append((first, last, threading.current_thread().name)), 6, 3)
    assert {name[:16] for _, _, name in done} == {"deltarefit-share"}
    assert sorted(place for first, last, _ in done for place in range(first, last)) == list(range(50))
    assert 12 <= len(done) <= 13
    done.clear()
    for threads, weights in ((1, [3] * 50), (3, [1]), (3, [])):
        batch._in_shares(weights, lambda first, last: done.append((first, last, threading.current_thread().name)), 6, threads)
    assert done == [(0, length, threading.current_thread().name) for length in (50, 1, 0)]


def test_what_does_not_fit_is_refused_before_anything_is_written():
    words = np.zeros(SIZE, "<u2")
    work = random_work(words, Encoding.OVERWRITE)
    work[-1] = (work[-1][0], work[0][1])  # of another tensor
    with pytest.raises(PayloadInvalidError, match="these pieces are bound to t8"):
        prepared(work).run(num_threads=3)
    assert not words.any()


def test_locations_that_leave_their_tensor_write_nothing_of_it_and_no_thread_goes_on():
    words = np.zeros(SIZE, "<u2")
    work = random_work(words, Encoding.OVERWRITE)
    pieces, item = work[4]
    planes = tuple(np.full_like(plane, 200) for plane in item.location_planes)
    work[4] = (pieces, type(item)(**{name: getattr(item, name) for name in item.__slots__} | {"location_planes": planes}))
    with pytest.raises(PayloadInvalidError, match="t2"):
        prepared(work).run(num_threads=3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("deltarefit-share")]
    alone = np.zeros(SIZE, "<u2")
    for number, (bound, one) in enumerate(random_work(alone, Encoding.OVERWRITE)):
        if number != 4:
            bound.apply_item(one)
    assert np.array_equal(words, alone)


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize(("dtype", "cast"), [("u1", Cast.SAME), ("<u2", Cast.SAME), ("<u4", Cast.SAME), ("<u4", Cast.WIDEN)])
def test_digests_of_many_are_those_of_each(dtype, cast, isa):
    words = np.random.default_rng(2).integers(0, 256, SIZE).astype(dtype)
    if cast is Cast.WIDEN:
        words <<= np.uint32(16)
    every = [*interleaved(cast), (), (Piece(*(StridedView(0, (SIZE,), (1,)) for _ in "cs"), cast),)]
    expected = [kernels.digest(words, pieces, isa=Isa.NUMPY) for pieces in every]
    assert digest_many([BoundDigest(words, pieces, isa=isa) for pieces in every], num_threads=3) == expected
    assert digest_many([BoundDigest(words, pieces, isa=isa) for pieces in every], num_threads=1) == expected
    assert digest_many([]) == []


@pytest.mark.parametrize("isa", ALL)
def test_a_widened_element_with_low_bits_has_no_digest_and_the_others_have_theirs(isa):
    words = np.arange(SIZE, dtype="<u4") << np.uint32(16)
    words[4] |= 1
    found = digest_many([BoundDigest(words, pieces, isa=isa) for pieces in interleaved(Cast.WIDEN)], num_threads=2)
    assert [place for place, digest in enumerate(found) if digest is None] == [4]


def test_pieces_outside_their_words_are_refused_when_they_are_bound():
    with pytest.raises(RejectedError):
        BoundDigest(np.zeros(3, "<u2"), interleaved()[0])
