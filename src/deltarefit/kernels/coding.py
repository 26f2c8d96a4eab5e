"""Columns of coded items: location forms, byte planes, zigzag. Plain numpy; the format is payload/FORMAT.md's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import WORDS, Words
from deltarefit.errors import PayloadInvalidError, RejectedError
from deltarefit.records import CodedItem, DeltaRecords, Encoding, LocationForm, Plane

__all__ = [
    "SHORT_COUNT",
    "SHORT_ESCAPES",
    "SHORT_MEAN",
    "GapTotals",
    "PlaneTotals",
    "code_locations",
    "code_records",
    "code_values",
    "decode_gaps",
    "decode_positions",
    "decode_values",
    "has_fitting_columns",
    "is_dense_smaller",
    "join_planes",
    "smallest_form",
    "split_planes",
    "unzigzag",
    "zigzag",
]

_BYTES = np.dtype(np.uint8)
_WIDE = (LocationForm.WIDE2, LocationForm.WIDE4, LocationForm.WIDE8)
SHORT_MEAN = 40
"""Mean gap below which SHORT_GAPS compresses better. Measured on uniform positions: 0.33 % better at 40, equal at 46."""
SHORT_ESCAPES = 64
"""Elements for each escape of GAPS that there must be at least: uniform positions of that density have more than 500. Bursts of
changes with long gaps between have fewer, and each of those gaps would take three times the escapes (29 % more, measured)."""
SHORT_COUNT = 4096
"""Elements that an item must have for it: below, the frame of one more plane costs about what is gained."""


@dataclass(frozen=True, slots=True)
class GapTotals:
    """What the choice of a location form needs to know about the gaps of an item."""

    count: int
    """Changed elements, at least 1."""
    escapes: int
    """Escape bytes that GAPS would need: the sum over gaps of ``gap // 255``."""
    max_gap: int
    """Largest gap. The first, before the first element, is always 0."""
    reach: int
    """All gaps together."""

    @property
    def is_run(self) -> bool:
        return not self.reach


class PlaneTotals(NamedTuple):
    """What proves how many gaps a plane has and where they lead."""

    sum: int
    """Of its bytes."""
    escapes: int
    """Bytes that are the escape."""
    highest: int
    """Largest byte; 0 if there is none."""


def smallest_form(totals: GapTotals) -> LocationForm:
    """The location form of fewest bytes. GAPS wins ties, because its bytes compress best; SHORT_GAPS takes its place where it
    compresses better still (all measured).
    """
    if totals.is_run:
        return LocationForm.RUN
    wide = next(form for form in _WIDE if totals.max_gap < 1 << (8 * form))
    if totals.count + totals.escapes > wide * totals.count:
        return wide
    return LocationForm.SHORT_GAPS if _is_short(totals) else LocationForm.GAPS


def _is_short(totals: GapTotals) -> bool:
    return (
        totals.count >= SHORT_COUNT
        and totals.reach < SHORT_MEAN * totals.count
        and totals.escapes * SHORT_ESCAPES <= totals.count
    )


def locations_nbytes(totals: GapTotals) -> int:
    """Location bytes of the smallest form. SHORT_GAPS counts as GAPS: what it has more, compression takes back."""
    form = smallest_form(totals)
    return totals.count + totals.escapes if form.escape else form.width * totals.count


def is_dense_smaller(totals: GapTotals, element_nbytes: int, num_elements: int) -> bool:
    """Whether sending all ``num_elements`` of a contiguous shard, without locations, takes fewer bytes than the sparse form."""
    return locations_nbytes(totals) + totals.count * element_nbytes > num_elements * element_nbytes


def zigzag(difference: Words) -> Words:
    """Map differences modulo 2^w so that small steps up and down get small codes: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    signed = difference.view(f"<i{difference.dtype.itemsize}")
    coded: Words = (signed << 1) ^ (signed >> (8 * difference.dtype.itemsize - 1))
    return coded.view(difference.dtype)


def unzigzag(code: Words) -> Words:
    """Undo ``zigzag``."""
    one = code.dtype.type(1)
    plain: Words = (code >> one) ^ (np.zeros(1, code.dtype) - (code & one))
    return plain


def split_planes(words: NDArray[Any]) -> tuple[Plane, ...]:
    """One byte plane per byte of a word, low byte first."""
    columns = np.ascontiguousarray(words).view(np.uint8).reshape(-1, words.dtype.itemsize)
    return tuple(np.ascontiguousarray(columns[:, byte]) for byte in range(words.dtype.itemsize))


def join_planes(planes: Sequence[Plane]) -> Words:
    """Undo ``split_planes``."""
    joined = np.empty((planes[0].size, len(planes)), np.uint8)
    for byte, plane in enumerate(planes):
        joined[:, byte] = plane
    return joined.reshape(-1).view(WORDS[len(planes)])


def gaps_of(flat_index: NDArray[np.int64]) -> NDArray[np.int64]:
    """Unchanged elements before each element, since the one before it; 0 before the first. At least one element."""
    return np.diff(flat_index, prepend=flat_index[0] - 1) - 1


def totals_of(gaps: NDArray[np.int64]) -> GapTotals:
    return GapTotals(
        count=gaps.size,
        escapes=int((gaps // LocationForm.GAPS.escape).sum()),
        max_gap=int(gaps.max()),
        reach=int(gaps.sum()),
    )


def code_gaps(gaps: NDArray[np.int64], escape: int) -> Plane:
    """The byte stream of a form with escapes."""
    escapes, rest = np.divmod(gaps, escape)
    ends = np.cumsum(escapes + 1) - 1
    stream = np.full(int(ends[-1]) + 1, escape, np.uint8)
    stream[ends] = rest.astype(np.uint8)
    return stream


def code_locations(gaps: NDArray[np.int64], form: LocationForm) -> tuple[Plane, ...]:
    """Location planes of this form; the caller made sure that the gaps fit it."""
    if form is LocationForm.RUN:
        return ()
    if form.escape:
        return (code_gaps(gaps, form.escape),)
    return split_planes(gaps.astype(WORDS[int(form)]))


def code_values(values: Words, encoding: Encoding) -> tuple[Plane, ...]:
    """Value planes of plain values (not yet zigzagged)."""
    return split_planes(zigzag(values) if encoding is Encoding.DIFFERENCE else values)


def code_records(records: DeltaRecords, encoding: Encoding) -> CodedItem:
    """Code any records as an item: the plain path, for every source of changes.

    Raises:
        RejectedError: no records, positions that do not ascend inside the tensor, words of the wrong width, or an encoding that
            needs old bits which the records lack.
    """
    spec, index = records.spec, records.flat_index
    if not index.size:
        raise RejectedError(f"records of {spec}: expected at least one changed element")
    if records.new_bits.dtype != spec.word_dtype:
        raise RejectedError(f"records of {spec}: expected words {spec.word_dtype}, got {records.new_bits.dtype}")
    if index[0] < 0 or index[-1] >= spec.num_elements or (np.diff(index) <= 0).any():
        raise RejectedError(f"records of {spec}: expected strictly ascending flat indices below {spec.num_elements}")
    gaps = gaps_of(index)
    form = smallest_form(totals_of(gaps))
    return CodedItem(
        spec=spec,
        encoding=encoding,
        location_form=form,
        start=int(index[0]),
        count=index.size,
        location_planes=code_locations(gaps, form),
        value_planes=code_values(records.values(encoding), encoding),
    )


def _invalid(item: CodedItem, text: str) -> PayloadInvalidError:
    return PayloadInvalidError(f"item of {item.spec}, {item.location_form.name} with {item.count} elements: {text}")


def has_fitting_columns(item: CodedItem) -> bool:
    """Whether counts and lengths of an item's planes fit each other; positions themselves are checked by the decoders."""
    form, count, spec = item.location_form, item.count, item.spec
    locations, values = item.location_planes, item.value_planes
    if len(locations) != form.width or len(values) != spec.element_nbytes or count < 1:
        return False
    for plane in locations:
        if (
            plane.dtype.num != _BYTES.num
            or plane.ndim != 1
            or (plane.size != count and not (form.escape and plane.size > count))
        ):
            return False
    for plane in values:
        if plane.dtype.num != _BYTES.num or plane.ndim != 1 or plane.size != count:
            return False
    return 0 <= item.start <= spec.num_elements - count


def check_columns(item: CodedItem) -> None:
    """Check what ``has_fitting_columns`` says.

    Raises:
        PayloadInvalidError: they do not fit.
    """
    if has_fitting_columns(item):
        return
    if not 1 <= item.count <= item.spec.num_elements:
        raise _invalid(item, f"expected 1 to {item.spec.num_elements} elements")
    if not 0 <= item.start <= item.spec.num_elements - item.count:
        raise _invalid(item, f"they do not fit in {item.spec.num_elements} from {item.start} on")
    found = [[f"{plane.dtype}{list(plane.shape)}" for plane in planes] for planes in (item.location_planes, item.value_planes)]
    more = " or more" if item.location_form.escape else ""
    raise _invalid(
        item,
        f"expected {item.location_form.width} location planes of {item.count} bytes{more} and {item.spec.element_nbytes} value "
        f"planes of {item.count} bytes, all flat, got {found[0]} and {found[1]}",
    )


def _gaps_of_bytes(stream: Plane, escape: int) -> NDArray[np.int64]:
    """The gaps that a stream with escapes ends; escapes after the last one are left out."""
    ends = np.flatnonzero(stream != escape)
    escapes = np.diff(ends, prepend=np.int64(-1)) - 1
    return np.asarray(escapes * escape + stream[ends], np.int64)


def decode_gaps(planes: Sequence[Plane], form: LocationForm) -> NDArray[np.int64]:
    """Gaps of trusted location planes; undoes ``code_locations`` for the forms that have planes."""
    if form.escape:
        return _gaps_of_bytes(planes[0], form.escape)
    return join_planes(planes).astype(np.int64)


def decode_positions(item: CodedItem) -> NDArray[np.int64]:
    """Flat indices of an item's elements, strictly ascending and inside the tensor, shape [count].

    Raises:
        PayloadInvalidError: the item's columns disagree with each other or reach outside the tensor.
    """
    check_columns(item)
    if item.location_form is LocationForm.RUN:
        return np.arange(item.start, item.start + item.count, dtype=np.int64)
    steps = (_byte_gaps(item) if item.location_form.escape else _wide_gaps(item)) + 1
    if steps[0] != 1:
        raise _invalid(item, f"expected a first gap of 0, got {int(steps[0]) - 1}")
    steps[0] = item.start
    # A start and a step are at most 2^62 (a tensor's limit), so the first sum that leaves the tensor is still visible as such.
    positions = np.cumsum(steps, dtype=np.int64)
    if bool((positions < 0).any()) or bool((positions >= item.spec.num_elements).any()):
        raise _invalid(item, f"positions leave the tensor of {item.spec.num_elements} elements")
    return positions


def _byte_gaps(item: CodedItem) -> NDArray[np.int64]:
    stream, escape = item.location_planes[0], item.location_form.escape
    if int(stream.max()) > escape:
        raise _invalid(item, f"a gap byte of {int(stream.max())}, expected at most {escape}")
    gaps = _gaps_of_bytes(stream, escape)
    if gaps.size != item.count or stream[-1] == escape:
        raise _invalid(item, f"expected gap bytes that end {item.count} gaps, got {gaps.size}, or the last byte is an escape")
    return gaps


def _wide_gaps(item: CodedItem) -> NDArray[np.int64]:
    wide = join_planes(item.location_planes)
    if int(wide.max()) >= item.spec.num_elements:
        raise _invalid(item, f"a gap of {int(wide.max())} leaves the tensor")
    return wide.astype(np.int64)


def decode_values(item: CodedItem) -> Words:
    """An item's values: planes joined and, for differences, unzigzagged; shape [count].

    Raises:
        PayloadInvalidError: the value planes do not fit the item.
    """
    check_columns(item)
    words = join_planes(item.value_planes)
    return unzigzag(words) if item.encoding is Encoding.DIFFERENCE else words
