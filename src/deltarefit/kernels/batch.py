"""Many tensors in one call, on several threads.

A model has tens of thousands of tensors. Calling a kernel for each of them from several threads is slower than from one,
because every call waits for the interpreter (measured: digests of 920 tensors of 1 MiB in 70 ms with two threads, 46 ms with
one, 19 ms in one call per thread). So what a call needs is tabulated first, and a thread runs a share of the table in one call.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from deltarefit.canonical import TensorDigest, Words
from deltarefit.errors import BaseMismatchError, RejectedError
from deltarefit.kernels import twins
from deltarefit.kernels.bound import BoundPieces
from deltarefit.kernels.checks import check_words, check_writeable
from deltarefit.kernels.isa import Isa
from deltarefit.kernels.item_table import ItemTable
from deltarefit.kernels.library import APPLY_CALL, CopyCall, DigestCall, address, library, resolve
from deltarefit.kernels.nans import NAN_RULES
from deltarefit.kernels.native import ApplyTarget, fill_item
from deltarefit.kernels.table import PieceTable
from deltarefit.pieces import Cast, Piece
from deltarefit.records import CodedItem

__all__ = ["BoundDigest", "PreparedApply", "PreparedDigests", "commit_many", "digest_many"]

_MOST_THREADS = 8
_CHANGES = 1 << 15
"""Changed elements that are worth handing to another thread."""
_DIGESTED = 1 << 20
"""Elements whose digest is worth it."""


class BoundDigest:
    """Pieces bound to the words whose digest they give."""

    __slots__ = ("_isa", "_pieces", "_storage")

    def __init__(self, storage: Words, pieces: PieceTable | Sequence[Piece], *, isa: Isa | None = None) -> None:
        """``storage`` must stay where it is.

        Raises:
            RejectedError: storage and pieces do not fit each other.
        """
        self._pieces = pieces if isinstance(pieces, PieceTable) else PieceTable(pieces)
        self._pieces.check(storage, "digest")
        self._storage, self._isa = storage, resolve(isa)

    @property
    def num_elements(self) -> int:
        return self._pieces.num_elements

    def _plain(self) -> TensorDigest | None:
        try:
            return twins.digest(self._storage, self._pieces.pieces)
        except BaseMismatchError:
            return None

    def _fill(self, call: DigestCall) -> None:
        widen = self._pieces.cast is Cast.WIDEN
        call.storage, call.table, call.pieces = address(self._storage), address(self._pieces.table), len(self._pieces.pieces)
        call.width = self._storage.dtype.itemsize // (2 if widen else 1)
        call.widen, call.offender = widen, -1


class PreparedDigests:
    """Many digests that are computed again and again, tabulated once."""

    __slots__ = ("_bound", "_calls", "_isa", "_panel_nbytes", "_weights")

    def __init__(self, bound: Sequence[BoundDigest]) -> None:
        self._bound = tuple(bound)
        self._isa = _common_isa(one._isa for one in bound)
        num_calls = 0 if self._isa is Isa.NUMPY else len(bound)
        self._calls = (DigestCall * num_calls)()
        for call, one in zip(self._calls, bound, strict=False):
            one._fill(call)
        self._weights = [one.num_elements for one in bound]
        is_strided = num_calls and any(one._pieces.is_strided for one in bound)
        self._panel_nbytes = library().deltarefit_panel_nbytes() if is_strided else 0

    def run(self, *, num_threads: int = 0) -> list[TensorDigest | None]:
        """The digest of each; None where a widened element has low bits set, so that it is no 16-bit float.

        Args:
            num_threads: at most; 0 for one per core, up to eight.
        """
        if self._isa is Isa.NUMPY:
            return [one._plain() for one in self._bound]
        calls = type(self._calls).from_buffer_copy(self._calls)

        def work(first: int, last: int) -> None:
            panel = np.empty(self._panel_nbytes, np.uint8)
            start = ctypes.byref(calls, first * ctypes.sizeof(DigestCall))
            library().deltarefit_digest_many(start, last - first, address(panel) if self._panel_nbytes else None, self._isa)

        _in_shares(self._weights, work, _DIGESTED, num_threads)
        return [TensorDigest(call.lane0, call.lane1) if call.offender < 0 else None for call in calls]


def digest_many(bound: Sequence[BoundDigest], *, num_threads: int = 0) -> list[TensorDigest | None]:
    """What ``PreparedDigests`` gives, once."""
    return PreparedDigests(bound).run(num_threads=num_threads)


def commit_many(work: Sequence[tuple[Words, Words, PieceTable, str]], *, isa: Isa | None = None) -> list[int]:
    """Make baselines equal to candidates: absolute values, so that repeating it is harmless (paper 6.3). In one thread.

    Args:
        work: baseline (words in piece order, written), candidate (words of the whole local storage), pieces in any number of
            groups, and the elements' dtype.
        isa: the implementation; None takes the best one here.

    Returns:
        Of each the elements that are NaN; 0 where the dtype has none or is not said.

    Raises:
        RejectedError: baseline, candidate and pieces do not fit each other. Nothing was written.
    """
    for baseline, candidate, pieces, _ in work:
        check_words(baseline, "commit, baseline")
        check_writeable(baseline, "commit, baseline")
        pieces.check(candidate, "commit")
        if baseline.dtype != candidate.dtype or baseline.size != pieces.num_elements:
            expected = f"{pieces.num_elements} words {candidate.dtype}"
            raise RejectedError(f"commit: expected a baseline of {expected}, got {baseline.size} {baseline.dtype}")
    isa = resolve(isa)
    if isa is Isa.NUMPY:
        return [_plain_commit(*one) for one in work]
    calls = (CopyCall * len(work))()
    for call, (baseline, candidate, pieces, dtype) in zip(calls, work, strict=True):
        call.to, call.storage, call.table = address(baseline), address(candidate), address(pieces.table)
        call.pieces, call.width = len(pieces.pieces), candidate.dtype.itemsize
        if rule := NAN_RULES.get(dtype):
            call.counts = True
            call.rule[:] = rule
    panel_nbytes = library().deltarefit_panel_nbytes() if any(pieces.is_strided for _, _, pieces, _ in work) else 0
    panel = np.empty(panel_nbytes, np.uint8)
    library().deltarefit_copy_many(ctypes.byref(calls), len(work), address(panel) if panel_nbytes else None, isa)
    return [call.counted for call in calls]


def _plain_commit(baseline: Words, candidate: Words, pieces: PieceTable, dtype: str) -> int:
    twins.commit(baseline, candidate, pieces.pieces)
    return twins.count_nans(baseline, NAN_RULES.get(dtype))


class PreparedApply:
    """Items and the pieces that each goes through, checked and tabulated: what is left is to run it.

    They are applied in any order, several at the same time. So no two may change the same storage element, unless both
    overwrite it with the same bits, as items of tied weights do.
    """

    __slots__ = ("_bound", "_calls", "_counts", "_isa", "_items", "_kept")

    def __init__(self, bound: Sequence[BoundPieces], items: Sequence[CodedItem]) -> None:
        """Item after item goes through the pieces in the same place, which are bound to its tensor. Tables are quickest.

        Raises:
            PayloadInvalidError: an item is of another tensor, or its columns are not what they must be.
            RejectedError: there are more or fewer pieces than items.
        """
        if len(bound) != len(items):
            raise RejectedError(f"apply: expected pieces for each of {len(items)} items, got {len(bound)}")
        self._bound, self._items = tuple(bound), items
        self._isa = _common_isa(one.isa for one in bound)
        num_calls = 0 if self._isa is Isa.NUMPY else len(bound)
        self._calls = np.zeros(num_calls, APPLY_CALL)
        if isinstance(items, ItemTable):
            self._kept: object = items
            self._counts = items.rows.counts.tolist()
            for one, spec in zip(bound, items.rows.specs, strict=True):
                one.check_spec(spec)
            if num_calls:
                items.fill_calls(self._calls)
        else:
            self._counts = [item.count for item in items]
            for one, item in zip(bound, items, strict=True):
                one.check(item)
            self._kept = [fill_item(call, item) for call, item in zip(self._calls, items, strict=False)]
        if num_calls:
            targets = np.array([one.target for one in bound], np.int64)
            for number, name in enumerate(ApplyTarget._fields):
                self._calls[name] = targets[:, number]

    def run(self, *, num_threads: int = 0) -> int:
        """Apply everything, once per attempt unless it overwrites; returns the storage elements changed.

        Args:
            num_threads: as ``digest_many``.

        Raises:
            PayloadInvalidError: the locations of an item are not what they must be. Of that nothing was written, others may
                have been applied. None is being applied any more.
        """
        if self._isa is Isa.NUMPY:
            return sum(one.apply_item(item) for one, item in zip(self._bound, self._items, strict=True))
        changed = np.zeros(len(self._bound), np.int64)

        def apply(first: int, last: int) -> None:
            if first < last:
                calls, results = self._calls[first:last], changed[first:last]
                library().deltarefit_apply_many(address(calls), last - first, address(results), self._isa)

        _in_shares(self._counts, apply, _CHANGES, num_threads)
        for place in np.flatnonzero(changed < 0).tolist():
            # Has the words for what the compiled decoder refused.
            changed[place] = self._bound[place].apply_item(self._items[place])
        return int(changed.sum())


def _common_isa(isas: Iterable[Isa]) -> Isa:
    """The least of them; they only differ in tests."""
    return min(isas, default=Isa.NUMPY)


def _in_shares(weights: Sequence[int], work: Callable[[int, int], None], least: int, num_threads: int) -> None:
    """``work`` on contiguous ranges: about four per thread, so that none waits long for the last; fewer if there is little."""
    num_threads = num_threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    most = max(least, sum(weights) // (4 * num_threads))
    starts, filled = [0], 0
    for place, weight in enumerate(weights):
        if filled >= most:
            starts.append(place)
            filled = 0
        filled += weight
    ranges = list(zip(starts, [*starts[1:], len(weights)], strict=True))
    if num_threads == 1 or len(ranges) < 2:
        work(0, len(weights))
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="deltarefit-share") as pool:
        for future in [pool.submit(work, first, last) for first, last in ranges]:
            future.result()
