"""Location forms, planes and zigzag; and every way in which an item's columns can lie."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import COMPILED, DTYPES, random_words

from deltarefit import kernels
from deltarefit.canonical import WORDS, TensorSpec
from deltarefit.errors import PayloadInvalidError, RejectedError
from deltarefit.kernels import Isa
from deltarefit.kernels.coding import code_locations, gaps_of, join_planes, split_planes, unzigzag, zigzag
from deltarefit.pieces import Piece, whole
from deltarefit.records import CodedItem, DeltaRecords, Encoding, LocationForm

ALL = [Isa.NUMPY, *COMPILED]
SPEC = TensorSpec("t", "BF16", (1000,))


def item(form: LocationForm, count: int, planes: list[list[int]], *, start: int = 0, spec: TensorSpec = SPEC) -> CodedItem:
    values = tuple(np.ones(count, np.uint8) for _ in range(spec.element_nbytes))
    locations = tuple(np.array(plane, np.uint8) for plane in planes)
    return CodedItem(spec, Encoding.OVERWRITE, form, start, count, locations, values)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_zigzag_orders_steps_by_their_length(width):
    steps = np.array([0, -1, 1, -2, 2, -3], np.int64).astype(f"<i{width}").view(WORDS[width])
    assert zigzag(steps).tolist() == [0, 1, 2, 3, 4, 5]
    lowest = np.array([1 << (8 * width - 1)], WORDS[width])
    assert zigzag(lowest).tolist() == [(1 << (8 * width)) - 1]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_zigzag_and_planes_round_trip(width, seed):
    words = random_words(np.random.default_rng(seed), 100, width)
    assert np.array_equal(unzigzag(zigzag(words)), words)
    planes = split_planes(words)
    assert len(planes) == width
    assert np.array_equal(planes[0], (words & WORDS[width].type(255)).astype(np.uint8))
    assert np.array_equal(join_planes(planes), words)


@settings(max_examples=60, deadline=None)
@given(
    gaps=st.lists(st.one_of(st.integers(0, 3), st.integers(250, 260), st.integers(500, 70_000)), min_size=1, max_size=40),
    width=st.sampled_from([1, 2, 4, 8]),
    encoding=st.sampled_from(list(Encoding)),
)
def test_any_records_round_trip(gaps, width, encoding):
    index = np.cumsum(np.array(gaps, np.int64) + 1) - 1
    rng = np.random.default_rng(len(gaps))
    spec = TensorSpec("r", DTYPES[width], (int(index[-1]) + 5,))
    records = DeltaRecords(spec, index, random_words(rng, index.size, width), random_words(rng, index.size, width))
    coded = kernels.code_records(records, encoding)
    assert np.array_equal(kernels.decode_positions(coded), index)
    assert np.array_equal(kernels.decode_values(coded), records.values(encoding))
    for form in LocationForm:
        if form is LocationForm.RUN or (form is LocationForm.WIDE2 and max(gaps) > 65535):
            continue
        other = replace(coded, location_form=form, start=0, location_planes=code_locations(gaps_of(index), form))
        assert np.array_equal(kernels.decode_positions(other), index)
        assert sum(p.size for p in coded.location_planes) <= sum(p.size for p in other.location_planes)


def test_residual_records_become_overwrites_only():
    records = DeltaRecords(SPEC, np.array([3], np.int64), np.array([9], np.uint16), None)
    assert kernels.decode_values(kernels.code_records(records, Encoding.OVERWRITE)).tolist() == [9]
    with pytest.raises(RejectedError, match="old bits"):
        kernels.code_records(records, Encoding.XOR)


@pytest.mark.parametrize("index", [[], [-1], [1000], [3, 3], [4, 3]])
def test_records_out_of_place_are_refused(index):
    bits = np.zeros(len(index), np.uint16)
    with pytest.raises(RejectedError, match="records of t"):
        kernels.code_records(DeltaRecords(SPEC, np.array(index, np.int64), bits, None), Encoding.OVERWRITE)


def test_records_of_the_wrong_width_are_refused():
    with pytest.raises(RejectedError, match="expected words"):
        kernels.code_records(DeltaRecords(SPEC, np.array([3], np.int64), np.zeros(1, np.uint32), None), Encoding.OVERWRITE)


BAD = {
    "no elements": item(LocationForm.RUN, 0, []),
    "more elements than the tensor": item(LocationForm.RUN, 1001, []),
    "run past the end": item(LocationForm.RUN, 10, [], start=991),
    "run before the start": item(LocationForm.RUN, 10, [], start=-1),
    "run with locations": item(LocationForm.RUN, 2, [[0, 0]]),
    "gaps with a start": item(LocationForm.GAPS, 2, [[1, 1]], start=4),
    "gaps without a plane": item(LocationForm.GAPS, 2, []),
    "gaps with two planes": item(LocationForm.GAPS, 2, [[1, 1], [0, 0]]),
    "too few gap bytes": item(LocationForm.GAPS, 3, [[1, 1]]),
    "too many gaps": item(LocationForm.GAPS, 2, [[1, 1, 1]]),
    "too few gaps among escapes": item(LocationForm.GAPS, 2, [[255, 1]]),
    "ends in an escape": item(LocationForm.GAPS, 2, [[1, 1, 255]]),
    "gaps leave the tensor": item(LocationForm.GAPS, 2, [[255, 255, 255, 234, 0]]),
    "one gap too far": item(LocationForm.GAPS, 1, [[255, 255, 255, 235]]),
    "one wide plane missing": item(LocationForm.WIDE2, 2, [[1, 1]]),
    "wide planes too short": item(LocationForm.WIDE2, 2, [[1], [0]]),
    "wide planes too long": item(LocationForm.WIDE2, 2, [[1, 1, 1], [0, 0, 0]]),
    "wide gaps leave the tensor": item(LocationForm.WIDE2, 2, [[0xE7, 0], [3, 0]]),
    "wide gap of 2^64 - 1": item(LocationForm.WIDE8, 2, [[1, 255]] + [[0, 255]] * 7),
    "wide gaps that wrap to small": item(LocationForm.WIDE8, 2, [[1, 0]] + [[0, 0]] * 6 + [[0, 0x80]]),
    "wide gap of 2^32": item(LocationForm.WIDE8, 2, [[1, 0]] + [[0, 0]] * 3 + [[0, 1]] + [[0, 0]] * 3),
    "values too short": replace(item(LocationForm.RUN, 4, []), value_planes=(np.ones(3, np.uint8), np.ones(4, np.uint8))),
    "a value plane missing": replace(item(LocationForm.RUN, 4, []), value_planes=(np.ones(4, np.uint8),)),
    "planes of words": replace(item(LocationForm.RUN, 4, []), value_planes=(np.ones(4, np.uint16), np.ones(4, np.uint16))),
}


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("name", BAD)
def test_lying_columns_are_refused_before_anything_is_written(name, isa):
    storage = np.zeros(1000, np.uint16)
    with pytest.raises(PayloadInvalidError, match=r"item of t BF16\[1000\]"):
        kernels.apply_item(storage, (Piece(whole((1000,)), whole((1000,))),), BAD[name], isa=isa)
    assert not storage.any()


@pytest.mark.parametrize("name", [n for n in BAD if "value" not in n and "words" not in n])
def test_positions_of_lying_columns_are_refused(name):
    with pytest.raises(PayloadInvalidError, match="item of t"):
        kernels.decode_positions(BAD[name])


@pytest.mark.parametrize("name", ["values too short", "a value plane missing", "planes of words"])
def test_values_of_lying_columns_are_refused(name):
    with pytest.raises(PayloadInvalidError, match="item of t"):
        kernels.decode_values(BAD[name])


@pytest.mark.parametrize("isa", ALL)
@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(list(LocationForm)),
    planes=st.lists(st.binary(max_size=12), max_size=8),
    count=st.integers(0, 12),
    start=st.integers(-2, 1002),
)
def test_arbitrary_columns_never_write_outside(isa, form, planes, count, start):
    lied = item(form, count, [list(plane) for plane in planes], start=start)
    storage = np.zeros(1000, np.uint16)
    try:
        changed = kernels.apply_item(storage, (Piece(whole((1000,)), whole((1000,))),), lied, isa=isa)
    except PayloadInvalidError:
        changed = 0
    assert np.count_nonzero(storage) == changed


@settings(max_examples=60, deadline=None)
@given(plane=st.lists(st.one_of(st.just(255), st.integers(0, 255)), max_size=700), step=st.sampled_from([1, 2]))
def test_totals_of_a_plane_agree(plane, step):
    bytes_ = np.array(plane, np.uint8)[::step]
    expected = (sum(bytes_.tolist()), bytes_.tolist().count(255))
    assert [kernels.plane_totals(bytes_, isa=isa) for isa in ALL] == [expected] * len(ALL)


def test_totals_of_a_long_plane_do_not_overflow():
    plane = np.full(2**25 + 3, 254, np.uint8)
    plane[-1] = 255
    assert {kernels.plane_totals(plane, isa=isa) for isa in ALL} == {(254 * (2**25 + 2) + 255, 1)}


def test_totals_are_of_flat_bytes():
    with pytest.raises(RejectedError, match="expected flat bytes, got uint16"):
        kernels.plane_totals(np.zeros(3, np.uint16))
