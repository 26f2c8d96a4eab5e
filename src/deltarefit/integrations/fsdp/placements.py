"""Which part of a tensor a rank holds, from DTensor's facts: mesh shape, coordinate and placements.

torch's own offset helpers assume one contiguous block per rank. A strided shard standing alone, as tensor-parallel plans give
it for fused gate and up projections, is several; there they return one wrong block without an error. So placements are
evaluated here, as lists of intervals, and checked against gathered tensors in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltarefit.errors import RejectedError

__all__ = ["MeshSplit", "held_intervals"]

Intervals = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class MeshSplit:
    """What one dimension of a mesh does to a tensor. ``tensor_dim`` is None where it holds copies."""

    num_ranks: int
    coordinate: int
    """This rank's place along the mesh dimension."""
    tensor_dim: int | None
    split_factor: int = 1
    """Shards that existed when this split was made, although it is applied before them: 1 for a plain shard."""


def held_intervals(name: str, shape: Sequence[int], splits: Sequence[MeshSplit]) -> tuple[Intervals, ...]:
    """Per dimension the intervals (start, stop) of the whole tensor that a rank holds, in the order of its local tensor.

    Splits apply from left to right, each to what the earlier ones left. A dimension of ``n`` elements is cut into shards of
    ``ceil(n / ranks)``, so the last ones may be short or empty.

    Raises:
        RejectedError: a split names a dimension that the tensor lacks.
    """
    held: list[Intervals] = [((0, length),) if length else () for length in shape]
    for split in splits:
        if split.tensor_dim is None:
            continue
        if not 0 <= split.tensor_dim < len(held):
            raise RejectedError(f"tensor {name}: is sharded along dimension {split.tensor_dim}, its shape is {tuple(shape)}")
        held[split.tensor_dim] = _own(held[split.tensor_dim], split)
    return tuple(held)


def _own(intervals: Intervals, split: MeshSplit) -> Intervals:
    """What is left of a dimension: of each of ``split_factor`` blocks, this rank's shard."""
    length = sum(stop - start for start, stop in intervals)
    found: list[tuple[int, int]] = []
    for block in range(split.split_factor):
        start, stop = _shard(length, split.split_factor, block)
        first, last = _shard(stop - start, split.num_ranks, split.coordinate)
        found.extend(_cut(intervals, start + first, start + last))
    return _joined(found)


def _shard(length: int, count: int, place: int) -> tuple[int, int]:
    each = -(-length // count)
    return min(length, place * each), min(length, (place + 1) * each)


def _cut(intervals: Intervals, start: int, stop: int) -> list[tuple[int, int]]:
    """Positions ``start`` to ``stop`` of the intervals laid end to end."""
    found = []
    passed = 0
    for first, last in intervals:
        begin, end = max(start - passed, 0) + first, min(stop - passed, last - first) + first
        if begin < end:
            found.append((begin, end))
        passed += last - first
    return found


def _joined(intervals: Sequence[tuple[int, int]]) -> Intervals:
    joined: list[tuple[int, int]] = []
    for start, stop in intervals:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
