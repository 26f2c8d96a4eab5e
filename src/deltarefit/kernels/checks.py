"""What every kernel checks before it touches memory: words, pieces, and that the pieces lie inside the words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deltarefit.canonical import WORDS, TensorSpec, Words
from deltarefit.errors import RejectedError
from deltarefit.pieces import Cast, Piece

__all__ = [
    "MAX_AXES",
    "MAX_POSITION",
    "check_group",
    "check_injective",
    "check_pieces",
    "check_size",
    "check_target",
    "check_words",
    "check_writeable",
    "common_cast",
    "total_elements",
    "widened_text",
]

MAX_AXES = 64
"""Axes of a normalised piece that the compiled walkers hold (common.h)."""
MAX_POSITION = 2**62 - 1
"""Largest flat index or storage position; sums of two stay inside a signed 64-bit integer."""


def check_words(words: Words, what: str) -> None:
    """Check that ``words`` is a contiguous one-dimensional array of little-endian unsigned integers.

    Raises:
        RejectedError: it is something else.
    """
    given: Any = words
    if not isinstance(given, np.ndarray) or given.ndim != 1 or given.dtype != WORDS.get(given.dtype.itemsize):
        shape, dtype = getattr(given, "shape", "?"), getattr(given, "dtype", type(given).__name__)
        raise RejectedError(f"{what}: expected a flat array of unsigned words, got {dtype} of shape {shape}")
    if given.size > 1 and given.strides != (given.dtype.itemsize,):
        raise RejectedError(f"{what}: expected contiguous words, got stride {given.strides} bytes; copy them first")


def check_writeable(words: Words, what: str) -> None:
    """Check that the kernel may write to ``words``.

    Raises:
        RejectedError: the array is read-only.
    """
    if not words.flags.writeable:
        raise RejectedError(f"{what}: expected writeable memory, got a read-only array")


def total_elements(pieces: Sequence[Piece]) -> int:
    return sum(piece.num_elements for piece in pieces)


def common_cast(pieces: Sequence[Piece]) -> Cast:
    """The one cast of these pieces; ``SAME`` if there are none.

    Raises:
        RejectedError: they differ; one storage has one dtype.
    """
    casts = {piece.cast for piece in pieces}
    if len(casts) > 1:
        raise RejectedError(f"pieces of one storage: expected one cast, got {sorted(cast.name for cast in casts)}")
    return casts.pop() if casts else Cast.SAME


def check_size(pieces: Sequence[Piece], what: str) -> None:
    """Check that the kernels' tables can hold normalised ``pieces``.

    Raises:
        RejectedError: a piece has too many axes or reaches too far.
    """
    for piece in pieces:
        if len(piece.canonical.shape) > MAX_AXES:
            raise RejectedError(f"{what}: piece of {len(piece.canonical.shape)} axes, expected at most {MAX_AXES}")
        if max(piece.canonical.last, piece.storage.last) > MAX_POSITION:
            reached = f"piece reaches flat index {piece.canonical.last} and element {piece.storage.last}"
            raise RejectedError(f"{what}: {reached}, expected at most {MAX_POSITION}")


def check_pieces(pieces: Sequence[Piece], storage: Words, what: str, spec: TensorSpec | None = None) -> None:
    """Check that normalised ``pieces`` lie inside ``storage`` and, if ``spec`` is given, inside that tensor.

    Raises:
        RejectedError: a piece reaches outside, or its cast does not fit the words' width.
    """
    if common_cast(pieces) is Cast.WIDEN and storage.dtype.itemsize != 4:
        raise RejectedError(f"{what}: widened pieces need 4-byte storage words, got {storage.dtype}")
    check_size(pieces, what)
    limit = MAX_POSITION + 1 if spec is None else spec.num_elements
    for piece in pieces:
        if piece.storage.last >= storage.size:
            raise RejectedError(
                f"{what}: piece {piece.storage} reaches element {piece.storage.last}, expected fewer than {storage.size}"
            )
        if piece.canonical.last >= limit:
            reached = f"piece {piece.canonical} reaches flat index {piece.canonical.last} of {spec}"
            raise RejectedError(f"{what}: {reached}, expected fewer than {limit}")


def check_group(pieces: Sequence[Piece], what: str) -> None:
    """Check that normalised ``pieces`` are one group of ``merge_pieces``: flat indices ascend within and across them.

    Raises:
        RejectedError: they do not.
    """
    before = -1
    for piece in pieces:
        if not piece.is_ascending() or piece.canonical.first <= before:
            raise RejectedError(f"{what}: piece {piece} is out of order, expected one group of merge_pieces()")
        before = piece.canonical.last


def check_injective(pieces: Sequence[Piece], what: str) -> None:
    """Check that no normalised piece visits a flat index out of order or a storage element twice by a zero stride.

    Raises:
        RejectedError: one does; a difference would be added twice.
    """
    for piece in pieces:
        if not piece.is_ascending():
            raise RejectedError(f"{what}: piece {piece} visits flat indices out of order, expected a box of a row-major tensor")
        if any(n > 1 and s == 0 for n, s in zip(piece.storage.shape, piece.storage.stride, strict=True)):
            raise RejectedError(f"{what}: piece {piece} writes one storage element for several flat indices")


def check_target(storage: Words, pieces: Sequence[Piece], value_nbytes: int, where: str) -> None:
    """Check that values of so many bytes can go to ``storage`` through normalised ``pieces``.

    Raises:
        RejectedError: the storage is read-only or of another width, or a piece would write an element twice.
    """
    check_words(storage, f"{where}, storage")
    check_writeable(storage, f"{where}, storage")
    cast = common_cast(pieces)
    widths = (2, 4) if cast is Cast.WIDEN else (value_nbytes, value_nbytes)
    if (value_nbytes, storage.dtype.itemsize) != widths:
        raise RejectedError(
            f"{where}: values of {value_nbytes} bytes cannot go to storage words {storage.dtype} with cast {cast.name}"
        )
    check_injective(pieces, where)


def widened_text(flat_index: int) -> str:
    """The error for a widened element whose low bits are set."""
    return (
        f"widened element of flat index {flat_index}: expected its low 16 bits to be 0; "
        "the parameter was changed by something other than a refit"
    )
