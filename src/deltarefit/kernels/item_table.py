"""Items whose planes are parts of common planes, as a table: many are checked and applied without making an object of each."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import TensorSpec
from deltarefit.errors import PayloadInvalidError
from deltarefit.kernels import native, twins
from deltarefit.kernels.isa import Isa
from deltarefit.kernels.library import address, resolve
from deltarefit.records import CodedItem, Encoding, LocationForm, Plane

__all__ = ["ItemRows", "ItemTable"]

Column = NDArray[np.int64]
_SUMMED_WIDTH = 2
"""Bytes of a location word whose sums 64 bits hold, however many there are."""


_BY_CODE = {int(form): form for form in LocationForm}
_FORMS = [_BY_CODE.get(code, LocationForm.RUN) for code in range(max(_BY_CODE) + 1)]
_LOCATION_WIDTHS = np.array([form.width for form in _FORMS], np.int64)
_ESCAPES = np.array([form.escape for form in _FORMS], np.int64)


class ItemRows:
    """Items without their bytes, column by column."""

    __slots__ = (
        "counts",
        "encodings",
        "escapes",
        "forms",
        "location_nbytes",
        "location_widths",
        "num_elements",
        "specs",
        "starts",
        "widths",
    )

    def __init__(
        self,
        specs: Iterable[TensorSpec],
        encodings: Column,
        forms: Column,
        starts: Column,
        counts: Column,
        location_nbytes: Column,
    ) -> None:
        """All of one length. ``location_nbytes``: in the location planes of the item, all of them together."""
        self.specs = tuple(specs)
        self.encodings, self.forms = encodings, forms
        self.starts, self.counts, self.location_nbytes = starts, counts, location_nbytes
        self.location_widths, self.escapes = _LOCATION_WIDTHS[forms], _ESCAPES[forms]
        num_items = len(self.specs)
        self.widths = np.fromiter((spec.element_nbytes for spec in self.specs), np.int64, num_items)
        self.num_elements = np.fromiter((spec.num_elements for spec in self.specs), np.int64, num_items)

    def __len__(self) -> int:
        return len(self.specs)

    def by_form(self) -> list[tuple[LocationForm, Column]]:
        """The rows of each location form that there is."""
        return [(LocationForm(int(code)), np.flatnonzero(self.forms == code)) for code in np.unique(self.forms)]

    def by_value(self) -> list[tuple[tuple[Encoding, int], Column]]:
        """The rows of each encoding and element width."""
        codes = self.encodings * 16 + self.widths
        return [((Encoding(int(code) // 16), int(code) % 16), np.flatnonzero(codes == code)) for code in np.unique(codes)]

    def take(self, rows: Column) -> ItemRows:
        """These rows alone, in this order."""
        taken = ItemRows.__new__(ItemRows)
        taken.specs = tuple(self.specs[row] for row in rows.tolist())
        for name in self.__slots__:
            if name != "specs":
                setattr(taken, name, getattr(self, name)[rows])
        return taken


class ItemTable(Sequence[CodedItem]):
    """Items of which each has a part of every plane of its kind. An item becomes an object when it is asked for."""

    __slots__ = ("_location_at", "_locations", "_value_at", "_values", "rows")

    def __init__(
        self,
        rows: ItemRows,
        locations: Mapping[LocationForm, tuple[Plane, ...]],
        values: Mapping[tuple[Encoding, int], tuple[Plane, ...]],
    ) -> None:
        """The planes of each kind hold the parts of its rows one behind another, and nothing else.

        Raises:
            PayloadInvalidError: a row contradicts itself or its tensor, or planes are of another length than the rows need.
        """
        self.rows = rows
        self._locations = dict(locations)
        self._values = dict(values)
        self._location_at = np.zeros(len(rows), np.int64)
        self._value_at = np.zeros(len(rows), np.int64)
        for form, chosen in rows.by_form():
            nbytes = rows.location_nbytes[chosen] // max(1, form.width)
            self._place(self._location_at, chosen, nbytes, self._locations.get(form, ()), form.width, form.name)
        for (encoding, width), chosen in rows.by_value():
            planes = self._values.get((encoding, width), ())
            self._place(self._value_at, chosen, rows.counts[chosen], planes, width, encoding.name)
        self._check_rows()

    @staticmethod
    def _place(at: Column, chosen: Column, nbytes: Column, planes: Sequence[Plane], num_planes: int, what: str) -> None:
        needed = sum(nbytes.tolist())  # Python ints: nothing wraps
        if len(planes) != num_planes or any(
            plane.dtype != np.uint8 or plane.shape != (needed,) or not plane.flags.c_contiguous for plane in planes
        ):
            sizes = [plane.shape for plane in planes]
            raise PayloadInvalidError(f"items: expected {num_planes} {what} planes of {needed} bytes, got {sizes}")
        at[chosen] = np.cumsum(nbytes) - nbytes

    def _check_rows(self) -> None:
        rows = self.rows
        fits = (rows.counts >= 1) & (rows.starts >= 0) & (rows.counts <= rows.num_elements)
        fits &= rows.starts <= rows.num_elements - rows.counts
        least = rows.counts * rows.location_widths  # counts are at most the bytes of a plane: nothing wraps
        fits &= (rows.location_nbytes == least) | ((rows.escapes > 0) & (rows.location_nbytes > least))
        if not fits.all():
            row = int(np.argmin(fits))
            raise PayloadInvalidError(
                f"item {row} of {rows.specs[row]}: {rows.counts[row]} elements from {rows.starts[row]} on with "
                f"{rows.location_nbytes[row]} location bytes do not fit"
            )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Of all parts of planes."""
        rows = self.rows
        return int(rows.location_nbytes.sum() + (rows.counts * rows.widths).sum())

    @overload
    def __getitem__(self, at: int) -> CodedItem: ...
    @overload
    def __getitem__(self, at: slice) -> ItemTable: ...
    def __getitem__(self, at: int | slice) -> CodedItem | ItemTable:
        if isinstance(at, slice):
            return self.take(range(*at.indices(len(self))))
        row = operator.index(at)
        if not -len(self) <= row < len(self):
            raise IndexError(f"item {row} of {len(self)}")
        return self._item(row % len(self))

    def __iter__(self) -> Iterator[CodedItem]:
        return map(self._item, range(len(self)))

    def take(self, rows: Sequence[int]) -> ItemTable:
        """The items of these numbers, in this order; nothing is copied but the table."""
        chosen = np.array(rows, np.int64)
        taken = ItemTable.__new__(ItemTable)
        taken.rows = self.rows.take(chosen)
        taken._locations, taken._values = self._locations, self._values
        taken._location_at, taken._value_at = self._location_at[chosen], self._value_at[chosen]
        return taken

    def _item(self, row: int) -> CodedItem:
        rows = self.rows
        spec, count, at = rows.specs[row], int(rows.counts[row]), int(self._value_at[row])
        form, encoding = _FORMS[rows.forms[row]], Encoding(int(rows.encodings[row]))
        locations: tuple[Plane, ...] = ()
        if form.width:
            start = int(self._location_at[row])
            end = start + int(rows.location_nbytes[row]) // form.width
            locations = tuple(plane[start:end] for plane in self._locations[form])
        values = tuple(plane[at : at + count] for plane in self._values[encoding, spec.element_nbytes])
        return CodedItem(spec, encoding, form, int(rows.starts[row]), count, locations, values)

    def last_positions(self, *, isa: Isa | None = None) -> Column:
        """Flat index of each item's last element, by the sums that prove its locations (design note 0002).

        It is -1 where the locations are not what they must be, and for wide forms whose sums 64 bits may not hold: whoever asks
        looks at those items one by one.
        """
        rows = self.rows
        last = rows.starts + rows.counts - 1
        for form, chosen in rows.by_form():
            if form.width > _SUMMED_WIDTH:
                last[chosen] = -1
            elif form.width:
                reach, is_valid = self._sums(form, chosen, resolve(isa))
                reached = last[chosen] + reach
                last[chosen] = np.where(is_valid & (reached < rows.num_elements[chosen]), reached, -1)
        return last

    def _sums(self, form: LocationForm, chosen: Column, isa: Isa) -> tuple[Column, NDArray[np.bool_]]:
        """All gaps of each item together, and whether its first gap is 0 and it has as many gaps as elements."""
        at, nbytes = self._location_at[chosen], self.rows.location_nbytes[chosen] // form.width
        reach = np.zeros(chosen.size, np.int64)
        is_valid = np.ones(chosen.size, np.bool_)
        for number, plane in enumerate(self._locations[form]):
            if isa is Isa.NUMPY:
                totals = twins.totals_of_parts(plane, at, nbytes, form.escape)
            else:
                totals = native.totals_of_parts(plane, at, nbytes, form.escape, isa)
            reach += totals["sum"] << (8 * number)
            is_valid &= plane[at] == 0
            if form.escape:
                is_valid &= (totals["highest"] <= form.escape) & (nbytes - totals["escapes"] == self.rows.counts[chosen])
                is_valid &= plane[at + nbytes - 1] != form.escape
        return reach, is_valid

    def fill_calls(self, calls: NDArray[Any]) -> None:
        """Write what the kernel needs to know of each item into its call. The table must outlive them."""
        rows = self.rows
        calls["width"], calls["encoding"], calls["form"] = rows.widths, rows.encodings, rows.forms
        calls["start"], calls["count"], calls["num_elements"] = rows.starts, rows.counts, rows.num_elements
        calls["location_nbytes"] = rows.location_nbytes
        for form, chosen in rows.by_form():
            if form.width:
                calls["location_nbytes"][chosen] //= form.width
                _point(calls["locations"], chosen, self._locations[form], self._location_at)
        for kind, chosen in rows.by_value():
            _point(calls["values"], chosen, self._values[kind], self._value_at)


def _point(slots: NDArray[np.uint64], chosen: Column, planes: Sequence[Plane], at: Column) -> None:
    """Where each chosen row's part of each plane lies."""
    for number, plane in enumerate(planes):
        slots[chosen, number] = address(plane) + at[chosen]
