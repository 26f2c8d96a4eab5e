"""The item table: one row per item, stored column by column and then the dimensions and names of all items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.errors import RejectedError
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

__all__ = ["ItemRow", "max_table_nbytes", "pack_table", "unpack_table"]

_ENCODINGS = {int(encoding): encoding for encoding in Encoding}
_FORMS = {int(form): form for form in LocationForm}


@dataclass(frozen=True, slots=True)
class ItemRow:
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


def unpack_table(table: bytes, header: PayloadHeader, catalog: Catalog | None, limits: Limits) -> list[ItemRow]:
    """Read and check every row.

    Raises:
        PayloadInvalidError: the table's length, a code, a name, a shape or a row's numbers are wrong, or a row is not as the
            catalog has it.
    """
    where = header.payload_id
    columns, position = _read_columns(table, header.num_items)
    names_at = position + 8 * sum(columns["rank"])
    name_nbytes = sum(columns["name_nbytes"])
    if names_at + name_nbytes != len(table):
        refuse(where, f"item table of {len(table)} bytes: its ranks and names add up to {names_at + name_nbytes}")
    if name_nbytes > limits.name_nbytes:
        refuse(
            where, f"item table: {name_nbytes} bytes of names, at most {limits.name_nbytes} are allowed (Limits.name_nbytes)"
        )
    if max(columns["rank"]) > MAX_RANK:
        refuse(where, f"item table: a tensor of rank {max(columns['rank'])}, expected at most {MAX_RANK}")
    dimensions = np.frombuffer(table, "<u8", sum(columns["rank"]), position)
    rows = []
    axis = 0
    for number in range(header.num_items):
        name_end = names_at + columns["name_nbytes"][number]
        shape = tuple(dimensions[axis : axis + columns["rank"][number]].tolist())
        reader = _RowReader(header, number, {column: values[number] for column, values in columns.items()})
        rows.append(reader.read(table[names_at:name_end], shape, catalog))
        axis += len(shape)
        names_at = name_end
    if (total := sum(row.count for row in rows)) != header.num_changed:
        refuse(where, f"items hold {total} elements, the header says {header.num_changed}")
    return rows


def _read_columns(table: bytes, num_items: int) -> tuple[dict[str, list[int]], int]:
    """The fixed columns as lists, and where they end. The caller has checked that the table is long enough for them."""
    columns = {}
    position = 0
    for column, code in ITEM_COLUMNS:
        values = np.frombuffer(table, code, num_items, position)
        columns[column] = values.tolist()
        position += values.nbytes
    return columns, position


@dataclass(frozen=True, slots=True)
class _RowReader:
    header: PayloadHeader
    number: int
    fields: dict[str, int]

    def read(self, raw_name: bytes, shape: tuple[int, ...], catalog: Catalog | None) -> ItemRow:
        spec = self._spec(raw_name, shape, catalog)
        encoding = _ENCODINGS.get(self.fields["encoding"])
        form = _FORMS.get(self.fields["location_form"])
        if encoding is None:
            self._refuse(spec.name, f"encoding code {self.fields['encoding']}, expected one of {sorted(_ENCODINGS)}")
        if form is None:
            self._refuse(spec.name, f"location form code {self.fields['location_form']}, expected one of {sorted(_FORMS)}")
        row = ItemRow(spec, encoding, form, self.fields["start"], self.fields["count"], self.fields["location_nbytes"])
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

    def _check_numbers(self, row: ItemRow) -> None:
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
