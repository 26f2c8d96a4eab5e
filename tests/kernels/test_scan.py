"""The scan finds exactly the changed elements, on every instruction set, and says the same bytes as its numpy twin."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    COMPILED,
    Guarded,
    Shard,
    box_pieces,
    changed_words,
    contiguous,
    flat_indices,
    random_words,
    shards,
    special_words,
    storage_indices,
)

from deltarefit import kernels
from deltarefit.canonical import TensorDigest, TensorSpec
from deltarefit.kernels import Isa
from deltarefit.pieces import Cast, Piece, StridedView, merge_pieces, whole
from deltarefit.records import Encoding, LocationForm, ScanResult

DENSITIES = [0.0, -1.0, 0.0001, 0.01, 0.5, 1.0]
ALL = [Isa.NUMPY, *COMPILED]


def storages(rng: np.random.Generator, shard: Shard, density: float):
    """Old and new storage of a shard; they differ inside its pieces only."""
    width = shard.spec.element_nbytes
    old = special_words(rng, shard.storage_elements, width)
    new = old.copy()
    held = storage_indices(shard.pieces)
    new[held] = changed_words(rng, old[held], density)
    return old, new, held


def assert_same(left: ScanResult, right: ScanResult):
    assert left.digest_change == right.digest_change
    assert (left.item is None) == (right.item is None)
    if left.item is None:
        return
    for name in ("spec", "encoding", "location_form", "start", "count"):
        assert getattr(left.item, name) == getattr(right.item, name), name
    for name in ("location_planes", "value_planes"):
        mine, other = getattr(left.item, name), getattr(right.item, name)
        assert len(mine) == len(other), name
        for number, (a, b) in enumerate(zip(mine, other, strict=True)):
            assert a.dtype == b.dtype == np.uint8
            assert np.array_equal(a, b), f"{name}[{number}]"


def assert_true(result: ScanResult, shard: Shard, old, new, held, encoding: Encoding):
    """Against plain enumeration: positions, values and digest."""
    flat = flat_indices(shard.pieces)
    changed = np.flatnonzero(old[held] != new[held])
    before, after = (kernels.digest_records(flat, words[held], isa=Isa.NUMPY) for words in (old, new))
    assert before + result.digest_change == after
    if not changed.size:
        assert result.item is None
        return
    positions = kernels.decode_positions(result.item)
    if result.item.count == held.size:
        changed = np.arange(held.size)  # sent dense
    assert np.array_equal(positions, flat[changed])
    a, b = old[held][changed], new[held][changed]
    expected = {Encoding.OVERWRITE: b, Encoding.XOR: a ^ b, Encoding.DIFFERENCE: b - a}[encoding]
    assert np.array_equal(kernels.decode_values(result.item), expected)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("density", DENSITIES)
def test_every_isa_finds_the_same_and_the_truth(width, density):
    rng = np.random.default_rng(width * 100 + int(density * 10))
    for shard in shards(width):
        old, new, held = storages(rng, shard, density)
        baseline = kernels.gather(old, shard.pieces, isa=Isa.NUMPY)
        for encoding in Encoding:
            twin = kernels.scan(shard.spec, new, baseline, shard.pieces, encoding, isa=Isa.NUMPY)
            assert_true(twin, shard, old, new, held, encoding)
            for isa in COMPILED:
                assert_same(kernels.scan(shard.spec, new, baseline, shard.pieces, encoding, isa=isa), twin)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("isa", ALL)
def test_everything_emits_all_elements(width, isa):
    rng = np.random.default_rng(width)
    for shard in shards(width):
        old, new, held = storages(rng, shard, 0.1)
        baseline = kernels.gather(old, shard.pieces)
        result = kernels.scan(shard.spec, new, baseline, shard.pieces, Encoding.OVERWRITE, everything=True, isa=isa)
        assert np.array_equal(kernels.decode_positions(result.item), flat_indices(shard.pieces))
        assert np.array_equal(kernels.decode_values(result.item), new[held])
        flat = flat_indices(shard.pieces)
        assert kernels.digest_records(flat, old[held]) + result.digest_change == kernels.digest_records(flat, new[held])


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_random_boxes(width, seed, data):
    rng = np.random.default_rng(seed)
    shape = tuple(data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=3)))
    shard, _ = box_pieces(rng, shape, width, Cast.SAME)
    density = data.draw(st.sampled_from(DENSITIES))
    encoding = data.draw(st.sampled_from(list(Encoding)))
    everything = data.draw(st.booleans())
    for group in merge_pieces(shard.pieces):
        part = Shard(shard.spec, group, shard.storage_elements)
        old, new, held = storages(rng, part, density)
        baseline = kernels.gather(old, group)
        assert np.array_equal(baseline, old[held])
        twin = kernels.scan(part.spec, new, baseline, group, encoding, everything=everything, isa=Isa.NUMPY)
        if not everything:
            assert_true(twin, part, old, new, held, encoding)
        for isa in COMPILED:
            assert_same(kernels.scan(part.spec, new, baseline, group, encoding, everything=everything, isa=isa), twin)


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("misaligned_by", [0, 1, 2, 5])
def test_any_start_and_nothing_written(isa, width, misaligned_by):
    rng = np.random.default_rng(misaligned_by)
    for count in (1, 31, 64, 65, 4097):
        shard = contiguous(width, count)
        old, new, held = storages(rng, shard, 0.05)
        candidate, baseline = Guarded.of(new, misaligned_by), Guarded.of(old, misaligned_by + 2)
        result = kernels.scan(shard.spec, candidate.words, baseline.words, shard.pieces, Encoding.DIFFERENCE, isa=isa)
        assert_true(result, shard, old, new, held, Encoding.DIFFERENCE)
        assert candidate.intact()
        assert baseline.intact()
        assert np.array_equal(candidate.words, new)
        assert np.array_equal(baseline.words, old)


@pytest.mark.parametrize("isa", ALL)
def test_output_grows_past_its_first_room(isa):
    """Sparse at first, dense later: every prediction from the density so far is wrong."""
    rng = np.random.default_rng(3)
    shard = contiguous(2, 1_500_000)
    old = random_words(rng, shard.spec.num_elements, 2)
    new = old.copy()
    steps = np.concatenate([np.arange(0, 500_000, 7), np.arange(500_000, 1_200_000, 2), np.arange(1_200_000, 1_500_000, 900)])
    new[steps] += np.uint16(1)
    result = kernels.scan(shard.spec, new, old, shard.pieces, Encoding.DIFFERENCE, isa=isa)
    assert result.item.location_form is LocationForm.SHORT_GAPS
    assert np.array_equal(kernels.decode_positions(result.item), steps)
    assert result.item.value_planes[0].size == steps.size
    assert (result.item.value_planes[0] == 2).all()


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize(
    ("changed", "form"),
    [
        ([5], LocationForm.RUN),
        (range(100, 4000), LocationForm.RUN),
        ([0, 2], LocationForm.GAPS),
        (range(0, 300_000, 200), LocationForm.GAPS),
        (range(0, 300_000, 700), LocationForm.WIDE2),
        ([0, 70_000, 299_999], LocationForm.WIDE4),
        ([299_995, 299_999], LocationForm.GAPS),
        (range(290_000, 300_000, 200), LocationForm.GAPS),
        ([*range(0, 200_000, 3), 299_999], LocationForm.SHORT_GAPS),
        (range(0, 300_000, 30), LocationForm.SHORT_GAPS),
        (range(0, 300_000, 50), LocationForm.GAPS),
        (range(0, 100_000, 30), LocationForm.GAPS),
        ([*range(0, 3_000, 3), *range(3_000, 300_000, 1_000)], LocationForm.GAPS),
        ([*range(0, 300, 3), *range(3_000, 300_000, 1_000)], LocationForm.WIDE2),
    ],
)
def test_location_form_is_the_smallest(isa, changed, form):
    shard = contiguous(2, 300_000)
    old = np.zeros(300_000, np.uint16)
    new = old.copy()
    new[list(changed)] = 7
    result = kernels.scan(shard.spec, new, old, shard.pieces, Encoding.OVERWRITE, isa=isa)
    assert result.item.location_form is form
    assert result.item.start == changed[0]
    assert np.array_equal(kernels.decode_positions(result.item), list(changed))


@pytest.mark.parametrize("isa", ALL)
def test_gaps_that_were_widened_on_the_way_may_be_short_in_the_end(isa):
    changed = [0, *range(2_200_000, 3_400_000, 2)]
    shard = contiguous(1, 3_400_000)
    old = np.zeros(3_400_000, np.uint8)
    new = old.copy()
    new[changed] = 7
    item = kernels.scan(shard.spec, new, old, shard.pieces, Encoding.OVERWRITE, isa=isa).item
    assert item.location_form is LocationForm.SHORT_GAPS
    assert np.array_equal(kernels.decode_positions(item), changed)


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize(
    ("width", "share", "dense"), [(1, 45, False), (1, 55, True), (2, 60, False), (2, 70, True), (8, 92, True)]
)
def test_dense_where_the_sparse_form_would_be_larger(isa, width, share, dense):
    shard = contiguous(width, 200_000)
    old = np.zeros(200_000, shard.spec.word_dtype)
    new = old.copy()
    new[np.arange(200_000) % 100 < share] = 3
    result = kernels.scan(shard.spec, new, old, shard.pieces, Encoding.DIFFERENCE, isa=isa)
    assert (result.item.location_form is LocationForm.RUN) == dense
    assert result.item.count == (200_000 if dense else 2_000 * share)
    got = old.copy()
    kernels.apply_item(got, shard.pieces, result.item)
    assert np.array_equal(got, new)
    flat = np.arange(200_000, dtype=np.int64)
    assert kernels.digest_records(flat, old) + result.digest_change == kernels.digest_records(flat, new)


def test_consecutive_changes_are_a_run_however_many():
    shard = contiguous(2, 200_000)
    old = np.zeros(200_000, np.uint16)
    new = old.copy()
    new[5_000:] = 9
    for isa in ALL:
        item = kernels.scan(shard.spec, new, old, shard.pieces, Encoding.OVERWRITE, isa=isa).item
        assert (item.location_form, item.start, item.count) == (LocationForm.RUN, 5_000, 195_000)


@pytest.mark.parametrize("isa", ALL)
def test_bits_are_compared_not_values(isa):
    """-0.0 against 0.0 is a change; an equal NaN is none, another NaN payload is one."""
    spec = TensorSpec("bits", "BF16", (4,))
    old = np.array([0x0000, 0x7FC1, 0x7FC1, 0x3F80], np.uint16)
    new = np.array([0x8000, 0x7FC1, 0x7FC2, 0x3F80], np.uint16)
    pieces = (Piece(whole((4,)), whole((4,))),)
    item = kernels.scan(spec, new, old, pieces, Encoding.OVERWRITE, isa=isa).item
    assert kernels.decode_positions(item).tolist() == [0, 2]
    assert kernels.decode_values(item).tolist() == [0x8000, 0x7FC2]


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("shape", [(0,), (3, 0, 4), ()])
def test_empty_and_rank_zero(isa, shape):
    spec = TensorSpec("small", "BF16", shape)
    old, new = np.zeros(spec.num_elements, np.uint16), np.ones(spec.num_elements, np.uint16)
    result = kernels.scan(spec, new, old, (Piece(whole(shape), whole(shape)),), Encoding.XOR, isa=isa)
    if spec.num_elements:
        assert (result.item.location_form, result.item.start, result.item.count) == (LocationForm.RUN, 0, 1)
    else:
        assert result == ScanResult(None, TensorDigest()) or result.item is None
    assert kernels.scan(spec, old, old, (Piece(whole(shape), whole(shape)),), Encoding.XOR, isa=isa).item is None


@pytest.mark.parametrize("isa", ALL)
def test_flat_indices_beyond_32_bits(isa):
    """A shard at the far end of a tensor of 2^40 elements; only the shard is in memory."""
    spec = TensorSpec("huge", "BF16", (2**20, 2**20))
    pieces = (Piece(StridedView(2**40 - 4096, (4096,), (1,)), whole((4096,))),)
    old = np.zeros(4096, np.uint16)
    new = old.copy()
    new[[3, 4000]] = 5
    result = kernels.scan(spec, new, old, pieces, Encoding.DIFFERENCE, isa=isa)
    assert (result.item.location_form, result.item.start) == (LocationForm.WIDE2, 2**40 - 4093)
    assert kernels.decode_positions(result.item).tolist() == [2**40 - 4093, 2**40 - 96]
    got = old.copy()
    assert kernels.apply_item(got, pieces, result.item, isa=isa) == 2
    assert np.array_equal(got, new)
    assert kernels.digest(old, pieces, isa=isa) + result.digest_change == kernels.digest(new, pieces, isa=isa)
