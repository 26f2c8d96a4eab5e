"""The kernels' public functions: validate everything, then run the twin or the compiled path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import TensorDigest, TensorSpec, Words
from deltarefit.errors import PayloadInvalidError, RejectedError
from deltarefit.kernels import native, native_scan, twins
from deltarefit.kernels.bound import BoundPieces
from deltarefit.kernels.checks import check_target, check_words
from deltarefit.kernels.coding import PlaneTotals
from deltarefit.kernels.isa import Isa
from deltarefit.kernels.library import available_isas, resolve
from deltarefit.kernels.mix import digest_of_elements
from deltarefit.kernels.nans import NAN_RULES
from deltarefit.kernels.scan_batch import ScanJob, scan_jobs
from deltarefit.kernels.table import PieceTable, tabulate
from deltarefit.pieces import Piece
from deltarefit.records import CodedItem, Encoding, Plane, ScanResult

__all__ = [
    "apply",
    "apply_item",
    "available_isas",
    "count_nans",
    "digest",
    "digest_records",
    "gather",
    "plane_totals",
    "scan",
    "scan_many",
]


def scan(
    spec: TensorSpec,
    candidate: Words,
    baseline: Words,
    pieces: PieceTable | Sequence[Piece],
    encoding: Encoding,
    *,
    everything: bool = False,
    isa: Isa | None = None,
) -> ScanResult:
    """Compare a shard with its baseline and code the elements whose bits differ (paper 4.1, 5).

    Args:
        spec: the canonical tensor.
        candidate: words of the whole local storage; the pieces' storage side addresses it.
        baseline: words of the pieces' elements in piece order: piece after piece, each row-major once normalised.
        pieces: one group of ``merge_pieces``, all of cast ``SAME``; scans of many tensors are quicker with tables of theirs.
        encoding: how values are coded.
        everything: code all elements, changed or not (a dense attempt).
        isa: the implementation; None takes the best one here.

    Returns:
        The item in its smallest location form, dense (a run over the whole group) where the sparse form would be larger, or no
        item if nothing differs; and what the change adds to the tensor's digest.

    Raises:
        RejectedError: words, pieces and spec do not fit each other.
    """
    table = tabulate(pieces)
    _check_shard(ScanJob(spec, candidate, baseline, table, encoding))
    if not table.pieces:
        return ScanResult(None, TensorDigest())
    if (chosen := resolve(isa)) is Isa.NUMPY:
        return twins.scan(spec, candidate, baseline, table.pieces, encoding, everything=everything)
    return native_scan.scan(spec, candidate, baseline, table, encoding, everything=everything, isa=chosen)


def scan_many(jobs: Sequence[ScanJob], *, isa: Isa | None = None) -> list[ScanResult]:
    """What ``scan`` gives for each job, in fewer calls: for tensors by the thousand.

    Planes of several items may share memory, which stays as long as one of them does.

    Raises:
        RejectedError: words, pieces and spec of a job do not fit each other. Nothing was scanned.
    """
    for job in jobs:
        _check_shard(job)
    if (chosen := resolve(isa)) is Isa.NUMPY:
        return [scan(*job, isa=chosen) for job in jobs]
    return list(scan_jobs(jobs, chosen))


def _check_shard(job: ScanJob) -> None:
    spec, candidate, baseline, table, _ = job
    try:
        check_words(candidate, "candidate")
        check_words(baseline, "baseline")
        for words, name in ((candidate, "candidate"), (baseline, "baseline")):
            if words.dtype != spec.word_dtype:
                raise RejectedError(f"expected {spec.word_dtype} words in the {name}, got {words.dtype}")
        table.check_shard(candidate, spec)
        if baseline.size != table.num_elements:
            raise RejectedError(f"expected a baseline of {table.num_elements} words, got {baseline.size}")
    except RejectedError as error:
        raise RejectedError(f"scan of {spec}: {error}") from None


def apply(
    storage: Words,
    pieces: Sequence[Piece],
    positions: NDArray[np.int64],
    values: Words,
    encoding: Encoding,
    *,
    isa: Isa | None = None,
) -> int:
    """Change exactly the elements of ``pieces`` whose flat index is among ``positions``.

    Args:
        storage: words of the whole receiver storage, of the width after the cast.
        pieces: disjoint boxes of one canonical tensor, in any order.
        positions: flat indices, strictly ascending, shape [n]; those that no piece holds are skipped.
        values: words of the canonical width, shape [n]: new bits, or plain (not zigzagged) differences or masks.
        encoding: what the values are.
        isa: the implementation; None takes the best one here.

    Returns:
        How many storage elements were changed.

    Raises:
        RejectedError: storage, pieces and values do not fit each other. Nothing was written.
        PayloadInvalidError: positions do not ascend or differ in number from the values. Nothing was written.
    """
    table = tabulate(pieces)
    check_words(values, "apply, values")
    table.check(storage, "apply")
    check_target(storage, table.pieces, values.dtype.itemsize, "apply")
    if positions.dtype != np.int64 or positions.shape != values.shape:
        raise PayloadInvalidError(
            f"apply: expected {values.size} int64 positions, got {positions.dtype} of shape {positions.shape}"
        )
    if (chosen := resolve(isa)) is Isa.NUMPY:
        ascending = not positions.size or (positions[0] >= 0 and bool((np.diff(positions) > 0).all()))
        applied = twins.apply(storage, table.pieces, positions, values, encoding) if ascending else -1
    else:
        applied = native.apply_positions(storage, table, positions, values, encoding, chosen)
    if applied < 0:
        raise PayloadInvalidError("apply: expected strictly ascending positions from 0")
    return applied


def apply_item(storage: Words, pieces: Sequence[Piece], item: CodedItem, *, isa: Isa | None = None) -> int:
    """Decode an item and apply it through ``pieces``: the same as ``apply`` of its positions and values, in one pass.

    Raises:
        RejectedError: storage, pieces and the item's tensor do not fit each other. Nothing was written.
        PayloadInvalidError: the item's columns are not what they must be. Nothing was written.
    """
    return BoundPieces(storage, pieces, item.spec, isa=isa).apply_item(item)


def gather(storage: Words, pieces: Sequence[Piece], *, isa: Isa | None = None) -> Words:
    """A contiguous copy of the pieces' elements in piece order, in the storage's words: the way baselines are made.

    Raises:
        RejectedError: storage and pieces do not fit each other.
    """
    table = tabulate(pieces)
    table.check(storage, "gather")
    if resolve(isa) is Isa.NUMPY:
        return twins.gather(storage, table.pieces)
    gathered = np.empty(table.num_elements, storage.dtype)
    native.gather(gathered, storage, table)
    return gathered


def count_nans(words: Words, dtype: str) -> int:
    """Elements of flat words that are NaN."""
    check_words(words, "count of NaN, words")
    return twins.count_nans(words, NAN_RULES.get(dtype))


def digest(storage: Words, pieces: Sequence[Piece], *, isa: Isa | None = None) -> TensorDigest:
    """Digest of all elements of the pieces as canonical bits; widened elements count as their upper 16 bits.

    Raises:
        RejectedError: storage and pieces do not fit each other.
        BaseMismatchError: a widened element has low bits set, so it is no 16-bit float.
    """
    table = tabulate(pieces)
    table.check(storage, "digest")
    if (chosen := resolve(isa)) is Isa.NUMPY:
        return twins.digest(storage, table.pieces)
    return native.digest(storage, table, chosen)


def digest_records(flat_index: NDArray[np.int64], bits: Words, *, isa: Isa | None = None) -> TensorDigest:
    """Digest of single elements, each listed once, in any order: flat indices and canonical bits, both of shape [n].

    Raises:
        RejectedError: the arrays do not fit each other, or an index is negative.
    """
    check_words(bits, "digest of records, bits")
    if flat_index.dtype != np.int64 or flat_index.shape != bits.shape or (flat_index.size and int(flat_index.min()) < 0):
        raise RejectedError(f"digest of records: expected {bits.size} int64 flat indices from 0, got {flat_index.dtype}")
    if resolve(isa) is Isa.NUMPY:
        return digest_of_elements(flat_index, bits)
    return native.digest_elements(flat_index, bits)


def plane_totals(plane: Plane, escape: int, *, isa: Isa | None = None) -> PlaneTotals:
    """Sums over a plane of shape [n]: what proves how many gaps it has and where they lead."""
    if plane.dtype != np.uint8 or plane.ndim != 1:
        raise RejectedError(f"totals of a plane: expected flat bytes, got {plane.dtype} of {plane.shape}")
    chosen = resolve(isa)
    return twins.plane_totals(plane, escape) if chosen is Isa.NUMPY else native.plane_totals(plane, escape, chosen)
