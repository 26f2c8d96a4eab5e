"""Stored bits in units below the word: nibbles and single bits, as engines move them when they pack low-bit weights.

A granule is 1, 4, 8, 16, 32 or 64 neighbouring bits; granule ``k`` of some bytes holds their bits from ``k * bits`` on, low
bits first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import WORDS
from deltarefit.pieces import Piece, StridedView, strided

__all__ = [
    "BitHome",
    "all_of_byte",
    "any_of_byte",
    "any_of_granule",
    "bytes_of_granules",
    "granules_of_bytes",
    "granules_of_words",
    "marked_ranges",
    "words_of_granules",
]

Bytes = NDArray[np.uint8]
Mask = NDArray[np.bool_]
Granules = NDArray[Any]


@dataclass(frozen=True, slots=True)
class BitHome:
    """Where parts of one canonical tensor lie in one storage after post-load, in granules of both."""

    path: str
    """Of a tensor that lies in the storage, as ``reach`` spells it."""
    bits: int
    pieces: tuple[Piece, ...]
    """Positions are granules: of the canonical tensor's bytes, and of the storage."""
    flip: int
    """What each granule is xored with on its way."""
    elements: tuple[StridedView, ...]
    """Canonical elements of which all granules lie here."""

    def is_held(self, raw: Bytes, words: NDArray[Any]) -> bool:
        """Whether these bytes of the storage hold these canonical words."""
        final, canonical = granules_of_bytes(raw, self.bits), granules_of_words(words, self.bits)
        return all(
            np.array_equal(strided(final, piece.storage) ^ final.dtype.type(self.flip), strided(canonical, piece.canonical))
            for piece in self.pieces
        )


def granules_of_bytes(raw: Bytes, bits: int) -> Granules:
    """All whole granules of some bytes, as unsigned integers: shape [bytes * 8 // bits]."""
    if bits >= 8:
        width = bits // 8
        return raw[: raw.size // width * width].view(WORDS[width])
    if bits == 1:
        return np.unpackbits(raw, bitorder="little")
    low_high = np.empty((raw.size, 2), np.uint8)
    np.bitwise_and(raw, 15, out=low_high[:, 0])
    np.right_shift(raw, 4, out=low_high[:, 1])
    return low_high.reshape(-1)


def bytes_of_granules(granules: Granules, bits: int) -> Bytes:
    """The bytes that these granules make up."""
    if bits >= 8:
        return granules.view(np.uint8)
    if bits == 1:
        return np.packbits(granules, bitorder="little")
    pairs = granules.reshape(-1, 2)
    return np.asarray(pairs[:, 0] | (pairs[:, 1] << np.uint8(4)), np.uint8)


def granules_of_words(words: NDArray[Any], bits: int) -> Granules:
    """The granules of words one after another, shape [words * word bits // bits]."""
    return granules_of_bytes(np.ascontiguousarray(words).view(np.uint8), bits)


def words_of_granules(granules: Granules, bits: int, width: int) -> NDArray[Any]:
    """Words of ``width`` bytes that granules make up."""
    return bytes_of_granules(np.ascontiguousarray(granules), bits).view(WORDS[width])


def any_of_byte(granules: Mask, bits: int) -> Mask:
    """Per byte, whether any of its granules is marked; a copy."""
    return np.repeat(granules, bits // 8) if bits >= 8 else np.asarray(granules.reshape(-1, 8 // bits).any(axis=1))


def any_of_granule(mask: Mask, bits: int) -> Mask:
    """Per granule, whether any of its bytes is marked."""
    return np.asarray(mask.reshape(-1, bits // 8).any(axis=1)) if bits >= 8 else np.repeat(mask, 8 // bits)


def all_of_byte(granules: Mask, bits: int) -> Mask:
    """Per byte, whether all of it is marked."""
    return np.repeat(granules, bits // 8) if bits >= 8 else np.asarray(granules.reshape(-1, 8 // bits).all(axis=1))


def marked_ranges(mask: Mask) -> NDArray[np.int64]:
    """First and end of every run of marked places, shape [runs, 2]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2).astype(np.int64)
