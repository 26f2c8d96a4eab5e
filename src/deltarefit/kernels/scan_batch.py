"""Scans of many shards in a few calls of the compiled kernels, into output memory that they share.

A scan by itself costs some 80 us of Python, as much as comparing 100,000 elements. Here a shard costs its row of a table and
what is returned of it. The planes of the items of one call lie one behind another, so a bucket of them is joined in no time.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import TensorDigest, TensorSpec, Words
from deltarefit.kernels import native_scan
from deltarefit.kernels.coding import (
    SHORT_COUNT,
    SHORT_ESCAPES,
    SHORT_MEAN,
    GapTotals,
    code_locations,
    decode_gaps,
    is_dense_smaller,
    smallest_form,
)
from deltarefit.kernels.isa import Isa
from deltarefit.kernels.library import SCAN_CALL, ScanCalls, address, library
from deltarefit.kernels.native import shorten_gaps
from deltarefit.kernels.native_scan import ESCAPE_ALLOWANCE, FIRST_CAPACITY, FULL, SPARE, UNSETTLED
from deltarefit.kernels.table import PieceTable
from deltarefit.records import CodedItem, Encoding, LocationForm, Plane, ScanResult

__all__ = ["ScanJob", "scan_jobs"]

_MOST_ELEMENTS = 1 << 25
"""Elements of one call. Memory is predicted from the density so far, which other layers may not have."""
_LARGE_ELEMENTS = 1 << 23
"""Shards from so many elements on are scanned one by one: what they have found so far should not be moved."""


_FOUND = ("form", "first", "count", "location_nbytes", "lane0", "lane1")
_FORMS = {int(form): form for form in LocationForm}


class ScanJob(NamedTuple):
    """A shard to compare with its baseline: the arguments of ``scan``."""

    spec: TensorSpec
    candidate: Words
    baseline: Words
    table: PieceTable
    encoding: Encoding


def scan_jobs(jobs: Sequence[ScanJob], isa: Isa) -> Iterator[ScanResult]:
    """The results of checked jobs, in their order."""
    for width, same in itertools.groupby(jobs, _kind):
        if width:
            for some in _portions(same):
                yield from _Batch(some, isa).run()
        else:
            for job in same:
                yield (
                    native_scan.scan(*job, everything=False, isa=isa) if job.table.pieces else ScanResult(None, TensorDigest())
                )


def _kind(job: ScanJob) -> int:
    """Jobs of one width can share a call; 0 for those that stand alone."""
    return job.spec.element_nbytes if 0 < job.table.num_elements < _LARGE_ELEMENTS else 0


def _portions(jobs: Iterator[ScanJob]) -> Iterator[list[ScanJob]]:
    some: list[ScanJob] = []
    filled = 0
    for job in jobs:
        if some and filled + job.table.num_elements > _MOST_ELEMENTS:
            yield some
            some, filled = [], 0
        some.append(job)
        filled += job.table.num_elements
    if some:
        yield some


class _Batch:
    """Jobs of one width, and the output memory that they fill."""

    def __init__(self, jobs: Sequence[ScanJob], isa: Isa) -> None:
        self._jobs, self._isa = jobs, isa
        self._width = jobs[0].spec.element_nbytes
        self._results: list[ScanResult | None] = [None] * len(jobs)
        self._apart: dict[int, tuple[Plane, ...]] = {}
        """Location planes of items that have them to themselves."""
        self._sizes = np.array([job.table.num_elements for job in jobs], np.int64)
        self._calls = self._make_calls()
        self._batch = ScanCalls(
            calls=address(self._calls),
            num_calls=len(jobs),
            short_count=SHORT_COUNT,
            short_mean=SHORT_MEAN,
            short_escapes=SHORT_ESCAPES,
        )
        self._closed = 0
        """Jobs whose results are final."""
        self._emitted = np.zeros(2, np.int64)
        """Elements and location bytes of the output memory that was filled before this one."""
        self._opened_for = -1
        """The job that ran when this memory was opened. If that is not enough either, the batch so far predicts it badly:
        it goes on alone, by its own density, so that what it has found is moved twice at most."""
        room = min(int(self._sizes.sum()), FIRST_CAPACITY)
        self._open_memory(room, room)

    def _make_calls(self) -> NDArray[np.void]:
        jobs = self._jobs
        strided = any(job.table.is_strided for job in jobs)
        nbytes = library().deltarefit_scan_scratch_nbytes(self._width, int(self._sizes.max()), strided)
        self._scratch = np.empty(nbytes, np.uint8)
        calls = np.zeros(len(jobs), SCAN_CALL)
        calls["candidate"] = [address(job.candidate) for job in jobs]
        calls["baseline"] = [address(job.baseline) for job in jobs]
        calls["table"] = [job.table.address for job in jobs]
        calls["pieces"] = [len(job.table.pieces) for job in jobs]
        calls["encoding"] = [job.encoding for job in jobs]
        calls["may_be_dense"] = [job.table.is_contiguous for job in jobs]
        calls["elements"] = self._sizes
        # So that gaps are widened at the end, and nowhere on the way but for pieces that lie far apart.
        calls["escape_allowance"] = ESCAPE_ALLOWANCE + self._sizes // 128
        calls["scratch"], calls["width"], calls["form"] = address(self._scratch), self._width, LocationForm.GAPS
        return calls

    def _open_memory(self, capacity: int, location_capacity: int) -> None:
        batch = self._batch
        self._locations = np.empty(location_capacity, np.uint8)
        self._values = [np.empty(capacity, np.uint8) for _ in range(self._width)]
        batch.locations, batch.location_capacity, batch.value_capacity = address(self._locations), location_capacity, capacity
        for number, plane in enumerate(self._values):
            batch.values[number] = address(plane)
        batch.location_nbytes = batch.count = 0

    def run(self) -> list[ScanResult]:
        while status := library().deltarefit_scan_many(ctypes.byref(self._batch), self._isa):
            if status == UNSETTLED:
                self._settle()
            elif status == FULL and self._opened_for != self._batch.next and not self._is_surely_dense():
                self._make_room()
            else:
                self._scan_alone()
        self._close_memory()
        return [result for result in self._results if result is not None]

    @property
    def _call(self) -> NDArray[np.void]:
        """Of the job that is to be settled."""
        call: NDArray[np.void] = self._calls[self._batch.next]
        return call

    def _found(self) -> tuple[Plane, list[Plane]]:
        """What that job has emitted, in memory that is used again."""
        batch, call = self._batch, self._call
        start, count = batch.count, int(call["count"])
        locations = self._locations[batch.location_nbytes : batch.location_nbytes + int(call["location_nbytes"])]
        return locations, [plane[start : start + count] for plane in self._values]

    def _is_surely_dense(self) -> bool:
        call = self._call
        count = int(call["count"])
        is_run = int(call["last"]) + 1 - int(call["first"]) == count
        return bool(call["may_be_dense"]) and not is_run and count * (self._width + 1) > int(call["elements"]) * self._width

    def _settle(self) -> None:
        """A job that ran to its end and that the kernel does not settle: it may be dense, or was short of memory for a form."""
        batch, call = self._batch, self._call
        count = int(call["count"])
        reach = int(call["last"]) + 1 - int(call["first"]) - count
        totals = GapTotals(count, int(call["escapes"]), int(call["max_gap"]), reach)
        if call["may_be_dense"]:
            if is_dense_smaller(totals, self._width, int(call["elements"])):
                self._scan_alone()
            else:
                call["may_be_dense"] = 0  # the kernel finds its scan complete and settles it
            return
        locations, _ = self._found()
        form = smallest_form(totals)
        if form is LocationForm.SHORT_GAPS:
            self._apart[batch.next] = (shorten_gaps(locations.copy(), locations.size, self._isa),)
        else:
            self._apart[batch.next] = code_locations(decode_gaps([locations], LocationForm.GAPS), form)
        call["form"] = form
        batch.count += count
        batch.next += 1

    def _scan_alone(self) -> None:
        """Go on with a job in memory of its own."""
        batch = self._batch
        self._results[batch.next] = native_scan.scan(
            *self._jobs[batch.next], everything=False, isa=self._isa, found=(self._call, *self._found())
        )
        batch.next += 1

    def _make_room(self) -> None:
        """New memory for what the density so far predicts for the rest of the batch."""
        batch, call = self._batch, self._call
        locations, values = self._found()
        done = int(self._sizes[: batch.next].sum()) + int(call["scanned"])
        left = int(self._sizes.sum()) - done
        here = np.array([batch.count + values[0].size, batch.location_nbytes + locations.size])
        emitted = self._emitted + here
        predicted = (emitted * (left / max(1, done) * SPARE)).astype(np.int64)
        pending = (int(call["pending_count"]), int(call["pending_nbytes"]))
        capacity = min(int(predicted[0]) + 2 * pending[0], left) + values[0].size
        location_capacity = int(predicted[1]) + 2 * pending[1] + locations.size
        old = (locations.copy(), [plane.copy() for plane in values])
        del locations, values
        self._emitted += (batch.count, batch.location_nbytes)
        self._close_memory()
        self._open_memory(capacity, location_capacity)
        self._opened_for = batch.next
        self._locations[: old[0].size] = old[0]
        for plane, part in zip(self._values, old[1], strict=True):
            plane[: part.size] = part

    def _close_memory(self) -> None:
        """Cut the memory to what is used, and make the items that lie in it."""
        batch = self._batch
        rows = self._calls[self._closed : batch.next]
        location_at = (rows["locations"][:, 0] - np.uint64(batch.locations or 0)).tolist()
        value_at = (rows["values"][:, 0] - np.uint64(batch.values[0] or 0)).tolist()
        # Before views of them exist: they may move.
        self._locations.resize(batch.location_nbytes, refcheck=False)
        for plane in self._values:
            plane.resize(batch.count, refcheck=False)
        columns = [rows[name].tolist() for name in _FOUND]
        for row, found in enumerate(zip(location_at, value_at, *columns, strict=True), self._closed):
            if self._results[row] is None:
                self._results[row] = self._result(row, *found)
        self._closed = batch.next

    def _result(
        self, row: int, location_at: int, value_at: int, code: int, first: int, count: int, nbytes: int, lane0: int, lane1: int
    ) -> ScanResult:
        change = TensorDigest(lane0, lane1)
        if not count:
            return ScanResult(None, change)
        job, form = self._jobs[row], _FORMS[code]
        locations = self._apart.get(row, ())
        if form.width and not locations:
            step = nbytes // form.width
            starts = range(location_at, location_at + nbytes, step)
            locations = tuple([self._locations[start : start + step] for start in starts])
        values = tuple([plane[value_at : value_at + count] for plane in self._values])
        return ScanResult(CodedItem(job.spec, job.encoding, form, first, count, locations, values), change)
