"""Pieces: strided views of equal shape on two storages.

A piece says where a box of a canonical tensor lies in some storage. Both a source shard and a receiver's parameter are lists
of pieces; no formula that names a layer kind exists anywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltarefit.errors import RejectedError

__all__ = ["Cast", "Piece", "StridedView", "canonical_bounds", "contiguous", "merge_pieces", "strided", "whole"]


class Cast(IntEnum):
    """What happens to an element's bits between the canonical tensor and the storage."""

    SAME = 0
    """Stored bits are kept."""
    WIDEN = 1
    """16-bit brain float into 32-bit float: the bits move left by 16, so storage words are twice as wide."""


@dataclass(frozen=True, slots=True)
class StridedView:
    """Elements ``offset + sum(i_k * stride_k)`` for all ``i`` in the box ``shape``. Units are elements, not bytes."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.stride):
            raise RejectedError(f"view: shape {self.shape} and stride {self.stride} differ in rank")
        if self.offset < 0 or any(n < 0 for n in self.shape) or any(s < 0 for s in self.stride):
            raise RejectedError(f"view: negative offset, shape or stride in {self}")

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def first(self) -> int:
        """Smallest element position; meaningless if the view is empty."""
        return self.offset

    @property
    def last(self) -> int:
        """Largest element position, inclusive; ``offset - 1`` if the view is empty."""
        if not self.num_elements:
            return self.offset - 1
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    def positions(self) -> NDArray[np.int64]:
        """Of every element, shape [num_elements], in row-major order."""
        found = np.full((), self.offset, np.int64)
        for length, stride in zip(self.shape, self.stride, strict=True):
            found = np.add.outer(found, np.arange(length, dtype=np.int64) * stride)
        return found.reshape(-1)


def strided(words: NDArray[Any], view: StridedView) -> NDArray[Any]:
    """The elements of a view of a flat array, in the view's shape; shares memory. The view must lie inside the array."""
    steps = tuple(step * words.itemsize for step in view.stride)
    return np.lib.stride_tricks.as_strided(words[view.offset :], view.shape, steps)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a canonical tensor and the storage elements that hold it, axis by axis."""

    canonical: StridedView
    """Positions are flat indices of the canonical tensor."""
    storage: StridedView
    """Positions are elements of the storage, counted from its first byte."""
    cast: Cast = Cast.SAME

    def __post_init__(self) -> None:
        if self.canonical.shape != self.storage.shape:
            raise RejectedError(f"piece: shapes {self.canonical.shape} and {self.storage.shape} differ")

    @property
    def num_elements(self) -> int:
        return self.canonical.num_elements

    def normalised(self) -> Piece:
        """The same pairs with axes in descending canonical stride, axes of length 1 dropped and mergeable axes merged.

        Iterating the result in row-major order then visits ascending flat indices, provided the canonical view is a box of a
        row-major tensor. An empty piece keeps one axis of length 0; a single element becomes one axis of length 1.
        """
        if not self.num_elements:
            empty = (0,)
            return Piece(
                StridedView(self.canonical.offset, empty, (1,)),
                StridedView(self.storage.offset, empty, (1,)),
                self.cast,
            )
        axes = [
            axis for axis in zip(self.canonical.shape, self.canonical.stride, self.storage.stride, strict=True) if axis[0] != 1
        ]
        axes.sort(key=lambda axis: axis[1], reverse=True)
        merged: list[tuple[int, int, int]] = []
        for length, canonical, storage in axes:
            if merged:
                outer_length, outer_canonical, outer_storage = merged[-1]
                if outer_canonical == length * canonical and outer_storage == length * storage:
                    merged[-1] = (outer_length * length, canonical, storage)
                    continue
            merged.append((length, canonical, storage))
        if not merged:
            merged = [(1, 1, 1)]
        shape = tuple(axis[0] for axis in merged)
        return Piece(
            StridedView(self.canonical.offset, shape, tuple(axis[1] for axis in merged)),
            StridedView(self.storage.offset, shape, tuple(axis[2] for axis in merged)),
            self.cast,
        )

    def is_ascending(self) -> bool:
        """Whether row-major iteration of this (normalised) piece visits strictly ascending flat indices."""
        span = 0
        for length, stride in zip(reversed(self.canonical.shape), reversed(self.canonical.stride), strict=True):
            if length > 1 and stride <= span:
                return False
            span += (length - 1) * stride
        return True


def contiguous(first: int, count: int) -> Piece:
    """Maps a flat array of ``count`` elements to the flat indices from ``first`` on."""
    return Piece(StridedView(first, (count,), (1,)), StridedView(0, (count,), (1,)))


def canonical_bounds(piece: Piece) -> tuple[int, int]:
    """First and last flat index of a piece, inclusive."""
    return piece.canonical.first, piece.canonical.last


def merge_pieces(pieces: Iterable[Piece]) -> tuple[tuple[Piece, ...], ...]:
    """Group normalised pieces so that, within a group, the flat indices of one piece all precede those of the next.

    Each group can be coded as one ascending item. Pieces that interleave, such as two column blocks, end up in different
    groups.

    Raises:
        RejectedError: a piece visits its flat indices out of order, so it cannot be coded.
    """
    groups: list[list[Piece]] = []
    for piece in sorted((p.normalised() for p in pieces), key=canonical_bounds):
        if not piece.is_ascending():
            raise RejectedError(f"piece {piece}: expected a box of a row-major tensor")
        home = next((group for group in groups if group[-1].canonical.last < piece.canonical.first), None)
        if home is None:
            groups.append([piece])
        else:
            home.append(piece)
    return tuple(tuple(group) for group in groups)


def whole(shape: Sequence[int]) -> StridedView:
    """The view that covers a row-major tensor of this shape."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(1, shape[axis + 1])
    return StridedView(0, tuple(shape), tuple(strides))
