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

_PART = 2**22
"""Looked at in one go, so that what numpy makes on the way stays small."""
Granules = NDArray[Any]
"""Numbers of granules: of 4 bytes as long as they suffice, else of 8."""


@dataclass(frozen=True, slots=True, eq=False)
class GranulePairs:
    """Canonical and final granules of one tensor in one storage, canonical ones ascending."""

    canonical: Granules
    final: Granules


def fit_bit_homes(spec: TensorSpec, path: str, pairs: GranulePairs, flips: NDArray[Any], bits: int) -> list[BitHome] | str:
    """The places of a tensor in the storage at ``path``; in words why there are none.

    ``flips``: what each final granule is xored with; ``bits``: the size of granules.
    """
    found: list[BitHome] = []
    for copy in _copies(pairs):
        constants = flips[copy.final]
        coarse, size = _coarsened(copy, bits, spec.element_nbytes * 8)
        flip = int(constants[0])
        if (constants != constants[0]).any():
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


def _elements(granules: Granules, per_element: int) -> Granules | None:
    """The elements that ascending granules make up; None if one is there in part only."""
    if granules.size % per_element:
        return None
    rows = granules.reshape(-1, per_element)
    return rows[:, 0] // per_element if _are_runs(rows) else None


def _are_runs(rows: Granules) -> bool:
    """Whether each row is a run of whole numbers that begins at a multiple of its length. By columns, which saves memory."""
    first, length = rows[:, 0], rows.shape[1]
    return not (first % length).any() and all(bool((rows[:, k] == first + k).all()) for k in range(1, length))


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
        if not _are_runs(canonical) or not _are_runs(final):
            break
        pairs = GranulePairs(canonical[:, 0] // ratio, final[:, 0] // ratio)
        size *= ratio
    return pairs, size


def inverse(ids: Granules, count: int) -> tuple[Granules, Granules]:
    """Pairs of a source granule, from 0, and its final granule; source granules ascending, once for each copy.

    ``ids``: by final granule, the number of the source granule of ``count``, from 1; 0 for none.
    """
    width: Any = np.int32 if max(ids.size, count + 1) <= np.iinfo(np.int32).max else np.int64
    positions = _marked(ids != 0, width)
    final: Granules = np.full(count + 1, -1, width)
    final[ids[positions]] = positions
    numbers = _marked(final >= 0, width)
    if numbers.size == positions.size:
        del positions
        places = final[numbers]
        numbers -= 1
        return numbers, places
    order = np.argsort(ids[positions], kind="stable")  # some have several copies
    return ids[positions][order].astype(width) - 1, positions[order]


def _marked(mask: NDArray[np.bool_], width: Any) -> Granules:
    """Places that are marked, ascending."""
    found: Granules = np.empty(np.count_nonzero(mask), width)
    done = 0
    for low in range(0, mask.size, _PART):
        part = np.flatnonzero(mask[low : low + _PART])
        found[done : done + part.size] = part + low
        done += part.size
    return found
