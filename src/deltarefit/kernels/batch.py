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
from deltarefit.errors import BaseMismatchError
from deltarefit.kernels import native, twins
from deltarefit.kernels.bound import BoundPieces
from deltarefit.kernels.checks import check_pieces, check_words, common_cast
from deltarefit.kernels.isa import Isa
from deltarefit.kernels.library import ApplyCall, DigestCall, address, library, resolve
from deltarefit.pieces import Cast, Piece
from deltarefit.records import CodedItem

__all__ = ["BoundDigest", "PreparedApply", "digest_many"]

_MOST_THREADS = 8
_CHANGES = 1 << 15
"""Changed elements that are worth handing to another thread."""
_DIGESTED = 1 << 20
"""Elements whose digest is worth it."""


class BoundDigest:
    """Pieces bound to the words whose digest they give: checked and tabulated once."""

    __slots__ = ("_is_strided", "_isa", "_pieces", "_storage", "_table", "_widen", "num_elements")

    def __init__(self, storage: Words, pieces: Sequence[Piece], *, isa: Isa | None = None) -> None:
        """``storage`` must stay where it is.

        Raises:
            RejectedError: storage and pieces do not fit each other.
        """
        check_words(storage, "digest, storage")
        held = tuple(piece.normalised() for piece in pieces if piece.num_elements)
        check_pieces(held, storage, "digest")
        self.num_elements = sum(piece.num_elements for piece in held)
        self._widen = common_cast(held) is Cast.WIDEN
        self._storage, self._pieces, self._isa = storage, held, resolve(isa)
        self._table = native.make_piece_table(held)
        self._is_strided = native.is_strided(held)

    def _plain(self) -> TensorDigest | None:
        try:
            return twins.digest(self._storage, self._pieces)
        except BaseMismatchError:
            return None

    def _fill(self, call: DigestCall) -> None:
        call.storage, call.table, call.pieces = address(self._storage), address(self._table), len(self._pieces)
        call.width = self._storage.dtype.itemsize // (2 if self._widen else 1)
        call.widen, call.offender = self._widen, -1


def digest_many(bound: Sequence[BoundDigest], *, num_threads: int = 0) -> list[TensorDigest | None]:
    """The digest of each; None where a widened element has low bits set, so that it is no 16-bit float.

    Args:
        bound: in any number.
        num_threads: at most; 0 for one per core, up to eight.
    """
    isa = _common_isa(one._isa for one in bound)
    if isa is Isa.NUMPY:
        return [one._plain() for one in bound]
    calls = (DigestCall * len(bound))()
    for call, one in zip(calls, bound, strict=True):
        one._fill(call)
    panel_nbytes = library().deltarefit_panel_nbytes() if any(one._is_strided for one in bound) else 0

    def work(first: int, last: int) -> None:
        panel = np.empty(panel_nbytes, np.uint8)
        start = ctypes.byref(calls, first * ctypes.sizeof(DigestCall))
        library().deltarefit_digest_many(start, last - first, address(panel) if panel_nbytes else None, isa)

    _in_shares([one.num_elements for one in bound], work, _DIGESTED, num_threads)
    return [TensorDigest(call.lane0, call.lane1) if call.offender < 0 else None for call in calls]


class PreparedApply:
    """Items and the pieces that each goes through, checked and tabulated: what is left is to run it.

    No two items may change the same storage element: they are applied in any order, several at the same time.
    """

    __slots__ = ("_calls", "_isa", "_kept", "_work")

    def __init__(self, work: Sequence[tuple[BoundPieces, CodedItem]]) -> None:
        """Pieces, and an item of the tensor that they are bound to.

        Raises:
            PayloadInvalidError: an item is of another tensor, or its columns are not what they must be.
        """
        for bound, item in work:
            bound.check(item)
        self._work = tuple(work)
        self._isa = _common_isa(bound.isa for bound, _ in work)
        num_calls = 0 if self._isa is Isa.NUMPY else len(work)
        self._calls = (ApplyCall * num_calls)()
        self._kept = [bound.fill(call, item) for call, (bound, item) in zip(self._calls, work, strict=False)]

    def run(self, *, num_threads: int = 0) -> int:
        """Apply everything, once per attempt unless it overwrites; returns the storage elements changed.

        Args:
            num_threads: as ``digest_many``.

        Raises:
            PayloadInvalidError: the locations of an item are not what they must be. Of that nothing was written, others may
                have been applied. None is being applied any more.
        """
        if self._isa is Isa.NUMPY:
            return sum(bound.apply_item(item) for bound, item in self._work)
        changed = np.zeros(len(self._work), np.int64)

        def apply(first: int, last: int) -> None:
            start = ctypes.byref(self._calls, first * ctypes.sizeof(ApplyCall))
            library().deltarefit_apply_many(start, last - first, address(changed[first:]), self._isa)

        _in_shares([item.count for _, item in self._work], apply, _CHANGES, num_threads)
        for place in np.flatnonzero(changed < 0).tolist():
            bound, item = self._work[place]
            changed[place] = bound.apply_item(item)  # has the words for what the compiled decoder refused
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
