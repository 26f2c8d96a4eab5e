"""Calls of the compiled kernels other than the scan: addresses, results.

Every function expects what ``twins`` expects: normalised, non-empty, checked pieces.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import TensorDigest, Words
from deltarefit.errors import BaseMismatchError
from deltarefit.kernels.checks import widened_text
from deltarefit.kernels.coding import PlaneTotals
from deltarefit.kernels.isa import Isa
from deltarefit.kernels.library import APPLY_CALL, PLANE_TOTALS, ApplyCall, CopyCall, DigestCall, address, library
from deltarefit.kernels.table import PieceTable
from deltarefit.pieces import Cast
from deltarefit.records import CodedItem, Encoding, Plane

__all__ = [
    "ApplyTarget",
    "apply_item",
    "apply_positions",
    "digest",
    "digest_elements",
    "fill_item",
    "gather",
    "plane_totals",
    "read_both",
    "shorten_gaps",
    "totals_of_parts",
]


def _panel(table: PieceTable) -> NDArray[np.uint8] | None:
    """Scratch memory for strided runs; None if there are none."""
    return np.empty(library().deltarefit_panel_nbytes(), np.uint8) if table.is_strided else None


def gather(target: Words, storage: Words, table: PieceTable) -> None:
    """Copy the pieces' elements of ``storage`` to ``target`` in piece order, for somebody who reads them soon."""
    panel = _panel(table)
    call = CopyCall(
        to=address(target),
        storage=address(storage),
        table=table.address,
        pieces=len(table.pieces),
        width=storage.dtype.itemsize,
    )
    # The portable copy, for it leaves what it writes in the caches.
    library().deltarefit_copy_many(ctypes.byref(call), 1, None if panel is None else address(panel), Isa.PORTABLE)


def digest(storage: Words, table: PieceTable, isa: Isa) -> TensorDigest:
    panel = _panel(table)
    widen = table.cast is Cast.WIDEN
    call = DigestCall(
        storage=address(storage),
        table=table.address,
        scratch=None if panel is None else address(panel),
        pieces=len(table.pieces),
        width=storage.dtype.itemsize // (2 if widen else 1),
        widen=widen,
        offender=-1,
    )
    library().deltarefit_digest(ctypes.byref(call), isa)
    if call.offender >= 0:
        raise BaseMismatchError(widened_text(call.offender))
    return TensorDigest(call.lane0, call.lane1)


def digest_elements(flat_index: NDArray[np.int64], bits: Words) -> TensorDigest:
    lanes = np.zeros(2, np.uint64)
    index = np.ascontiguousarray(flat_index)
    library().deltarefit_digest_elements(address(index), address(bits), bits.size, bits.dtype.itemsize, address(lanes))
    return TensorDigest(int(lanes[0]), int(lanes[1]))


def apply_positions(
    storage: Words,
    table: PieceTable,
    positions: NDArray[np.int64],
    values: Words,
    encoding: Encoding,
    isa: Isa,
) -> int:
    """Elements changed, or a negative number if positions do not ascend from 0, in which case nothing was written."""
    contiguous = np.ascontiguousarray(positions)
    call = ApplyCall(
        storage=address(storage),
        table=table.address,
        positions=address(contiguous),
        words=address(values),
        pieces=len(table.pieces),
        width=values.dtype.itemsize,
        widen=table.cast is Cast.WIDEN,
        encoding=encoding,
        count=values.size,
    )
    return int(library().deltarefit_apply(ctypes.byref(call), isa))


class ApplyTarget(NamedTuple):
    """Where items of one tensor go, by the names of ``ApplyCall``; whoever made it keeps the memory."""

    storage: int
    """Address."""
    table: int
    """Address."""
    pieces: int
    """How many."""
    widen: bool


def fill_item(call: Any, item: CodedItem) -> object:
    """Have ``call``, a row of ``APPLY_CALL``, apply an item, for which ``coding.check_columns`` holds.

    What is returned must outlive the call.
    """
    call["width"], call["encoding"], call["form"] = item.spec.element_nbytes, item.encoding, item.location_form
    call["start"], call["count"], call["num_elements"] = item.start, item.count, item.spec.num_elements
    call["location_nbytes"] = item.location_planes[0].size if item.location_planes else 0
    kept = []
    for slots, planes in ((call["locations"], item.location_planes), (call["values"], item.value_planes)):
        for number, plane in enumerate(planes):
            whole = plane if plane.flags.c_contiguous else plane.copy()
            kept.append(whole)
            slots[number] = address(whole)
    return kept


def apply_item(target: ApplyTarget, item: CodedItem, isa: Isa) -> int:
    """Elements changed, or a negative number if the locations are not valid, in which case nothing was written."""
    calls = np.zeros(1, APPLY_CALL)
    kept = fill_item(calls[0], item)
    calls["storage"], calls["table"], calls["pieces"], calls["widen"] = target
    changed = np.zeros(1, np.int64)
    library().deltarefit_apply_many(address(calls), 1, address(changed), isa)
    del kept  # what the call points to
    return int(changed[0])


def plane_totals(plane: Plane, escape: int, isa: Isa) -> PlaneTotals:
    whole = np.ascontiguousarray(plane)
    totals = np.empty(1, PLANE_TOTALS)
    library().deltarefit_plane_totals(address(whole), whole.size, escape, isa, address(totals))
    return PlaneTotals(*totals[0].tolist())


def totals_of_parts(
    plane: Plane, starts: NDArray[np.int64], nbytes: NDArray[np.int64], escape: int, isa: Isa
) -> NDArray[np.void]:
    """``plane_totals`` of each part of a contiguous plane."""
    totals = np.empty(starts.size, PLANE_TOTALS)
    library().deltarefit_totals_of_parts(
        address(plane), address(starts), address(nbytes), starts.size, escape, isa, address(totals)
    )
    return totals


def shorten_gaps(plane: Plane, nbytes: int, isa: Isa) -> Plane:
    """The SHORT_GAPS of the GAPS in the first ``nbytes`` of a plane that owns its memory: in place, so that one is held."""
    shortened_nbytes = library().deltarefit_shortened_nbytes(address(plane), nbytes, isa)
    plane.resize(shortened_nbytes, refcheck=False)
    library().deltarefit_shorten_gaps(address(plane), nbytes, shortened_nbytes, isa)
    return plane


def read_both(left: Words, right: Words, isa: Isa) -> None:
    """Read two arrays of equal length and nothing else: the limit that benchmarks compare the scan with."""
    library().deltarefit_read_both(address(left), address(right), min(left.nbytes, right.nbytes), isa)
