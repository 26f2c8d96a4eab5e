"""From numbers of granules to pieces: the boxes that a tensor's granules fill in one storage after post-load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import TensorSpec
from deltarefit.placement.fit import MAX_PIECES, fit_pieces
from deltarefit.placement.granules import BitHome

__all__ = ["GranulePairs", "fit_bit_homes", "inverse"]


@dataclass(frozen=True, slots=True, eq=False)
class GranulePairs:
    """Canonical and final granules of one tensor in one storage, canonical ones ascending."""

    canonical: NDArray[np.int64]
    final: NDArray[np.int64]


def fit_bit_homes(spec: TensorSpec, path: str, pairs: GranulePairs, flips: NDArray[Any], bits: int) -> list[BitHome] | str:
    found: list[BitHome] = []
    for copy in _copies(pairs):
        constants = np.unique(flips[copy.final])
        coarse, size = _coarsened(copy, bits, spec.element_nbytes * 8)
        flip = int(constants[0])
        if constants.size > 1:
            return f"post-load flips bits of it in {path} in a pattern that is not followed"
        if flip and size != bits:
            flip = sum(flip << shift for shift in range(0, size, bits))
        pieces = fit_pieces(coarse.canonical, coarse.final, limit=MAX_PIECES)
        elements = _elements(coarse.canonical, spec.element_nbytes * 8 // size)
        held = None if elements is None else fit_pieces(elements, elements, limit=MAX_PIECES)
        if pieces is None or held is None:
            return f"post-load scatters it over {path} in no strided way"
        found.append(BitHome(path, size, tuple(pieces), flip, tuple(piece.canonical for piece in held)))
    return found


def _elements(granules: NDArray[np.int64], per_element: int) -> NDArray[np.int64] | None:
    """The elements that ascending granules make up; None if one is there in part only."""
    if granules.size % per_element:
        return None
    rows = granules.reshape(-1, per_element)
    is_whole = bool((rows == rows[:, :1] // per_element * per_element + np.arange(per_element)).all())
    return rows[:, 0] // per_element if is_whole else None


def _copies(pairs: GranulePairs) -> Sequence[GranulePairs]:
    """Cut so that no canonical granule comes twice in a part: one part per copy that post-load made within the storage."""
    again = np.concatenate([[False], pairs.canonical[1:] == pairs.canonical[:-1]])
    if not again.any():
        return [pairs]
    first = np.flatnonzero(~again)
    turn = np.arange(again.size) - np.repeat(first, np.diff(np.append(first, again.size)))
    return [GranulePairs(pairs.canonical[turn == k], pairs.final[turn == k]) for k in range(int(turn.max()) + 1)]


def _coarsened(pairs: GranulePairs, bits: int, element_bits: int) -> tuple[GranulePairs, int]:
    """The same pairs in granules as large as possible, up to the element."""
    size = bits
    while size < element_bits:
        ratio = {1: 4, 4: 2}.get(size, 2)
        if pairs.canonical.size % ratio:
            break
        canonical, final = pairs.canonical.reshape(-1, ratio), pairs.final.reshape(-1, ratio)
        steps = np.arange(ratio)
        is_joined = not (canonical[:, 0] % ratio).any() and not (final[:, 0] % ratio).any()
        if not is_joined or (canonical - steps != canonical[:, :1]).any() or (final - steps != final[:, :1]).any():
            break
        pairs = GranulePairs(canonical[:, 0] // ratio, final[:, 0] // ratio)
        size *= ratio
    return pairs, size


def inverse(ids: NDArray[Any], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs of a source granule, from 0, and its final granule; source granules ascending, once for each copy."""
    positions = np.flatnonzero(ids)
    final = np.full(count + 1, -1, np.int64)
    final[ids[positions]] = positions
    numbers = np.flatnonzero(final >= 0)
    if numbers.size == positions.size:
        return numbers - 1, final[numbers]
    order = np.argsort(ids[positions], kind="stable")  # some have several copies
    return ids[positions][order].astype(np.int64) - 1, positions[order]
