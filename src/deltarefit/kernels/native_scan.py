"""Drives the compiled scan: gives it output memory, lets that grow, and picks the form that travels.

The scan runs until it is done, or its output is full, or its gaps need another form; it keeps its progress and goes on where it
stopped. Output memory grows by what the density so far predicts, so little more is ever held than what is returned
(reach: 1.1 times the outputs).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import TensorDigest, TensorSpec, Words
from deltarefit.kernels.coding import (
    GapTotals,
    code_locations,
    decode_gaps,
    is_dense_smaller,
    smallest_form,
)
from deltarefit.kernels.isa import Isa
from deltarefit.kernels.library import ScanCall, address, library
from deltarefit.kernels.native import shorten_gaps
from deltarefit.kernels.table import PieceTable
from deltarefit.records import CodedItem, Encoding, LocationForm, Plane, ScanResult

__all__ = ["ESCAPE_ALLOWANCE", "FIRST_CAPACITY", "FULL", "SPARE", "UNSETTLED", "WIDEN_GAPS", "scan"]

FULL, WIDEN_GAPS, UNSETTLED = 1, 2, 3
FIRST_CAPACITY = 64 * 1024
"""Elements that the first output memory holds; a shard of no more elements never needs a second."""
_MANY = 2**62
"""More escapes than any shard has: rules the GAPS form out."""
ESCAPE_ALLOWANCE = 4096
"""Escapes beyond one per element that are suffered before gaps are widened."""
SPARE = 1.03
"""Factor on the predicted number of changed elements."""
_PROGRESS = (
    *("scanned", "count", "location_nbytes", "first", "last", "escapes", "max_gap"),
    *("pending_gap", "pending_count", "pending_nbytes", "lane0", "lane1"),
)


class _Scan:
    """One pass of the compiled scan over a group of pieces, with the output that it has so far."""

    def __init__(
        self,
        spec: TensorSpec,
        candidate: Words,
        baseline: Words,
        table: PieceTable,
        encoding: Encoding,
        isa: Isa,
        *,
        form: LocationForm,
        everything: bool,
    ) -> None:
        self._spec, self._encoding, self._isa, self._form = spec, encoding, isa, form
        self._total = table.num_elements
        self._keep = (candidate, baseline, table)
        scratch_nbytes = library().deltarefit_scan_scratch_nbytes(spec.element_nbytes, self._total, table.is_strided)
        self._scratch = np.empty(scratch_nbytes, np.uint8)
        capacity = self._total if everything else min(self._total, FIRST_CAPACITY)
        self._values = [np.empty(capacity, np.uint8) for _ in range(spec.element_nbytes)]
        self._locations = [np.empty(capacity, np.uint8)] if form is not LocationForm.RUN else []
        self._call = ScanCall(
            candidate=address(candidate),
            baseline=address(baseline),
            table=address(table.table),
            scratch=address(self._scratch),
            pieces=len(table.pieces),
            elements=self._total,
            width=spec.element_nbytes,
            encoding=encoding,
            everything=everything,
            escape_allowance=ESCAPE_ALLOWANCE,
        )

    @property
    def digest_change(self) -> TensorDigest:
        return TensorDigest(self._call.lane0, self._call.lane1)

    @property
    def _totals(self) -> GapTotals:
        call = self._call
        return GapTotals(call.count, call.escapes, call.max_gap, reach=call.last + 1 - call.first - call.count)

    def go_on_from(self, call: NDArray[np.void], locations: Plane, values: Sequence[Plane]) -> None:
        """Take over what another call of this shard, in form GAPS, has found so far: a row of ``SCAN_CALL`` and its planes."""
        for name in _PROGRESS:
            setattr(self._call, name, int(call[name]))
        room = max(self._values[0].size, self._call.count)
        self._values = [_grown(plane.copy(), plane.size, room) for plane in values]
        self._locations = [_grown(locations.copy(), locations.size, max(room, locations.size))]

    def finish(self, *, stop_when_dense: bool) -> bool:
        """Scan to the end. False if it was given up because the dense form is certain to be smaller."""
        while status := self._run():
            if status == WIDEN_GAPS:
                self._widen_gaps()
            elif stop_when_dense and self._is_surely_dense():
                return False
            else:
                self._grow()
        return True

    def is_dense_smaller(self) -> bool:
        """Whether the shard takes fewer bytes whole than as the elements that were found."""
        count, width = self._call.count, self._spec.element_nbytes
        if count * (width + LocationForm.WIDE8.width) <= self._total * width:  # no form takes more
            return False
        return count > 0 and is_dense_smaller(self._totals, width, self._total)

    def item(self) -> CodedItem | None:
        """The finished item, in its smallest form; None if nothing was emitted. Ends this scan: its memory is given away."""
        call = self._call
        if not call.count:
            return None
        form = smallest_form(self._totals)
        return CodedItem(
            spec=self._spec,
            encoding=self._encoding,
            location_form=form,
            start=call.first,
            count=call.count,
            location_planes=self._locations_as(form),
            value_planes=tuple(_trimmed(plane, call.count) for plane in self._values),
        )

    def _locations_as(self, form: LocationForm) -> tuple[Plane, ...]:
        if form is LocationForm.RUN:
            return ()
        nbytes = self._call.location_nbytes
        if form is LocationForm.SHORT_GAPS and self._form is LocationForm.GAPS:
            return (shorten_gaps(self._locations[0], nbytes, self._isa),)
        locations = tuple(_trimmed(plane, nbytes) for plane in self._locations)
        return locations if form is self._form else code_locations(decode_gaps(locations, self._form), form)

    def _run(self) -> int:
        call = self._call
        for number, plane in enumerate(self._locations):
            call.locations[number] = address(plane)
        for number, plane in enumerate(self._values):
            call.values[number] = address(plane)
        call.form = self._form
        call.location_capacity = self._locations[0].size if self._locations else 0
        call.value_capacity = self._values[0].size
        return int(library().deltarefit_scan(ctypes.byref(call), self._isa))

    def _is_surely_dense(self) -> bool:
        """Whether the elements so far, at one location byte each, already outweigh the dense form."""
        width = self._spec.element_nbytes
        return not self._totals.is_run and self._call.count * (width + 1) > self._total * width

    def _predicted(self, so_far: int, pending: int) -> int:
        """Room for ``so_far`` and ``pending`` more, and for what the density so far predicts for the rest of the shard."""
        done = max(1, self._call.scanned)
        return so_far + pending + int(so_far * (self._total - self._call.scanned) / done * SPARE) + pending

    def _grow(self) -> None:
        call = self._call
        capacity = min(self._total, self._predicted(call.count, call.pending_count))
        self._values = [_grown(plane, call.count, capacity) for plane in self._values]
        if self._locations:
            nbytes = self._predicted(call.location_nbytes, call.pending_nbytes)
            self._locations = [_grown(plane, call.location_nbytes, nbytes) for plane in self._locations]

    def _widen_gaps(self) -> None:
        """Code the locations so far in the narrowest wide form that also fits the gap that is next."""
        call = self._call
        longest = max(call.max_gap, call.pending_gap)
        form = smallest_form(GapTotals(1, escapes=_MANY, max_gap=longest, reach=longest))
        gaps = decode_gaps([plane[: call.location_nbytes] for plane in self._locations], self._form)
        planes = code_locations(gaps, form)
        self._form = form
        call.location_nbytes = call.count
        self._locations = [_grown(plane, call.count, self._values[0].size) for plane in planes]


def _grown(plane: Plane, used: int, capacity: int) -> Plane:
    """The plane with room for ``capacity`` bytes. Growing in place is free of copies for large planes, but fills with zeros."""
    if capacity <= plane.size:
        return plane
    if used * 4 > capacity and plane.flags.owndata:
        plane.resize(capacity, refcheck=False)
        return plane
    larger = np.empty(capacity, np.uint8)
    larger[:used] = plane[:used]
    return larger


def _trimmed(plane: Plane, nbytes: int) -> Plane:
    """The plane cut to its used bytes; the rest of its memory is given back."""
    if plane.size != nbytes:
        plane.resize(nbytes, refcheck=False)
    return plane


def scan(
    spec: TensorSpec,
    candidate: Words,
    baseline: Words,
    table: PieceTable,
    encoding: Encoding,
    *,
    everything: bool,
    isa: Isa,
    found: tuple[NDArray[np.void], Plane, Sequence[Plane]] | None = None,
) -> ScanResult:
    """The scan of one shard; ``found``: see ``_Scan.go_on_from``."""
    contiguous = table.is_contiguous
    may_turn_dense = contiguous and not everything
    form = LocationForm.RUN if everything and contiguous else LocationForm.GAPS
    run = _Scan(spec, candidate, baseline, table, encoding, isa, form=form, everything=everything)
    if found is not None:
        run.go_on_from(*found)
    if run.finish(stop_when_dense=may_turn_dense):
        change = run.digest_change
        if not (may_turn_dense and run.is_dense_smaller()):
            return ScanResult(run.item(), change)
    del run
    dense = _Scan(spec, candidate, baseline, table, encoding, isa, form=LocationForm.RUN, everything=True)
    dense.finish(stop_when_dense=False)
    return ScanResult(dense.item(), dense.digest_change)
