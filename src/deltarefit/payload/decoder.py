"""Bytes to one payload, or a refusal. Every refusal stands in ``FORMAT.md`` and has its test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import Catalog
from deltarefit.kernels import ItemRows, ItemTable
from deltarefit.payload.frames import could_hold, open_frame
from deltarefit.payload.header import PayloadHeader, check_digest, parse_header, refuse
from deltarefit.payload.layout import (
    DEFAULT_LIMITS,
    HEADER,
    ITEM_NBYTES,
    MAX_PLANES,
    PLANE,
    Limits,
    PlaneKey,
    is_plane_key,
    location_keys,
    value_keys,
)
from deltarefit.payload.locations import check_items
from deltarefit.payload.table import max_table_nbytes, unpack_table
from deltarefit.records import CodedItem
from deltarefit.run_key import check_key

__all__ = ["Payload", "decode"]


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A payload whose bytes have all been checked."""

    header: PayloadHeader
    items: Sequence[CodedItem]
    """In the order in which they were given to ``encode``. Their planes are read-only views of memory of their own: the
    bytes that were decoded may go."""
    nbytes: int
    """Bytes of the payload as it travelled."""
    digest: str
    """32 hex digits: what tells an identical duplicate from another payload under the same id (paper B.1)."""

    @property
    def held_nbytes(self) -> int:
        """Bytes of all planes, decompressed."""
        if isinstance(self.items, ItemTable):
            return self.items.nbytes
        return sum(plane.nbytes for item in self.items for plane in (*item.location_planes, *item.value_planes))


@dataclass(frozen=True, slots=True)
class _PlaneRow:
    key: PlaneKey
    nbytes: int
    frame_nbytes: int


def decode(
    data: bytes | bytearray | memoryview,
    *,
    catalog: Catalog | None = None,
    key: bytes | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Payload:
    """Read one payload, refusing first. Total: any bytes give a ``Payload`` or a ``PayloadInvalidError``. Thread-safe.

    What is returned can be applied without a further look at locations: every item's positions ascend strictly, are as many
    as its values and lie inside its tensor, and no element is addressed twice. Whether the payload belongs to the attempt,
    the base version and the plan at hand is for the caller to compare with the header.

    Allocates at most the planes and the table (both bounded by ``limits``, by what zstd can hold at all, and, with a
    ``catalog``, by its tensors), up to 1 KB an item, and 16 bytes for each sparse element of items that interleave.

    Args:
        data: the payload's bytes, all of them and nothing else. Not kept.
        catalog: if given, each item's tensor must be in it, with that dtype and shape.
        key: the run's key, if it has one. A payload that is not signed is then refused, and a signed one without it.
        limits: the most to accept.

    Raises:
        PayloadInvalidError: the bytes are not a payload, were altered, exceed a limit, or contradict themselves or the catalog.
        RejectedError: the key's length is wrong.
    """
    check_key(key)
    view = memoryview(data).cast("B")
    header = _check_header(view, limits)
    planes_at = HEADER.size + header.num_planes * PLANE.size
    rows = _read_plane_rows(view, header, limits)
    check_digest(header, view, key)
    frames_at = planes_at + header.table_frame_nbytes
    where = header.payload_id
    table = open_frame(view[planes_at:frames_at], header.table_nbytes, where=where, what="item table")
    item_rows = unpack_table(table, header, catalog, limits)
    _check_planes(rows, item_rows, where)
    planes = _open_planes(view[frames_at:], rows, where)
    items = _split(item_rows, planes)
    check_items(items, where=where)
    return Payload(header, items, view.nbytes, header.digest)


def _check_header(view: memoryview, limits: Limits) -> PayloadHeader:
    if view.nbytes > limits.payload_nbytes:
        what = f"{view.nbytes} bytes, at most {limits.payload_nbytes} are allowed (Limits.payload_nbytes)"
        refuse("of unknown origin", what)
    header = parse_header(view)
    where = header.payload_id
    if header.payload_nbytes != view.nbytes:
        refuse(where, f"{view.nbytes} bytes arrived, its header says {header.payload_nbytes}: cut off, or something follows it")
    if not 1 <= header.num_items <= limits.items:
        refuse(where, f"{header.num_items} items, expected 1 to {limits.items} (Limits.items)")
    if not 1 <= header.num_planes <= MAX_PLANES:
        refuse(where, f"{header.num_planes} planes, expected 1 to {MAX_PLANES}")
    low, high = header.num_items * ITEM_NBYTES, max_table_nbytes(header.num_items, limits)
    if not low <= header.table_nbytes <= high:
        refuse(where, f"an item table of {header.table_nbytes} bytes for {header.num_items} items, expected {low} to {high}")
    return header


def _read_plane_rows(view: memoryview, header: PayloadHeader, limits: Limits) -> list[_PlaneRow]:
    """The plane table, checked by itself: known planes, once each and in order, sizes that add up and can be true."""
    where = header.payload_id
    frames_at = HEADER.size + header.num_planes * PLANE.size + header.table_frame_nbytes
    if frames_at > view.nbytes:
        refuse(where, f"plane table and item table end at byte {frames_at}, the payload has {view.nbytes}")
    rows: list[_PlaneRow] = []
    for fields in PLANE.iter_unpack(view[HEADER.size : HEADER.size + header.num_planes * PLANE.size]):
        plane_key = PlaneKey(*fields[:3])
        if fields[3] or not is_plane_key(plane_key):
            refuse(where, f"plane {len(rows)}: no such plane (stream, width, byte, zero = {fields[:4]})")
        if rows and plane_key <= rows[-1].key:
            refuse(where, f"plane {len(rows)} ({plane_key}): does not ascend from the one before it ({rows[-1].key})")
        row = _PlaneRow(plane_key, fields[4], fields[5])
        if not row.nbytes:
            refuse(where, f"plane {plane_key}: no bytes; expected such planes to be left out")
        if not could_hold(row.frame_nbytes, row.nbytes):
            refuse(
                where,
                f"plane {plane_key}: {row.frame_nbytes} bytes of zstd cannot hold {row.nbytes}",
            )
        rows.append(row)
    if (end := frames_at + sum(row.frame_nbytes for row in rows)) != view.nbytes:
        refuse(where, f"its parts end at byte {end}, the payload has {view.nbytes}")
    if (total := sum(row.nbytes for row in rows)) > limits.decompressed_nbytes:
        what = f"{total} bytes decompressed, at most {limits.decompressed_nbytes} are allowed (Limits.decompressed_nbytes)"
        refuse(where, what)
    return rows


def _check_planes(rows: Sequence[_PlaneRow], item_rows: ItemRows, where: object) -> None:
    """The planes must be exactly those that the items need, and as long as the items say; asked before any is opened."""
    expected: dict[PlaneKey, int] = {}
    # Summed as Python ints: nothing wraps.
    for form, chosen in item_rows.by_form():
        nbytes = sum(item_rows.location_nbytes[chosen].tolist())
        expected.update((plane_key, nbytes // form.width) for plane_key in location_keys(form))
    for (encoding, width), chosen in item_rows.by_value():
        nbytes = sum(item_rows.counts[chosen].tolist())
        expected.update((plane_key, nbytes) for plane_key in value_keys(encoding, width))
    stated = {row.key: row.nbytes for row in rows}
    for plane_key in sorted(expected.keys() | stated.keys()):
        if (want := expected.get(plane_key, 0)) != (got := stated.get(plane_key, 0)):
            refuse(where, f"plane {plane_key}: {got} bytes stated, the items need {want}")


def _open_planes(frames: memoryview, rows: Sequence[_PlaneRow], where: object) -> dict[PlaneKey, NDArray[np.uint8]]:
    planes = {}
    position = 0
    for row in rows:
        frame = frames[position : position + row.frame_nbytes]
        planes[row.key] = np.frombuffer(open_frame(frame, row.nbytes, where=where, what=f"plane {row.key}"), np.uint8)
        position += row.frame_nbytes
    return planes


def _split(item_rows: ItemRows, planes: Mapping[PlaneKey, NDArray[np.uint8]]) -> ItemTable:
    """Cut every plane at the items' borders; nothing is copied."""
    forms = [form for form, _ in item_rows.by_form()]
    kinds = [kind for kind, _ in item_rows.by_value()]
    return ItemTable(
        item_rows,
        {form: tuple(planes[plane_key] for plane_key in location_keys(form)) for form in forms},
        {kind: tuple(planes[plane_key] for plane_key in value_keys(*kind)) for kind in kinds},
    )
