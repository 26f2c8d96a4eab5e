"""The position-keyed digest, defined in numpy (design note 0004).

A canonical tensor's bytes are read as little-endian 32-bit digits. Digit ``D`` has two 32-bit odd keys, one a lane, that
depend on ``D mod 1024``, and its block of 1024 digits has two 64-bit odd keys that depend on ``D div 1024``. An element adds
``(bits + 1) << shift`` times both keys of its digit, modulo 2^64, where ``shift`` is the bit position at which the element
starts in its digit; an 8-byte element is two digits. The ``+ 1`` makes an element of zero bits count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import TensorDigest, Words

__all__ = ["BLOCK_DIGITS", "block_keys", "digest_of_elements", "digit_keys"]

BLOCK_DIGITS = 1024
"""Digits that share a block key. 8 KiB of digit keys for both lanes stay in the first-level cache."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_DIGIT_SEEDS = (np.uint64(0x6465_6C74_6172_6566), np.uint64(0x6974_2D64_6967_6974))
_BLOCK_SEEDS = (np.uint64(0x626C_6F63_6B2D_6B65), np.uint64(0x7973_2D6C_616E_6531))

U64 = NDArray[np.uint64]


def _finalise(z: U64) -> U64:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection on 64-bit words."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def digit_keys(lane: int) -> U64:
    """The 1024 digit keys of a lane: odd, below 2^32, all different."""
    counter = np.arange(1, BLOCK_DIGITS + 1, dtype=np.uint64)
    return (_finalise(_DIGIT_SEEDS[lane] + counter * _GOLDEN) >> np.uint64(32)) | np.uint64(1)


def block_keys(lane: int, block: U64) -> U64:
    """The odd 64-bit keys of these blocks of digits in a lane."""
    return _finalise(_BLOCK_SEEDS[lane] + (block + np.uint64(1)) * _GOLDEN) | np.uint64(1)


_DIGIT_KEYS = (digit_keys(0), digit_keys(1))


def _digits(flat_index: NDArray[np.int64], bits: Words) -> tuple[U64, U64]:
    """Digit numbers and the values that they add."""
    index = flat_index.astype(np.uint64)
    one = np.uint64(1)
    width = bits.dtype.itemsize
    if width == 8:
        low, high = bits & np.uint64(0xFFFFFFFF), bits >> np.uint64(32)
        number = np.concatenate([index * np.uint64(2), index * np.uint64(2) + one])
        return number, np.concatenate([low + one, high + one])
    value = bits.astype(np.uint64) + one
    if width == 4:
        return index, value
    per_digit_log2 = np.uint64(1 if width == 2 else 2)
    place = index & ((one << per_digit_log2) - one)
    return index >> per_digit_log2, value << (place * np.uint64(8 * width))


def digest_of_elements(flat_index: NDArray[np.int64], bits: Words) -> TensorDigest:
    """Digest of the elements at ``flat_index`` (any order, each once) with these stored bits, both of shape [n]."""
    number, value = _digits(flat_index, bits)
    digit, block = (number % np.uint64(BLOCK_DIGITS)).astype(np.int64), number // np.uint64(BLOCK_DIGITS)
    lanes: list[int] = []
    for lane in (0, 1):
        products: NDArray[Any] = value * _DIGIT_KEYS[lane][digit] * block_keys(lane, block)
        lanes.append(int(products.sum(dtype=np.uint64)))
    return TensorDigest(lanes[0], lanes[1])
