"""Slices: the fixed partition of a checkpoint's tensors that deltas, chains and folds share.

Tensors are taken in name order, each cut every ``SLICE_NBYTES`` from its first byte. The grid depends on nothing else, so the
slices of two deltas over one tensor coincide, whatever memory or thread count made them.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from deltarefit.canonical import DTYPE_NBYTES, WORDS, TensorSpec
from deltarefit.pieces import Piece, contiguous

__all__ = [
    "SLICE_NBYTES",
    "UNIT_NBYTES",
    "Grid",
    "Sized",
    "Slice",
    "Unit",
    "carrier_dtype",
    "group",
    "slice_words",
]

SLICE_NBYTES = 4 * 2**20
"""Bytes of one slice; the last of a tensor may be shorter. A multiple of every word width. Part of the delta format."""
UNIT_NBYTES = 16 * 2**20
"""Bytes of the slices that one thread works on at a time, and that one payload covers. Larger payloads compress no better
(docs/offline.md), smaller ones pay for more zstd frames."""
_UNIT_SLICES = 4096
"""Bounds the item table of one payload for checkpoints of very many small tensors."""


class Sized(Protocol):
    """A tensor with a known place in memory; ``StoredTensor`` and the manifest's ``TensorState`` are such."""

    @property
    def dtype(self) -> str: ...
    @property
    def word_nbytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Slice:
    """A run of words of one tensor."""

    ordinal: int
    """Position among all slices of the grid, from 0."""
    name: str
    """The tensor's name."""
    dtype: str
    """The tensor's dtype if its elements are whole words, else the unsigned integer of the word's width."""
    first_word: int
    """Flat index of its first word in the tensor."""
    num_words: int

    @property
    def spec(self) -> TensorSpec:
        """How payload items name this slice: by ordinal, as a flat tensor of its own, whose positions start at 0."""
        return TensorSpec(str(self.ordinal), self.dtype, (self.num_words,))

    @property
    def number(self) -> int:
        """Position among the slices of its tensor, from 0."""
        return self.first_word // slice_words(DTYPE_NBYTES[self.dtype])

    @property
    def nbytes(self) -> int:
        return self.num_words * DTYPE_NBYTES[self.dtype]

    @property
    def word_dtype(self) -> np.dtype[np.unsignedinteger]:
        return WORDS[DTYPE_NBYTES[self.dtype]]

    @property
    def piece(self) -> Piece:
        """Maps an array that holds just this slice to the slice's own positions."""
        return contiguous(0, self.num_words)

    @property
    def digest_piece(self) -> Piece:
        """The same with the tensor's flat indices, so that digests of slices add up to the tensor's."""
        return contiguous(self.first_word, self.num_words)

    def __str__(self) -> str:
        return f"{self.name} [{self.first_word}:{self.first_word + self.num_words}]"


def slice_words(word_nbytes: int) -> int:
    """Words of a full slice."""
    return SLICE_NBYTES // word_nbytes


@dataclass(frozen=True, slots=True)
class Unit:
    """Slices that are worked on together; consecutive, if a payload is to cover them."""

    slices: tuple[Slice, ...]

    @property
    def first(self) -> int:
        return self.slices[0].ordinal

    @property
    def end(self) -> int:
        """One past the last slice's ordinal."""
        return self.slices[-1].ordinal + 1

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.slices)


class Grid:
    """All slices of a set of tensors, made when asked for: a grid costs memory per tensor, not per byte."""

    def __init__(self, tensors: Mapping[str, Sized]) -> None:
        self._names = sorted(tensors)
        self._first: dict[str, int] = {}
        self._cuts: dict[str, tuple[str, int, int]] = {}
        total = 0
        for name in self._names:
            tensor = tensors[name]
            width = tensor.word_nbytes
            self._first[name] = total
            self._cuts[name] = (carrier_dtype(tensor), slice_words(width), tensor.nbytes // width)
            total += -(-tensor.nbytes // SLICE_NBYTES)
        self._starts = list(self._first.values())
        self._total = total

    def __len__(self) -> int:
        return self._total

    def __contains__(self, name: object) -> bool:
        return name in self._first

    def first_of(self, name: str) -> int:
        """Ordinal of a tensor's first slice, or of the next one's if it has none."""
        return self._first[name]

    def slice(self, ordinal: int) -> Slice:
        """The slice ``0 <= ordinal < len(grid)``."""
        # Empty tensors share their successor's start: the last tensor that starts here is the one with slices.
        name = self._names[bisect.bisect_right(self._starts, ordinal) - 1]
        return self._cut(name, ordinal)

    def range(self, first: int, end: int) -> Iterator[Slice]:
        """The slices ``first <= ordinal < end``."""
        for ordinal in range(first, end):
            yield self.slice(ordinal)

    def of(self, name: str) -> Iterator[Slice]:
        """The slices of one tensor."""
        _, step, num_words = self._cuts[name]
        for number in range(-(-num_words // step)):
            yield self._cut(name, self._first[name] + number)

    def _cut(self, name: str, ordinal: int) -> Slice:
        dtype, step, num_words = self._cuts[name]
        first_word = (ordinal - self._first[name]) * step
        return Slice(ordinal, name, dtype, first_word, min(step, num_words - first_word))


def group(slices: Iterable[Slice]) -> Iterator[Unit]:
    """Slices in their order, grouped up to ``UNIT_NBYTES``."""
    pending: list[Slice] = []
    nbytes = 0
    for piece in slices:
        if pending and (nbytes + piece.nbytes > UNIT_NBYTES or len(pending) == _UNIT_SLICES):
            yield Unit(tuple(pending))
            pending, nbytes = [], 0
        pending.append(piece)
        nbytes += piece.nbytes
    if pending:
        yield Unit(tuple(pending))


def carrier_dtype(tensor: Sized) -> str:
    """The dtype that a tensor's words are carried as: its own, or the unsigned integer of the word's width."""
    return tensor.dtype if tensor.dtype in DTYPE_NBYTES else f"U{8 * tensor.word_nbytes}"
