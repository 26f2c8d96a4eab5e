"""A table of items says and does what its items do one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES
from test_scan import ALL

from deltarefit import kernels
from deltarefit.canonical import TensorSpec
from deltarefit.errors import PayloadInvalidError, RejectedError
from deltarefit.kernels import BoundPieces, Isa, ItemRows, ItemTable, PreparedApply
from deltarefit.pieces import contiguous
from deltarefit.records import CodedItem, Encoding, LocationForm

FORMS = list(LocationForm)


def table_of(items: list[CodedItem]) -> ItemTable:
    """Their planes joined kind by kind, as payloads hold them: read-only."""
    locations: dict[LocationForm, list[list[np.ndarray]]] = {}
    values: dict[tuple[Encoding, int], list[list[np.ndarray]]] = {}
    for item in items:
        for parts, kind, planes in (
            (locations, item.location_form, item.location_planes),
            (values, (item.encoding, item.spec.element_nbytes), item.value_planes),
        ):
            for same, plane in zip(parts.setdefault(kind, [[] for _ in planes]), planes, strict=True):
                same.append(plane)
    columns = [
        np.array(column, np.int64)
        for column in (
            [item.encoding for item in items],
            [item.location_form for item in items],
            [item.start for item in items],
            [item.count for item in items],
            [sum(plane.size for plane in item.location_planes) for item in items],
        )
    ]
    joined = [
        {
            kind: tuple(np.frombuffer(b"".join(p.tobytes() for p in parts), np.uint8) for parts in planes)
            for kind, planes in kinds
        }
        for kinds in (locations.items(), values.items())
    ]
    return ItemTable(ItemRows([item.spec for item in items], *columns), *joined)


def plain(item: CodedItem):
    planes = tuple(tuple(plane.tobytes() for plane in planes) for planes in (item.location_planes, item.value_planes))
    return (item.spec, item.encoding, item.location_form, item.start, item.count, *planes)


@st.composite
def any_items(draw):
    """Items of different tensors whose sizes fit. Their locations need not."""
    items = []
    for number in range(draw(st.integers(1, 6))):
        spec = TensorSpec(f"t{number}", DTYPES[draw(st.sampled_from([1, 2, 4, 8]))], (draw(st.integers(12, 900)),))
        form, count = draw(st.sampled_from(FORMS)), draw(st.integers(1, 12))
        start = draw(st.integers(0, spec.num_elements - count))
        spare = draw(st.integers(0, 3)) if form.escape else 0
        byte = st.one_of(st.integers(0, 4), st.sampled_from([83, 84, 85, 86, 254, 255]), st.integers(0, 255))
        planes = []
        for place in range(form.width):
            bytes_ = byte if place < 1 else st.sampled_from([0, 0, 0, 0, 1])
            plane = draw(st.lists(bytes_, min_size=count + spare, max_size=count + spare))
            plane[0] = draw(st.sampled_from([0, 0, 0, plane[0]]))
            planes.append(np.array(plane, np.uint8))
        values = tuple(
            np.array(draw(st.lists(st.integers(0, 255), min_size=count, max_size=count)), np.uint8)
            for _ in range(spec.element_nbytes)
        )
        items.append(CodedItem(spec, draw(st.sampled_from(list(Encoding))), form, start, count, tuple(planes), values))
    return items


def proved_last(item: CodedItem) -> int:
    try:
        return int(kernels.decode_positions(item)[-1])
    except PayloadInvalidError:
        return -1


@settings(max_examples=60, deadline=None)
@given(any_items())
def test_a_table_lists_its_items_and_proves_where_they_end(items):
    table = table_of(items)
    assert [plain(item) for item in table] == [plain(item) for item in items]
    assert table.nbytes == sum(plane.nbytes for item in items for plane in (*item.location_planes, *item.value_planes))
    wide = (LocationForm.WIDE4, LocationForm.WIDE8)
    expected = [-1 if item.location_form in wide else proved_last(item) for item in items]
    for isa in ALL:
        assert table.last_positions(isa=isa).tolist() == expected
    order = list(range(len(items)))[::-2]
    taken = table.take(order)
    assert [plain(item) for item in taken] == [plain(items[number]) for number in order]
    assert taken.last_positions().tolist() == [expected[number] for number in order]
    assert [plain(item) for item in table[1:4]] == [plain(item) for item in items[1:4]]
    assert plain(table[-1]) == plain(items[-1])
    with pytest.raises(IndexError):
        table[len(items)]


@settings(max_examples=40, deadline=None)
@given(any_items())
def test_a_table_is_applied_as_its_items_are(items):
    sound = [item for item in items if proved_last(item) >= 0]
    if not sound:
        return
    for isa in ALL:
        results = []
        for given_items in (table_of(sound), sound):
            storages = [np.zeros(item.spec.num_elements, item.spec.word_dtype) for item in sound]
            bound = [
                BoundPieces(words, (contiguous(0, words.size),), item.spec, isa=isa)
                for words, item in zip(storages, sound, strict=True)
            ]
            changed = PreparedApply(bound, given_items).run(num_threads=1)
            assert changed == sum(item.count for item in sound)
            results.append([words.tobytes() for words in storages])
        assert results[0] == results[1]


def good_item(name: str = "t", count: int = 3) -> CodedItem:
    gaps = np.array([0, *[1] * (count - 1)], np.uint8)
    spec = TensorSpec(name, "BF16", (100,))
    return CodedItem(spec, Encoding.XOR, LocationForm.GAPS, 5, count, (gaps,), (np.ones(count, np.uint8),) * 2)


@pytest.mark.parametrize("isa", ALL)
def test_an_item_of_a_table_that_lies_writes_nothing_and_is_named(isa):
    lying = good_item("liar")
    lying.location_planes[0][-1] = 95
    items = [good_item("first"), lying]
    storages = [np.zeros(100, "<u2") for _ in items]
    bound = [BoundPieces(words, (contiguous(0, 100),), item.spec, isa=isa) for words, item in zip(storages, items, strict=True)]
    with pytest.raises(PayloadInvalidError, match="item of liar"):
        PreparedApply(bound, table_of(items)).run(num_threads=1)
    assert not storages[1].any()


@pytest.mark.parametrize("isa", [None, Isa.NUMPY])
def test_pieces_of_another_tensor_are_refused(isa):
    bound = BoundPieces(np.zeros(100, "<u2"), (contiguous(0, 100),), good_item("other").spec, isa=isa)
    with pytest.raises(PayloadInvalidError, match=r"item of t BF16\[100\]: these pieces are bound to other"):
        PreparedApply([bound], table_of([good_item()]))
    with pytest.raises(RejectedError, match="expected pieces for each of 1 items, got 2"):
        PreparedApply([bound, bound], table_of([good_item()]))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("counts", 4),
        ("counts", 2),
        ("starts", 98),
        ("starts", -1),
        ("location_nbytes", 2),
        ("location_nbytes", 4),
        ("forms", 2),
    ],
)
def test_rows_that_contradict_their_planes_or_tensors_are_refused(column, value):
    item = good_item()
    numbers = {"encodings": item.encoding, "forms": 1, "starts": 5, "counts": 3, "location_nbytes": 3} | {column: value}
    rows = ItemRows([item.spec], *(np.array([number], np.int64) for number in numbers.values()))
    with pytest.raises(PayloadInvalidError):
        ItemTable(rows, {LocationForm.GAPS: item.location_planes}, {(Encoding.XOR, 2): item.value_planes})


def test_planes_that_are_missing_or_no_flat_bytes_are_refused():
    item = good_item()
    rows = table_of([item]).rows
    for locations in ({}, {LocationForm.GAPS: (item.location_planes[0].astype("<u2"),)}):
        with pytest.raises(PayloadInvalidError, match="expected 1 GAPS planes of 3 bytes"):
            ItemTable(rows, locations, {(Encoding.XOR, 2): item.value_planes})
    with pytest.raises(PayloadInvalidError, match="expected 2 XOR planes of 3 bytes"):
        ItemTable(rows, {LocationForm.GAPS: item.location_planes}, {(Encoding.XOR, 2): item.value_planes[:1]})


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize(
    ("form", "planes", "gaps"),
    [
        (LocationForm.GAPS, [[0, 1, 255, 2]], 258),
        (LocationForm.GAPS, [[0, 255, 255, 255, 127, 0]], 892),
        (LocationForm.GAPS, [[0, 255, 255, 255, 128, 0]], None),
        (LocationForm.GAPS, [[1, 0, 0]], None),
        (LocationForm.GAPS, [[0, 1, 2, 255]], None),
        (LocationForm.GAPS, [[0, 1, 2, 0]], None),
        (LocationForm.SHORT_GAPS, [[0, 85, 2, 3]], 90),
        (LocationForm.SHORT_GAPS, [[0, 86, 2]], None),
        (LocationForm.SHORT_GAPS, [[0, 1, 2, 85]], None),
        (LocationForm.WIDE2, [[0, 1, 2], [0, 0, 1]], 259),
        (LocationForm.WIDE2, [[1, 0, 0], [0, 0, 0]], None),
        (LocationForm.WIDE2, [[0, 0, 0], [1, 0, 0]], None),
    ],
)
def test_every_lie_of_an_item_between_others_shows_in_where_it_ends(form, planes, gaps, isa):
    parts = tuple(np.array(plane, np.uint8) for plane in planes)
    values = (np.zeros(3, np.uint8),) * 2
    item = CodedItem(TensorSpec("liar", "BF16", (900,)), Encoding.XOR, form, 5, 3, parts, values)
    last = table_of([good_item("a"), item, good_item("b")]).last_positions(isa=isa).tolist()
    good = int(kernels.decode_positions(good_item())[-1])
    assert last == [good, -1 if gaps is None else 5 + gaps + 2, good]
