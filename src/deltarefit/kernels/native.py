"""Calls of the compiled kernels: tables of pieces, output memory, and the driver that lets a scan grow its output.

Every function expects what ``twins`` expects: normalised, non-empty, checked pieces.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import TensorDigest, Words
from deltarefit.errors import BaseMismatchError
from deltarefit.kernels.checks import widened_text
from deltarefit.kernels.isa import Isa
from deltarefit.kernels.library import ApplyCall, DigestCall, library
from deltarefit.pieces import Cast, Piece
from deltarefit.records import CodedItem, Encoding

__all__ = ["apply_columns", "apply_positions", "copy_pieces", "digest", "digest_elements", "piece_table"]


@lru_cache(maxsize=1024)
def piece_table(pieces: tuple[Piece, ...]) -> NDArray[np.int64]:
    """The table of pieces that common.h describes."""
    rows: list[int] = []
    for piece in pieces:
        rows += (len(piece.canonical.shape), piece.canonical.offset, piece.storage.offset)
        for axis in zip(piece.canonical.shape, piece.canonical.stride, piece.storage.stride, strict=True):
            rows += axis
    table = np.array(rows, np.int64)
    table.flags.writeable = False
    return table


def copy_pieces(target: Words, storage: Words, pieces: tuple[Piece, ...]) -> None:
    """Copy the pieces' elements of ``storage`` to ``target`` in piece order."""
    table = piece_table(pieces)
    library().deltarefit_copy(target.ctypes.data, storage.ctypes.data, table.ctypes.data, len(pieces), storage.dtype.itemsize)


def digest(storage: Words, pieces: tuple[Piece, ...], cast: Cast, isa: Isa) -> TensorDigest:
    table = piece_table(pieces)
    widen = cast is Cast.WIDEN
    call = DigestCall(
        storage=storage.ctypes.data,
        table=table.ctypes.data,
        pieces=len(pieces),
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
    library().deltarefit_digest_elements(index.ctypes.data, bits.ctypes.data, bits.size, bits.dtype.itemsize, lanes.ctypes.data)
    return TensorDigest(int(lanes[0]), int(lanes[1]))


def _apply_call(storage: Words, pieces: tuple[Piece, ...], cast: Cast, encoding: Encoding, value_nbytes: int) -> ApplyCall:
    return ApplyCall(
        storage=storage.ctypes.data,
        table=piece_table(pieces).ctypes.data,
        pieces=len(pieces),
        width=value_nbytes,
        widen=cast is Cast.WIDEN,
        encoding=encoding,
    )


def apply_positions(
    storage: Words,
    pieces: tuple[Piece, ...],
    cast: Cast,
    positions: NDArray[np.int64],
    values: Words,
    encoding: Encoding,
    isa: Isa,
) -> int:
    """Elements changed, or a negative number if positions do not ascend from 0, in which case nothing was written."""
    contiguous = np.ascontiguousarray(positions)
    call = _apply_call(storage, pieces, cast, encoding, values.dtype.itemsize)
    call.positions = contiguous.ctypes.data
    call.words = values.ctypes.data
    call.count = values.size
    return int(library().deltarefit_apply(ctypes.byref(call), isa))


def apply_columns(storage: Words, pieces: tuple[Piece, ...], cast: Cast, item: CodedItem, isa: Isa) -> int:
    """Elements changed, or a negative number if the locations are not valid, in which case nothing was written.

    ``coding.check_columns`` holds for the item.
    """
    locations = [np.ascontiguousarray(plane) for plane in item.location_planes]
    values = [np.ascontiguousarray(plane) for plane in item.value_planes]
    call = _apply_call(storage, pieces, cast, item.encoding, len(values))
    for number, plane in enumerate(locations):
        call.locations[number] = plane.ctypes.data
    for number, plane in enumerate(values):
        call.values[number] = plane.ctypes.data
    call.form = item.location_form
    call.start = item.start
    call.count = item.count
    call.location_nbytes = locations[0].size if locations else 0
    call.num_elements = item.spec.num_elements
    return int(library().deltarefit_apply(ctypes.byref(call), isa))
