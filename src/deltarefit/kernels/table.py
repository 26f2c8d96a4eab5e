"""Pieces as the kernels read them, with everything about them that does not depend on the words they are used with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import TensorSpec, Words
from deltarefit.errors import RejectedError
from deltarefit.kernels import twins
from deltarefit.kernels.checks import check_group, check_pieces, check_size, check_words, common_cast
from deltarefit.kernels.library import address
from deltarefit.pieces import Cast, Piece

__all__ = ["PieceTable", "tabulate"]


class PieceTable:
    """Pieces made ready once, for storages that come and go: a tensor's pieces are the same in every refit."""

    __slots__ = ("_fits", "_shard", "address", "cast", "is_contiguous", "is_strided", "num_elements", "pieces", "table")

    def __init__(self, pieces: Sequence[Piece]) -> None:
        """Raises RejectedError: the pieces differ in cast, or one is larger than the kernels can address."""
        self.pieces = tuple(piece.normalised() for piece in pieces if piece.num_elements)
        self.num_elements = sum(piece.num_elements for piece in self.pieces)
        self.cast = common_cast(self.pieces)
        check_size(self.pieces, "pieces")
        self.table = _table_of(self.pieces)
        self.address = address(self.table)
        self.is_strided = any(piece.storage.stride[-1] != 1 for piece in self.pieces)
        """Whether some run, the innermost axis, is not contiguous in storage."""
        self.is_contiguous = bool(self.pieces) and twins.is_contiguous(self.pieces)
        """Whether they cover one run of flat indices, if they are a group."""
        self._fits: tuple[int, object] | None = None
        self._shard: tuple[int, object, TensorSpec] | None = None

    def check(self, storage: Words, what: str) -> None:
        """Raises RejectedError: storage and pieces do not fit each other."""
        check_words(storage, f"{what}, storage")
        if self._fits != (storage.size, storage.dtype):
            check_pieces(self.pieces, storage, what)
            self._fits = (storage.size, storage.dtype)

    def check_shard(self, storage: Words, spec: TensorSpec) -> None:
        """Check words that passed ``check_words``.

        Raises:
            RejectedError: these are not pieces of that tensor in that storage, one group of ``merge_pieces``, as stored.
        """
        fits = self._shard
        if fits is not None and fits[0] == storage.size and fits[1] is storage.dtype and fits[2] is spec:
            return
        if self.cast is not Cast.SAME:
            raise RejectedError(f"expected pieces that keep the stored bits, got cast {self.cast.name}")
        check_pieces(self.pieces, storage, "pieces", spec)
        check_group(self.pieces, "pieces")
        self._shard = (storage.size, storage.dtype, spec)


def _table_of(pieces: tuple[Piece, ...]) -> NDArray[np.int64]:
    """The table of pieces that common.h describes."""
    rows: list[int] = []
    for piece in pieces:
        rows += (len(piece.canonical.shape), piece.canonical.offset, piece.storage.offset)
        for axis in zip(piece.canonical.shape, piece.canonical.stride, piece.storage.stride, strict=True):
            rows += axis
    table = np.array(rows, np.int64)
    table.flags.writeable = False
    return table


@lru_cache(maxsize=1024)
def _tabulated(pieces: tuple[Piece, ...]) -> PieceTable:
    return PieceTable(pieces)


def tabulate(pieces: PieceTable | Sequence[Piece]) -> PieceTable:
    """The table of the pieces; the last ones are remembered."""
    return pieces if isinstance(pieces, PieceTable) else _tabulated(tuple(pieces))
