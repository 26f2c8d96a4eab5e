"""Numpy twins of the compiled kernels: chunked, plain, slow, and the oracle that the fast paths are held to.

Every function expects normalised, non-empty, checked pieces (``checks``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import TensorDigest, TensorSpec, Words
from deltarefit.errors import BaseMismatchError
from deltarefit.kernels.checks import total_elements, widened_text
from deltarefit.kernels.coding import (
    PlaneTotals,
    code_locations,
    code_values,
    gaps_of,
    is_dense_smaller,
    smallest_form,
    totals_of,
)
from deltarefit.kernels.mix import digest_of_elements
from deltarefit.kernels.nans import NanRule
from deltarefit.pieces import Cast, Piece, StridedView, strided
from deltarefit.records import CodedItem, DeltaRecords, Encoding, LocationForm, Plane, ScanResult

__all__ = ["apply", "commit", "digest", "gather", "is_contiguous", "plane_totals", "scan", "shorten_gaps", "totals_of_parts"]

_CHUNK_ELEMENTS = 256 * 1024
"""Elements handled at once: the best of the chunk sizes measured."""


def is_contiguous(pieces: Sequence[Piece]) -> bool:
    """Whether a group of pieces covers one run of consecutive flat indices, so that it can be sent without locations."""
    return pieces[-1].canonical.last - pieces[0].canonical.first + 1 == total_elements(pieces)


def _boxes(piece: Piece) -> Iterator[Piece]:
    """The piece cut into boxes of at most ``_CHUNK_ELEMENTS``, in row-major order."""
    shape = piece.canonical.shape
    if piece.num_elements <= _CHUNK_ELEMENTS:
        yield piece
        return
    inner = math.prod(shape[1:])
    step = max(1, _CHUNK_ELEMENTS // inner)
    for first in range(0, shape[0], step):
        length = min(step, shape[0] - first)
        views = [
            StridedView(view.offset + first * view.stride[0], (length, *shape[1:]), view.stride)
            for view in (piece.canonical, piece.storage)
        ]
        box = Piece(views[0], views[1], piece.cast)
        if inner > _CHUNK_ELEMENTS:
            shrunk = [StridedView(view.offset, shape[1:], view.stride[1:]) for view in views]
            box = Piece(shrunk[0], shrunk[1], piece.cast)
        yield from _boxes(box)


def _walk(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int, int]]:
    """Boxes of the pieces with their first and last-plus-one place in piece order."""
    done = 0
    for piece in pieces:
        for box in _boxes(piece):
            yield box, done, done + box.num_elements
            done += box.num_elements


def scan(
    spec: TensorSpec, candidate: Words, baseline: Words, pieces: Sequence[Piece], encoding: Encoding, *, everything: bool
) -> ScanResult:
    contiguous = is_contiguous(pieces)
    records, change = _changes(spec, candidate, baseline, pieces, everything=everything)
    if not records.flat_index.size:
        return ScanResult(None, change)
    if contiguous and not everything:
        totals = totals_of(gaps_of(records.flat_index))
        if is_dense_smaller(totals, spec.element_nbytes, total_elements(pieces)):
            records, _ = _changes(spec, candidate, baseline, pieces, everything=True)
    gaps = gaps_of(records.flat_index)
    form = smallest_form(totals_of(gaps))
    item = CodedItem(
        spec=spec,
        encoding=encoding,
        location_form=form,
        start=int(records.flat_index[0]),
        count=records.flat_index.size,
        location_planes=code_locations(gaps, form),
        value_planes=code_values(records.values(encoding), encoding),
    )
    return ScanResult(item, change)


def _changes(
    spec: TensorSpec, candidate: Words, baseline: Words, pieces: Sequence[Piece], *, everything: bool
) -> tuple[DeltaRecords, TensorDigest]:
    index: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    new: list[Words] = [np.empty(0, spec.word_dtype)]
    old: list[Words] = [np.empty(0, spec.word_dtype)]
    change = TensorDigest()
    for box, first, last in _walk(pieces):
        current = strided(candidate, box.storage).reshape(-1)
        base = baseline[first:last]
        changed = np.arange(last - first) if everything else np.flatnonzero(current != base)
        if not changed.size:
            continue
        index.append(box.canonical.positions()[changed])
        new.append(current[changed])
        old.append(base[changed])
        change += digest_of_elements(index[-1], new[-1]) - digest_of_elements(index[-1], old[-1])
    return DeltaRecords(spec, np.concatenate(index), np.concatenate(new), np.concatenate(old)), change


def apply(storage: Words, pieces: Sequence[Piece], positions: NDArray[np.int64], values: Words, encoding: Encoding) -> int:
    applied = 0
    for piece in pieces:
        first, last = np.searchsorted(positions, [piece.canonical.first, piece.canonical.last + 1])
        for low in range(int(first), int(last), _CHUNK_ELEMENTS):
            high = min(low + _CHUNK_ELEMENTS, int(last))
            target, inside = _storage_positions(piece, positions[low:high])
            _write(storage, target[inside], values[low:high][inside], encoding, piece.cast)
            applied += int(np.count_nonzero(inside))
    return applied


def _storage_positions(piece: Piece, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where flat indices lie in storage, and which of them the piece holds; the others' places mean nothing."""
    rest = positions - piece.canonical.offset
    target = np.full(positions.shape, piece.storage.offset, np.int64)
    inside = np.ones(positions.shape, np.bool_)
    for length, canonical, stored in zip(piece.canonical.shape, piece.canonical.stride, piece.storage.stride, strict=True):
        step, rest = np.divmod(rest, max(1, canonical))
        inside &= step < length
        target += step * stored
    return target, inside & (rest == 0)


def _write(storage: Words, target: NDArray[np.int64], values: Words, encoding: Encoding, cast: Cast) -> None:
    if cast is Cast.WIDEN:
        values = values.astype(storage.dtype) << storage.dtype.type(16)
    if encoding is Encoding.OVERWRITE:
        storage[target] = values
    elif encoding is Encoding.XOR:
        storage[target] ^= values
    else:
        storage[target] += values


def gather(storage: Words, pieces: Sequence[Piece]) -> Words:
    out = np.empty(total_elements(pieces), storage.dtype)
    for box, first, last in _walk(pieces):
        out[first:last] = strided(storage, box.storage).reshape(-1)
    return out


def commit(baseline: Words, candidate: Words, pieces: Sequence[Piece]) -> None:
    for box, first, last in _walk(pieces):
        baseline[first:last] = strided(candidate, box.storage).reshape(-1)


def count_nans(words: Words, rule: NanRule | None) -> int:
    """In blocks that fit the cache; 0 without a rule."""
    if rule is None:
        return 0
    add, mask, limit = (words.dtype.type(number) for number in rule)
    blocks = (words[start : start + 2**16] for start in range(0, words.size, 2**16))
    return sum(int(np.count_nonzero(((block + add) & mask) > limit)) for block in blocks)


def digest(storage: Words, pieces: Sequence[Piece]) -> TensorDigest:
    total = TensorDigest()
    for box, _, _ in _walk(pieces):
        bits = strided(storage, box.storage).reshape(-1)
        index = box.canonical.positions()
        if box.cast is Cast.WIDEN:
            if low := np.flatnonzero(bits & np.uint32(0xFFFF)).tolist():
                raise BaseMismatchError(widened_text(int(index[low[0]])))
            bits = (bits >> np.uint32(16)).astype(np.uint16)
        total += digest_of_elements(index, bits)
    return total


def plane_totals(plane: Plane, escape: int) -> PlaneTotals:
    """In blocks that are small enough for 32-bit sums and for the cache."""
    blocks = [plane[start : start + 2**20] for start in range(0, plane.size, 2**20)]
    return PlaneTotals(
        sum(int(block.sum(dtype=np.uint32)) for block in blocks),
        sum(int(np.count_nonzero(block == escape)) for block in blocks),
        max((int(block.max()) for block in blocks), default=0),
    )


def totals_of_parts(plane: Plane, starts: NDArray[np.int64], nbytes: NDArray[np.int64], escape: int) -> NDArray[np.void]:
    parts = [plane[start : start + size] for start, size in zip(starts.tolist(), nbytes.tolist(), strict=True)]
    return np.array([tuple(plane_totals(part, escape)) for part in parts], [(name, np.int64) for name in PlaneTotals._fields])


def shorten_gaps(plane: Plane) -> Plane:
    """A plane of GAPS as one of SHORT_GAPS, byte by byte: 255 is three times 85, so nothing carries."""
    escape = np.uint8(LocationForm.SHORT_GAPS.escape)
    more = np.minimum(plane // escape, 2)
    shortened = np.full(plane.size + int(more.sum(dtype=np.int64)), escape, np.uint8)
    shortened[np.cumsum(more + 1, dtype=np.int64) - 1] = plane - more * escape
    return shortened
