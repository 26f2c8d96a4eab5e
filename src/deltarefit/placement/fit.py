"""From pairs of positions to pieces: find the strided boxes that a list of pairs consists of.

The pairs come in the order in which some view visits its elements, so regular placements show as nested repetitions.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from deltarefit.pieces import Cast, Piece, StridedView

__all__ = ["MAX_PIECES", "fit_pieces", "split_ascending"]

Positions = NDArray[np.int64] | NDArray[np.int32]
_Axis = tuple[int, int, int]

MAX_PIECES = 4096
"""More boxes than this in one write mean that the placement is no strided one."""
_FIRST_WINDOW = 4096
"""Elements compared at first; doubled while they agree, so that a short box costs little however long the rest is."""
_LAST_WINDOW = 2**20
"""Most elements compared at a time: what that takes on the way stays in cache."""


def fit_pieces(
    canonical: Positions, storage: Positions, cast: Cast = Cast.SAME, *, limit: int = MAX_PIECES
) -> list[Piece] | None:
    """Cover the pairs ``(canonical[k], storage[k])`` with pieces, exactly once each. None if more than ``limit`` are needed.

    Both arrays have shape [n] and hold element positions. The pieces are normalised and ascending.
    """
    pieces: list[Piece] = []
    start = 0
    while start < canonical.size:
        if len(pieces) >= limit:
            return None
        axes, length = _leading_box(canonical[start:], storage[start:])
        pieces.extend(_piece(int(canonical[start]), int(storage[start]), axes, cast))
        start += length
    return pieces if len(pieces) <= limit else None


def _leading_box(canonical: Positions, storage: Positions) -> tuple[list[_Axis], int]:
    """The longest box that the pairs begin with: its axes, innermost first, and how many pairs it covers."""
    axes: list[_Axis] = []
    block = 1
    while canonical.size >= 2 * block:
        canonical_step = int(canonical[block] - canonical[0])
        storage_step = int(storage[block] - storage[0])
        if canonical_step <= 0 or storage_step <= 0:
            break
        repeats = min(_repeats(canonical, block, canonical_step), _repeats(storage, block, storage_step))
        if repeats < 2:
            break
        axes.append((repeats, canonical_step, storage_step))
        block *= repeats
    return axes, block


def _repeats(positions: Positions, block: int, step: int) -> int:
    """How many times the first ``block`` positions come again, moved on by ``step`` each time."""
    available = positions.size // block
    first = positions[:block]
    done = 1
    window = max(1, _FIRST_WINDOW // block)
    while done < available:
        until = min(available, done + window)
        moves = np.arange(done, until, dtype=np.int64)[:, None] * step
        same = (positions[done * block : until * block].reshape(-1, block) == first + moves).all(axis=1)
        if not same.all():
            return done + int(np.argmin(same))
        done = until
        window = min(2 * window, max(1, _LAST_WINDOW // block))
    return done


def _piece(canonical: int, storage: int, axes: list[_Axis], cast: Cast) -> list[Piece]:
    shape = tuple(axis[0] for axis in reversed(axes)) or (1,)
    canonical_stride = tuple(axis[1] for axis in reversed(axes)) or (1,)
    storage_stride = tuple(axis[2] for axis in reversed(axes)) or (1,)
    piece = Piece(StridedView(canonical, shape, canonical_stride), StridedView(storage, shape, storage_stride), cast)
    return split_ascending(piece)


def split_ascending(piece: Piece) -> list[Piece]:
    """The same pairs as normalised pieces, each of which visits strictly ascending flat indices.

    An axis that repeats flat indices (stride 0: one canonical element with several homes) is cut into its slices.
    """
    normal = piece.normalised()
    if normal.is_ascending():
        return [normal]
    axis = _axis_to_cut(normal)
    slices = [_slice(normal, axis, k) for k in range(normal.canonical.shape[axis])]
    return list(itertools.chain.from_iterable(split_ascending(part) for part in slices))


def _axis_to_cut(piece: Piece) -> int:
    strides = piece.canonical.stride
    return strides.index(0) if 0 in strides else 0


def _slice(piece: Piece, axis: int, k: int) -> Piece:
    def cut(view: StridedView) -> StridedView:
        shape, stride = view.shape[:axis] + view.shape[axis + 1 :], view.stride[:axis] + view.stride[axis + 1 :]
        return StridedView(view.offset + k * view.stride[axis], shape or (1,), stride or (1,))

    return Piece(cut(piece.canonical), cut(piece.storage), piece.cast)
