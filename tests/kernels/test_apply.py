"""Apply changes exactly the named elements, through any pieces, on every instruction set; nothing else is written."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import COMPILED, Guarded, box_pieces, contiguous, flat_indices, random_words, shards, storage_indices

from deltarefit import kernels
from deltarefit.errors import PayloadInvalidError
from deltarefit.kernels import Isa
from deltarefit.kernels.coding import code_locations, gaps_of
from deltarefit.pieces import Cast, Piece, StridedView, whole
from deltarefit.records import DeltaRecords, Encoding, LocationForm

ALL = [Isa.NUMPY, *COMPILED]


def expected_storage(storage, pieces, positions, values, encoding, cast):
    """By plain enumeration, one element after the other."""
    out = storage.copy()
    at = dict(zip(flat_indices(pieces).tolist(), storage_indices(pieces).tolist(), strict=True))
    modulus = 1 << (8 * storage.itemsize)
    changed = 0
    for position, value in zip(positions.tolist(), values.tolist(), strict=True):
        if position not in at:
            continue
        changed += 1
        place, bits = at[position], value << (16 if cast is Cast.WIDEN else 0)
        old = int(out[place])
        new = {Encoding.OVERWRITE: bits, Encoding.XOR: old ^ bits, Encoding.DIFFERENCE: (old + bits) % modulus}[encoding]
        out[place] = new
    return out, changed


def records_of(rng, spec, density):
    count = spec.num_elements
    positions = np.flatnonzero(rng.random(count) < density) if density > 0 else rng.integers(0, count, 1)
    new = random_words(rng, positions.size, spec.element_nbytes)
    old = random_words(rng, positions.size, spec.element_nbytes)
    return DeltaRecords(spec, positions.astype(np.int64), new, old)


def check(rng, shard, storage_width, density, encoding, cast):
    records = records_of(rng, shard.spec, density)
    values = records.values(encoding)
    storage = random_words(rng, shard.storage_elements, storage_width)
    expected, changed = expected_storage(storage, shard.pieces, records.flat_index, values, encoding, cast)
    for isa in ALL:
        guarded = Guarded.of(storage, 3)
        assert kernels.apply(guarded.words, shard.pieces, records.flat_index, values, encoding, isa=isa) == changed
        assert np.array_equal(guarded.words, expected)
        assert guarded.intact()
        if not records.flat_index.size:
            continue
        item = kernels.code_records(records, encoding)
        guarded = Guarded.of(storage, 1)
        assert kernels.apply_item(guarded.words, shard.pieces, item, isa=isa) == changed
        assert np.array_equal(guarded.words, expected)
        assert guarded.intact()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("encoding", list(Encoding))
def test_shards_of_every_shape(width, encoding):
    rng = np.random.default_rng(width)
    for shard in shards(width):
        if shard.spec.num_elements > 60_000:
            continue
        for density in (-1.0, 0.001, 0.03, 1.0):
            check(rng, shard, width, density, encoding, Cast.SAME)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_random_boxes(width, seed, data):
    rng = np.random.default_rng(seed)
    shape = tuple(data.draw(st.lists(st.integers(1, 18), min_size=1, max_size=3)))
    cast = data.draw(st.sampled_from([Cast.SAME, Cast.WIDEN])) if width == 4 else Cast.SAME
    shard, _ = box_pieces(rng, shape, width, cast)
    density = data.draw(st.sampled_from([0.001, 0.02, 0.5, 1.0]))
    check(rng, shard, width, density, data.draw(st.sampled_from(list(Encoding))), cast)


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("density", [0.00002, 0.001, 0.004, 0.03, 0.6, 1.0])
def test_long_items_in_every_form(isa, density):
    """More elements than one batch of the decoder, with escapes inside and at the edges of its vectors."""
    rng = np.random.default_rng(int(density * 1e6))
    shard = contiguous(2, 300_000)
    old = random_words(rng, shard.spec.num_elements, 2)
    new = old.copy()
    chosen = rng.random(old.size) < density
    chosen[:: 255 * 9] |= density > 0.0005
    new[chosen] += np.uint16(rng.integers(1, 100))
    for encoding in Encoding:
        item = kernels.scan(shard.spec, new, old, shard.pieces, encoding).item
        gaps = gaps_of(kernels.decode_positions(item))
        for form in {item.location_form, LocationForm.GAPS, LocationForm.SHORT_GAPS, LocationForm.WIDE4}:
            got = old.copy()
            coded = replace(item, location_form=form, location_planes=code_locations(gaps, form))
            assert kernels.apply_item(got, shard.pieces, coded, isa=isa) == item.count
            assert np.array_equal(got, new)


def gaps_with_escapes(rng, count):
    """Short gaps, and around the borders of vectors and batches such as take none, one or several escapes of either form."""
    gaps = rng.integers(0, 60, count)
    for border in (0, 16, 64, 256, 512, 768, count):
        around = border + np.arange(-2, 3)
        around = around[(around > 0) & (around < count)]
        gaps[around] = rng.choice([0, 84, 85, 86, 170, 254, 255, 256, 510, 1020], around.size)
    gaps[0] = 0
    return gaps


def runs(cast, spans):
    """Pieces for these spans of a tensor, one after the other in a storage that starts with other things."""
    start = spans[0][0] - 11
    views = [(StridedView(low, (high - low,), (1,)), StridedView(low - start, (high - low,), (1,))) for low, high in spans]
    return tuple(Piece(canonical, stored, cast) for canonical, stored in views)


@pytest.mark.parametrize("isa", COMPILED)
@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize(("width", "cast"), [(1, Cast.SAME), (2, Cast.SAME), (2, Cast.WIDEN), (4, Cast.SAME), (8, Cast.SAME)])
def test_one_contiguous_run_is_as_several_pieces(isa, encoding, width, cast):
    """The path of storage that holds one run, against the general one and the twin: batches full, short, alone and cut."""
    rng = np.random.default_rng(width)
    for count in (1, 9, 255, 256, 257, 511, 512, 520, 777, 2600):
        gaps = gaps_with_escapes(rng, count)
        positions = 5 + np.cumsum(gaps + 1) - 1
        elements = int(positions[-1]) + 1 + int(rng.integers(0, 2)) * 7
        spec = replace(contiguous(width, 1).spec, shape=(elements,))
        values = random_words(rng, count, width)
        item = kernels.code_records(DeltaRecords(spec, positions, values, np.zeros_like(values)), encoding)
        storage = random_words(rng, elements + 20, width if cast is Cast.SAME else 4)
        for first, past in ((0, elements), sorted(rng.choice(elements + 1, 2, replace=False).tolist())):
            cut = int(rng.integers(first, past))
            one, two = runs(cast, [(first, past)]), runs(cast, [(first, cut), (cut, past)])
            for form in (
                LocationForm.GAPS,
                LocationForm.SHORT_GAPS,
                LocationForm.WIDE2,
                LocationForm.WIDE4,
                LocationForm.WIDE8,
            ):
                coded = replace(item, location_form=form, location_planes=code_locations(gaps, form))
                expected = storage.copy()
                changed = kernels.apply_item(expected, one, coded, isa=Isa.NUMPY)
                assert changed == np.count_nonzero((positions >= first) & (positions < past))
                for pieces in (one, two):
                    guarded = Guarded.of(storage[: past - first + 11], 1)
                    assert kernels.apply_item(guarded.words, pieces, coded, isa=isa) == changed
                    assert np.array_equal(guarded.words, expected[: past - first + 11])
                    assert guarded.intact()


@pytest.mark.parametrize("isa", ALL)
def test_widened_elements_keep_their_value(isa):
    """A bfloat16 difference lands in the upper half of a float, carries included."""
    storage = np.array([0x3F80_0000, 0xFFFF_0000, 0x0000_0000], np.uint32)
    pieces = (Piece(whole((3,)), whole((3,)), Cast.WIDEN),)
    values = np.array([1, 2, 0xFFFF], np.uint16)
    assert kernels.apply(storage, pieces, np.arange(3, dtype=np.int64), values, Encoding.DIFFERENCE, isa=isa) == 3
    assert storage.tolist() == [0x3F81_0000, 0x0001_0000, 0xFFFF_0000]


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("positions", [[3, 2], [2, 2], [-1, 4], [5, 5, 6], [*range(2000), 1999]])
def test_positions_out_of_order_change_nothing(isa, positions):
    storage = np.zeros(3000, np.uint16)
    values = np.ones(len(positions), np.uint16)
    with pytest.raises(PayloadInvalidError, match="ascending"):
        kernels.apply(
            storage, (Piece(whole((3000,)), whole((3000,))),), np.array(positions, np.int64), values, Encoding.XOR, isa=isa
        )
    assert not storage.any()


@pytest.mark.parametrize("isa", ALL)
def test_empty_pieces_and_empty_positions(isa):
    storage = np.zeros(4, np.uint16)
    none = np.empty(0, np.int64), np.empty(0, np.uint16)
    assert kernels.apply(storage, (Piece(whole((4,)), whole((4,))),), *none, Encoding.XOR, isa=isa) == 0
    one = np.zeros(1, np.int64), np.ones(1, np.uint16)
    assert kernels.apply(storage, (), *one, Encoding.XOR, isa=isa) == 0
    assert kernels.apply(storage, (Piece(whole((0,)), whole((0,))),), *one, Encoding.XOR, isa=isa) == 0
    assert not storage.any()


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_gather_and_commit(isa, width):
    rng = np.random.default_rng(width)
    for shard in shards(width):
        storage = random_words(rng, shard.storage_elements, width)
        held = storage[storage_indices(shard.pieces)]
        assert np.array_equal(kernels.gather(storage, shard.pieces, isa=isa), held)
        baseline = Guarded.of(np.zeros_like(held), 5)
        for _ in range(2):
            kernels.commit_many([(baseline.words, storage, kernels.PieceTable(shard.pieces), "")], isa=isa)
            assert np.array_equal(baseline.words, held)
        assert baseline.intact()
