"""The item table: one row per item, stored column by column and then the dimensions and names of all items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.errors import RejectedError
from deltarefit.kernels import ItemRows
from deltarefit.payload.header import PayloadHeader, refuse
from deltarefit.payload.layout import (
    DTYPE_CODES,
    DTYPE_NAMES,
    ITEM_COLUMNS,
    ITEM_NBYTES,
    MAX_RANK,
    Limits,
)
from deltarefit.records import CodedItem, Encoding, LocationForm

__all__ = ["max_table_nbytes", "pack_table", "unpack_table"]

_ENCODINGS = {int(encoding): encoding for encoding in Encoding}
_FORMS = {int(form): form for form in LocationForm}
_ENCODING_CODES, _FORM_CODES = list(_ENCODINGS), list(_FORMS)
_SURE_COUNT = 2**44
"""Elements of one item up to which 64 bits hold all sums and products here."""
_IMPOSSIBLE_NBYTES = 2**63
"""No memory holds so much, nor does a signed number of 64 bits; eight bytes for each of 2^62 elements would be more."""

Columns = dict[str, NDArray[Any]]
CutT = TypeVar("CutT", bytes, list[int])


@dataclass(frozen=True, slots=True)
class _ItemRow:
    """One item without its bytes; every number checked against the others and against the tensor's shape."""

    spec: TensorSpec
    encoding: Encoding
    form: LocationForm
    start: int
    count: int
    location_nbytes: int
    """Bytes in the location planes, all of them together."""


def max_table_nbytes(num_items: int, limits: Limits) -> int:
    """No table of so many items can be longer."""
    return num_items * (ITEM_NBYTES + 8 * MAX_RANK) + limits.name_nbytes


def pack_table(items: Sequence[CodedItem]) -> bytes:
    """The table's bytes, not yet compressed."""
    names = [item.spec.name.encode() for item in items]
    shapes = [item.spec.shape for item in items]
    rows = {
        "name_nbytes": [len(name) for name in names],
        "dtype": [DTYPE_CODES[item.spec.dtype] for item in items],
        "rank": [len(shape) for shape in shapes],
        "encoding": [item.encoding for item in items],
        "location_form": [item.location_form for item in items],
        "start": [item.start for item in items],
        "count": [item.count for item in items],
        "location_nbytes": [sum(plane.size for plane in item.location_planes) for item in items],
    }
    columns = [np.array(rows[column], dtype=code).tobytes() for column, code in ITEM_COLUMNS]
    dimensions = np.array([length for shape in shapes for length in shape], dtype="<u8").tobytes()
    return b"".join((*columns, dimensions, *names))


def unpack_table(table: bytes, header: PayloadHeader, catalog: Catalog | None, limits: Limits) -> ItemRows:
    """Read and check every row.

    Raises:
        PayloadInvalidError: the table's length, a code, a name, a shape or a row's numbers are wrong, or a row is not as the
            catalog has it.
    """
    where = header.payload_id
    columns, position = _read_columns(table, header.num_items)
    ranks, name_sizes = columns["rank"].tolist(), columns["name_nbytes"].tolist()
    names_at = position + 8 * sum(ranks)
    name_nbytes = sum(name_sizes)
    if names_at + name_nbytes != len(table):
        refuse(where, f"item table of {len(table)} bytes: its ranks and names add up to {names_at + name_nbytes}")
    if name_nbytes > limits.name_nbytes:
        refuse(
            where, f"item table: {name_nbytes} bytes of names, at most {limits.name_nbytes} are allowed (Limits.name_nbytes)"
        )
    if max(ranks) > MAX_RANK:
        refuse(where, f"item table: a tensor of rank {max(ranks)}, expected at most {MAX_RANK}")
    dimensions = np.frombuffer(table, "<u8", sum(ranks), position).tolist()
    names = _cut(table[names_at:], name_sizes)
    shapes = [tuple(shape) for shape in _cut(dimensions, ranks)]
    rows = _rows_at_once(columns, names, shapes, catalog)
    if rows is None:  # some row is wrong, or may be
        rows = _rows_one_by_one(columns, names, shapes, catalog, header)
    if (total := sum(rows.counts.tolist())) != header.num_changed:
        refuse(where, f"items hold {total} elements, the header says {header.num_changed}")
    return rows


def _cut(whole: CutT, lengths: Iterable[int]) -> list[CutT]:
    parts = []
    start = 0
    for length in lengths:
        parts.append(whole[start : start + length])
        start += length
    return parts


def _rows_at_once(
    columns: Columns, names: Sequence[bytes], shapes: Sequence[tuple[int, ...]], catalog: Catalog | None
) -> ItemRows | None:
    """The rows if all of them are right beyond doubt. What is wrong with one is for ``_RowReader`` to say."""
    counts, starts = columns["count"], columns["start"]
    if int(counts.max()) > _SURE_COUNT or not np.isin(columns["location_form"], _FORM_CODES).all():
        return None
    specs = _specs_at_once(columns["dtype"].tolist(), names, shapes, catalog)
    if specs is None or not np.isin(columns["encoding"], _ENCODING_CODES).all():
        return None
    forms = columns["location_form"].astype(np.int64)
    signed = (starts.astype(np.int64), counts.astype(np.int64), columns["location_nbytes"].astype(np.int64))
    rows = ItemRows(specs, columns["encoding"].astype(np.int64), forms, *signed)
    # Unsigned: what wraps fails one of the other comparisons.
    num_elements = rows.num_elements.astype(np.uint64)
    unchanged = num_elements - starts - counts
    escapes = rows.escapes.astype(np.uint64)
    low = counts * rows.location_widths.astype(np.uint64)
    high = low + np.where(escapes > 0, unchanged // np.maximum(escapes, 1), 0)
    fits = (counts >= 1) & (counts <= num_elements) & (starts <= num_elements - counts)
    fits &= (low <= columns["location_nbytes"]) & (columns["location_nbytes"] <= high)
    return rows if fits.all() else None


def _specs_at_once(
    dtypes: Sequence[int], names: Sequence[bytes], shapes: Sequence[tuple[int, ...]], catalog: Catalog | None
) -> list[TensorSpec] | None:
    specs = []
    try:
        for code, name, shape in zip(dtypes, names, shapes, strict=True):
            if catalog is None:
                specs.append(TensorSpec(name.decode(), DTYPE_NAMES[code], shape))
                continue
            spec = catalog[name.decode()]
            if spec.shape != shape or DTYPE_CODES[spec.dtype] != code:
                return None
            specs.append(spec)
    except (KeyError, UnicodeDecodeError, RejectedError):
        return None
    return specs


def _rows_one_by_one(
    columns: Columns,
    names: Sequence[bytes],
    shapes: Sequence[tuple[int, ...]],
    catalog: Catalog | None,
    header: PayloadHeader,
) -> ItemRows:
    """The plain twin of ``_rows_at_once``, which also says what is wrong."""
    fields = [dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)]
    rows = [
        _RowReader(header, number, row).read(name, shape, catalog)
        for number, (row, name, shape) in enumerate(zip(fields, names, shapes, strict=True))
    ]
    numbers = np.array([(r.encoding, r.form, r.start, r.count, r.location_nbytes) for r in rows], np.int64)
    return ItemRows((row.spec for row in rows), *numbers.T)


def _read_columns(table: bytes, num_items: int) -> tuple[Columns, int]:
    """The fixed columns, and where they end. The caller has checked that the table is long enough for them."""
    columns = {}
    position = 0
    for column, code in ITEM_COLUMNS:
        columns[column] = np.frombuffer(table, code, num_items, position)
        position += columns[column].nbytes
    return columns, position


@dataclass(frozen=True, slots=True)
class _RowReader:
    header: PayloadHeader
    number: int
    fields: dict[str, int]

    def read(self, raw_name: bytes, shape: tuple[int, ...], catalog: Catalog | None) -> _ItemRow:
        spec = self._spec(raw_name, shape, catalog)
        encoding = _ENCODINGS.get(self.fields["encoding"])
        form = _FORMS.get(self.fields["location_form"])
        if encoding is None:
            self._refuse(spec.name, f"encoding code {self.fields['encoding']}, expected one of {sorted(_ENCODINGS)}")
        if form is None:
            self._refuse(spec.name, f"location form code {self.fields['location_form']}, expected one of {sorted(_FORMS)}")
        row = _ItemRow(spec, encoding, form, self.fields["start"], self.fields["count"], self.fields["location_nbytes"])
        self._check_numbers(row)
        return row

    def _refuse(self, name: object, what: str) -> NoReturn:
        refuse(self.header.payload_id, f"item {self.number} ({str(name)[:200]}): {what}")

    def _spec(self, raw_name: bytes, shape: tuple[int, ...], catalog: Catalog | None) -> TensorSpec:
        dtype = DTYPE_NAMES.get(self.fields["dtype"])
        if dtype is None:
            self._refuse(raw_name, f"dtype code {self.fields['dtype']}, expected 1 to {len(DTYPE_NAMES)}")
        try:
            spec = TensorSpec(raw_name.decode(), dtype, shape)
        except (UnicodeDecodeError, RejectedError) as error:
            self._refuse(raw_name, f"no valid tensor ({error})")
        if catalog is None:
            return spec
        known = catalog.get(spec.name)
        if known is None:
            self._refuse(spec.name, f"no such tensor among the {len(catalog)} of the catalog")
        if known != spec:
            self._refuse(spec.name, f"got {spec}, the catalog has {known}")
        return known

    def _check_numbers(self, row: _ItemRow) -> None:
        num_elements = row.spec.num_elements
        if not 1 <= row.count <= num_elements:
            self._refuse(row.spec.name, f"{row.count} changed elements, expected 1 to {num_elements}")
        # Python ints: a start near 2^64 does not wrap.
        unchanged = num_elements - row.start - row.count
        if unchanged < 0:
            what = f"{row.count} elements from {row.start} on, the tensor has {num_elements} elements"
            self._refuse(row.spec.name, what)
        low = row.count * row.form.width
        # Each escape byte skips as many elements as it says, so the tensor's rest bounds how many there can be.
        high = low + unchanged // row.form.escape if row.form.escape else low
        if not low <= row.location_nbytes <= high:
            expected = f"{low}" if low == high else f"{low} to {high}"
            self._refuse(row.spec.name, f"{row.location_nbytes} bytes of {row.form.name} locations, expected {expected}")
        if row.location_nbytes >= _IMPOSSIBLE_NBYTES:
            what = f"{row.location_nbytes} bytes of {row.form.name} locations, expected fewer than {_IMPOSSIBLE_NBYTES}"
            self._refuse(row.spec.name, what)
