"""Cutting large shards into parts, each of which is owned, scanned and copied by itself.

An embedding of a model whose experts are spread over all ranks is larger than what a rank owns of the rest: owned whole, it
would make its owner wait for nothing else. Parts also bound what is copied at a time of a shard that must be cast or fetched
from an accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from deltarefit.pieces import Piece, StridedView

__all__ = ["PART_NBYTES", "cut_into_parts"]

PART_NBYTES = 64 * 2**20
"""Most bytes of a part: one scan's worth (``SourceSettings.chunk_nbytes``). Equal on all ranks, so that they cut alike."""


def cut_into_parts(pieces: Iterable[Piece], element_nbytes: int, target_nbytes: int = PART_NBYTES) -> list[tuple[Piece, ...]]:
    """The same elements in lists of about equal size, in the order of their flat indices.

    Pieces of ranks that hold copies may lie differently in storage, yet must be cut alike: as long as their canonical sides
    have the same axes, they are.
    """
    ordered = sorted((piece.normalised() for piece in pieces if piece.num_elements), key=lambda piece: piece.canonical.first)
    total = sum(piece.num_elements for piece in ordered)
    count = math.ceil(total * element_nbytes / target_nbytes)
    if count <= 1:
        return [tuple(ordered)]
    most = min(math.ceil(total / count), max(1, target_nbytes // element_nbytes))
    parts: list[tuple[Piece, ...]] = []
    filling: list[Piece] = []
    filled = 0
    for piece in ordered:
        for cut in _cuts(piece, most):
            if filling and filled + cut.num_elements > most:
                parts.append(tuple(filling))
                filling, filled = [], 0
            filling.append(cut)
            filled += cut.num_elements
    return [*parts, tuple(filling)]


def _cuts(piece: Piece, most: int) -> Iterator[Piece]:
    """A normalised piece in pieces of at most ``most`` elements, cut along its outer axes."""
    if piece.num_elements <= most:
        yield piece
        return
    length = piece.canonical.shape[0]
    inner = piece.num_elements // length
    step = max(1, most // inner)
    for start in range(0, length, step):
        yield from _cuts(_steps(piece, start, min(length, start + step)).normalised(), most)


def _steps(piece: Piece, start: int, stop: int) -> Piece:
    """Steps ``start`` to ``stop`` (exclusive) of the outermost axis."""
    return Piece(_slice(piece.canonical, start, stop), _slice(piece.storage, start, stop), piece.cast)


def _slice(view: StridedView, start: int, stop: int) -> StridedView:
    return StridedView(view.offset + start * view.stride[0], (stop - start, *view.shape[1:]), view.stride)
