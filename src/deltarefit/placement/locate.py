"""Where flat indices lie in a storage, by plain numpy. The twin of what the kernels do, and the way for other devices."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltarefit.pieces import Piece

__all__ = ["locate"]

Positions = NDArray[np.int64]


def locate(piece: Piece, flat_index: Positions) -> tuple[NDArray[Any], Positions]:
    """Which of the flat indices a piece holds, and where.

    Args:
        piece: normalised and ascending.
        flat_index: flat indices of the canonical tensor, shape [n].

    Returns:
        Places in ``flat_index``, shape [m], and the storage positions of these elements, shape [m].
    """
    bounds = (flat_index >= piece.canonical.first) & (flat_index <= piece.canonical.last)
    places = np.flatnonzero(bounds)
    rest = flat_index[places] - piece.canonical.offset
    positions = np.full(places.size, piece.storage.offset, dtype=np.int64)
    held = np.ones(places.size, dtype=bool)
    for length, stride, storage_stride in zip(piece.canonical.shape, piece.canonical.stride, piece.storage.stride, strict=True):
        step = rest // stride
        held &= step < length
        rest -= step * stride
        positions += step * storage_stride
    held &= rest == 0
    return places[held], positions[held]
