"""Scans of many shards together give what each scan gives by itself, whatever memory they share."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import COMPILED, DTYPES, Shard, box_pieces, changed_words, contiguous, random_words, shards, storage_indices
from test_scan import ALL, assert_same

from deltarefit import kernels
from deltarefit.canonical import TensorSpec
from deltarefit.errors import RejectedError
from deltarefit.kernels import Isa, PieceTable, ScanJob, scan_batch, scan_many
from deltarefit.pieces import Cast, Piece, StridedView, merge_pieces, whole
from deltarefit.records import Encoding, LocationForm


@pytest.fixture(params=["as it is", "small memory", "one at a time", "two in a call"])
def memory(request, monkeypatch):
    """Output memory that is full all the time, shards that are large, calls that are full."""
    if request.param == "small memory":
        monkeypatch.setattr(scan_batch, "FIRST_CAPACITY", 7)
        monkeypatch.setattr(scan_batch, "SPARE", 0.1)
    if request.param == "one at a time":
        monkeypatch.setattr(scan_batch, "_LARGE_ELEMENTS", 1)
    if request.param == "two in a call":
        monkeypatch.setattr(scan_batch, "_MOST_ELEMENTS", 10_000)


def job(shard: Shard, old: np.ndarray, new: np.ndarray, encoding: Encoding) -> ScanJob:
    return ScanJob(shard.spec, new, kernels.gather(old, shard.pieces), PieceTable(shard.pieces), encoding)


def random_job(rng: np.random.Generator, shard: Shard, density: float, encoding: Encoding) -> ScanJob:
    old = random_words(rng, shard.storage_elements, shard.spec.element_nbytes)
    new = old.copy()
    held = storage_indices(shard.pieces)
    new[held] = changed_words(rng, old[held], density)
    return job(shard, old, new, encoding)


def assert_as_each(jobs, isa):
    for found, one in zip(scan_many(jobs, isa=isa), jobs, strict=True):
        assert_same(found, kernels.scan(*one, isa=Isa.NUMPY))


@pytest.mark.parametrize("isa", ALL)
def test_shards_of_every_shape_width_density_and_encoding(isa, memory):
    rng = np.random.default_rng(11)
    kinds = itertools.cycle(itertools.product([0.0, 0.03, 0.001, 0.3, -1.0, 1.0, 0.05], Encoding))
    jobs = [
        random_job(rng, shard, density, encoding)
        for width in (2, 1, 2, 4, 8)
        for shard, (density, encoding) in zip(shards(width), kinds, strict=False)
    ]
    assert_as_each(jobs, isa)


@pytest.mark.parametrize("isa", COMPILED)
@pytest.mark.parametrize("width", [1, 2])
def test_every_location_form_beside_every_other(isa, width, memory):
    """Among them gaps that have to be widened on the way, and shards that are smaller whole."""
    size = 1_400_000 if width == 1 else 300_000
    shard = contiguous(width, size)
    changes = {
        LocationForm.SHORT_GAPS: np.r_[0, size // 3 : size : 2],
        LocationForm.GAPS: np.r_[0:100_000:60],
        LocationForm.WIDE2: np.r_[0:size:5000],
        LocationForm.WIDE4: np.array([0, 70_000, size - 1]),
        LocationForm.RUN: np.r_[100:4_000],
        "too many escapes for SHORT_GAPS": np.r_[0:40_000, size - 1],
        "whole": np.r_[0 : size * 19 // 20, size - 1],
        "none": np.r_[0:0],
    }
    old = random_words(np.random.default_rng(3), size, width)
    jobs, forms = [], []
    for form, places in itertools.islice(itertools.cycle(changes.items()), 10):
        new = old.copy()
        new[places] += new.dtype.type(1)
        jobs.append(job(shard, old, new, Encoding.DIFFERENCE))
        forms.append(form)
    found = scan_many(jobs, isa=isa)
    for result, one, form in zip(found, jobs, forms, strict=True):
        assert_same(result, kernels.scan(*one, isa=isa))
        if isinstance(form, LocationForm):
            assert result.item.location_form is form
        if form == "too many escapes for SHORT_GAPS":
            assert result.item.location_form is LocationForm.GAPS
    assert [result.item for result, form in zip(found, forms, strict=True) if form == "none"] == [None]
    assert {result.item.count for result, form in zip(found, forms, strict=True) if form == "whole"} == {size}


@pytest.mark.parametrize("isa", COMPILED)
def test_gaps_that_fill_the_memory_and_are_longer_as_short_gaps(isa, monkeypatch):
    places = np.cumsum(np.tile([1, 1, 101], 3_000))
    monkeypatch.setattr(scan_batch, "FIRST_CAPACITY", places.size)
    shard = contiguous(2, int(places[-1]) + 1)
    old = random_words(np.random.default_rng(4), int(places[-1]) + 1, 2)
    new = old.copy()
    new[places] += np.uint16(1)
    jobs = [job(shard, old, new, Encoding.DIFFERENCE)] * 2
    for result in scan_many(jobs, isa=isa):
        assert result.item.location_form is LocationForm.SHORT_GAPS
        assert_same(result, kernels.scan(*jobs[0], isa=Isa.NUMPY))


@pytest.mark.parametrize("isa", COMPILED)
def test_gaps_that_are_widened_and_more_than_the_scratch_memory_holds(isa):
    """A column of a matrix: each gap takes an escape, and two of them take two."""
    rows, columns = 150_000, 256
    column = Piece(StridedView(0, (rows, 1), (columns, 1)), whole((rows, 1)))
    shard = Shard(TensorSpec("column", DTYPES[8], (rows, columns)), merge_pieces([column])[0], rows)
    old = random_words(np.random.default_rng(8), rows, 8)
    new = old + np.uint64(1)
    new[[50, 70]] = old[[50, 70]]
    one = job(shard, old, new, Encoding.DIFFERENCE)
    (found,) = scan_many([one], isa=isa)
    assert found.item.location_form is LocationForm.WIDE2
    assert_same(found, kernels.scan(*one, isa=Isa.NUMPY))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_random_boxes_together(seed, data):
    rng = np.random.default_rng(seed)
    jobs = []
    for _ in range(data.draw(st.integers(0, 6))):
        shape = tuple(data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=3)))
        shard, _ = box_pieces(rng, shape, data.draw(st.sampled_from([1, 2, 2, 4, 8])), Cast.SAME)
        for group in merge_pieces(shard.pieces):
            density = data.draw(st.sampled_from([0.0, -1.0, 0.01, 0.1, 0.5, 1.0]))
            encoding = data.draw(st.sampled_from(list(Encoding)))
            jobs.append(random_job(rng, Shard(shard.spec, group, shard.storage_elements), density, encoding))
    for isa in ALL:
        assert_as_each(jobs, isa)


def test_nothing_and_shards_of_no_elements():
    assert scan_many([]) == []
    empty = contiguous(2, 5)
    none = ScanJob(empty.spec, np.zeros(5, "<u2"), np.zeros(0, "<u2"), PieceTable(()), Encoding.XOR)
    full = ScanJob(empty.spec, np.ones(5, "<u2"), np.zeros(5, "<u2"), PieceTable(empty.pieces), Encoding.XOR)
    for isa in ALL:
        found = scan_many([none, full, none], isa=isa)
        assert [None if result.item is None else result.item.count for result in found] == [None, 5, None]


def test_a_job_that_does_not_fit_is_refused_before_any_runs():
    good = contiguous(2, 5)
    table = PieceTable(good.pieces)
    fits = ScanJob(good.spec, np.ones(5, "<u2"), np.zeros(5, "<u2"), table, Encoding.XOR)
    for wrong, said in (
        (fits._replace(baseline=np.zeros(4, "<u2")), "expected a baseline of 5 words, got 4"),
        (fits._replace(candidate=np.zeros(5, "<u4")), "words in the candidate, got uint32"),
        (fits._replace(candidate=np.zeros(4, "<u2")), "reaches element 4"),
        (fits._replace(table=PieceTable([Piece(whole((5,)), whole((5,)), Cast.WIDEN)])), "keep the stored bits"),
    ):
        with pytest.raises(RejectedError, match=rf"scan of whole BF16\[5\].*{said}"):
            scan_many([fits, wrong])


@pytest.mark.skipif(not COMPILED, reason="the kernels were not compiled")
@pytest.mark.parametrize("density", [0.03, 0.2])
def test_little_more_memory_than_what_is_returned(density):
    rng = np.random.default_rng(5)
    jobs = [random_job(rng, contiguous(2, 1_000_000), density, Encoding.DIFFERENCE)] * 40
    scan_many(jobs[:1])
    tracemalloc.start()
    try:
        found = scan_many(jobs)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    items = [result.item for result in found]
    outputs = sum(plane.nbytes for item in items for plane in (*item.location_planes, *item.value_planes))
    assert held < 1.02 * outputs + 2**16
    assert peak < 1.1 * outputs + 2**19  # the scratch of one chunk and the first output memory, however much is scanned


@pytest.mark.skipif(not COMPILED, reason="the kernels were not compiled")
def test_little_more_memory_where_the_last_shard_is_the_only_one_that_changed():
    """So that nothing predicts how much it needs."""
    rng = np.random.default_rng(6)
    jobs = [random_job(rng, contiguous(2, 4_000_000), density, Encoding.DIFFERENCE) for density in (0.0, 0.0, 0.0, 0.4)]
    tracemalloc.start()
    try:
        item = scan_many(jobs)[-1].item
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    outputs = sum(plane.nbytes for plane in (*item.location_planes, *item.value_planes))
    assert peak < 1.2 * outputs + 2**19
