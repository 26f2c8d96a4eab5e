"""Reading an item table at once and row by row says the same; what the quick way does not accept, the plain way decides."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from payload_cases import ID, Draft, items, sample, sample_items

from deltarefit import kernels
from deltarefit.canonical import Catalog
from deltarefit.errors import PayloadInvalidError
from deltarefit.payload import encode, table
from deltarefit.payload.header import parse_header
from deltarefit.payload.layout import ITEM_COLUMNS
from deltarefit.payload.locations import check_locations

HEADER = parse_header(memoryview(sample()))


def columns_of(draft):
    shapes = np.split(np.array(draft.dimensions, "<u8"), np.cumsum(draft.columns["rank"])[:-1])
    columns = {name: np.array(draft.columns[name], code) for name, code in ITEM_COLUMNS}
    return columns, draft.names, [tuple(shape.tolist()) for shape in shapes]


def said(rows):
    return rows.specs, *(
        getattr(rows, name).tolist() for name in ("encodings", "forms", "starts", "counts", "location_nbytes", "widths")
    )


def plain_rows(parts, catalog):
    try:
        return table._rows_one_by_one(*parts, catalog, HEADER)
    except PayloadInvalidError:
        return None


@settings(max_examples=60, deadline=None)
@given(items(), st.booleans())
def test_sound_tables_are_read_at_once(coded, with_catalog):
    parts = columns_of(Draft.of(encode(coded, **ID)))
    catalog = Catalog(item.spec for item in coded) if with_catalog else None
    at_once = table._rows_at_once(*parts, catalog)
    assert said(at_once) == said(plain_rows(parts, catalog))
    assert list(at_once.specs) == [item.spec for item in coded]


EDGES = [0, 1, 2, 3, 4, 8, 9, 16, 19, 20, 255, 2**31, 2**32, 2**44, 2**44 + 1, 2**60, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@settings(max_examples=200, deadline=None)
@given(st.data(), st.booleans())
def test_what_is_read_at_once_is_what_is_read_row_by_row(data, with_catalog):
    draft = Draft.of(sample())
    columns, names, shapes = columns_of(draft)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(columns)))
        if name in ("rank", "name_nbytes"):
            place = data.draw(st.integers(0, len(shapes) - 1))
            shapes[place] = tuple(data.draw(st.lists(st.sampled_from(EDGES), max_size=3)))
            names[place] = data.draw(st.binary(max_size=4))
            continue
        most = np.iinfo(columns[name].dtype).max
        columns[name][data.draw(st.integers(0, len(names) - 1))] = min(most, data.draw(st.sampled_from(EDGES)))
    catalog = Catalog({item.spec.name: item.spec for item in sample_items()}.values()) if with_catalog else None
    at_once = table._rows_at_once(columns, names, shapes, catalog)
    plain = plain_rows((columns, names, shapes), catalog)  # which refuses, or reads what was left to it
    if at_once is not None:
        assert said(at_once) == said(plain)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_sums_of_all_items_prove_what_sums_of_each_do(data):
    """``ItemTable.last_positions`` against its plain twin, on planes of which some bytes are wrong."""
    planes = {}
    for coded in data.draw(items()):
        parts = [bytearray(plane.tobytes()) for plane in coded.location_planes]
        for _ in range(data.draw(st.integers(0, 2))):
            if parts:
                part = data.draw(st.sampled_from(parts))
                part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.sampled_from([0, 1, 84, 85, 86, 254, 255]))
        planes[coded.spec.name] = type(coded)(
            coded.spec, coded.encoding, coded.location_form, coded.start, coded.count,
            tuple(np.frombuffer(bytes(part), np.uint8) for part in parts), coded.value_planes,
        )  # fmt: skip
    for coded in planes.values():
        columns = ([coded.encoding], [coded.location_form], [coded.start], [coded.count])
        nbytes = [sum(plane.size for plane in coded.location_planes)]
        rows = kernels.ItemRows([coded.spec], *(np.array(column, np.int64) for column in (*columns, nbytes)))
        one = kernels.ItemTable(
            rows,
            {coded.location_form: coded.location_planes},
            {(coded.encoding, coded.spec.element_nbytes): coded.value_planes},
        )
        (last,) = one.last_positions().tolist()
        try:
            expected = check_locations(coded, where="here", what="item")
        except PayloadInvalidError:
            expected = -1
        assert last == (-1 if coded.location_form.width > 2 else expected)
