"""The position-keyed digest, defined in numpy (design note 0004).

A canonical tensor's bytes are read as little-endian 32-bit digits. In each of two lanes, digit ``D`` has an odd 32-bit key, a
hash of ``D``. The element of flat index ``i`` adds, modulo 2^64, its bits, shifted to where they stand in their digit, times
that digit's key (an 8-byte element is two digits), and ``STEP * i + BASE``, which makes an element of zero bits count.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import TensorDigest, Words

__all__ = ["digest_of_elements", "digit_keys"]

U64 = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HASHES = ((0x7FEB352D, 15, 0x846CA68B, 16), (0x21F0AAAD, 15, 0xD35A2D97, 15))
"""Multiplier, shift, multiplier, shift of a lane's 32-bit hash: two-round functions of low bias from Chris Wellons' search
(github.com/skeeto/hash-prospector, public domain)."""
_SEEDS = (np.uint64(0x6465_6C74_6172_6566), np.uint64(0x6974_2D64_6967_6974))
_STEPS = (np.uint64(0xA076_1D64_78BD_642F), np.uint64(0xE703_7ED1_A0B4_28DB))
_BASES = (np.uint64(0x8EBC_6AF0_9C88_C6E3), np.uint64(0x5899_65CC_7537_4CC3))
"""Odd constants of wyhash (Wang Yi, public domain); any odd numbers without a pattern would do."""
_LOW = np.uint64(0xFFFF_FFFF)


def _seed(lane: int, upper: U64) -> U64:
    """What starts the hash of the digits whose number's upper half is ``upper``: the finaliser of splitmix64
    (Steele, Lea and Flood, OOPSLA 2014)."""
    z = _SEEDS[lane] + (upper + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) >> np.uint64(32)


def digit_keys(lane: int, digit: U64) -> U64:
    """The keys of these digits in a lane: odd, below 2^32."""
    first, shift, second, last_shift = (np.uint64(number) for number in _HASHES[lane])
    h = ((digit & _LOW) * first + _seed(lane, digit >> np.uint64(32))) & _LOW
    h = ((h ^ (h >> shift)) * second) & _LOW
    return (h ^ (h >> last_shift)) | np.uint64(1)


def _digits(index: U64, bits: Words) -> tuple[U64, U64]:
    """Digit numbers and what the elements put there; an 8-byte element is listed twice."""
    width = bits.dtype.itemsize
    if width == 8:
        number = index * np.uint64(2)
        return np.concatenate([number, number + np.uint64(1)]), np.concatenate([bits & _LOW, bits >> np.uint64(32)])
    value = bits.astype(np.uint64)
    if width == 4:
        return index, value
    per_digit = np.uint64(4 // width)
    return index // per_digit, value << (index % per_digit * np.uint64(8 * width))


def digest_of_elements(flat_index: NDArray[np.int64], bits: Words) -> TensorDigest:
    """Digest of the elements at ``flat_index`` (any order, each once) with these stored bits, both of shape [n]."""
    index = flat_index.astype(np.uint64)
    number, value = _digits(index, bits)
    lanes: list[int] = []
    for lane in (0, 1):
        total = (value * digit_keys(lane, number)).sum(dtype=np.uint64)
        places = (index * _STEPS[lane] + _BASES[lane]).sum(dtype=np.uint64)
        lanes.append((int(total) + int(places)) % 2**64)
    return TensorDigest(lanes[0], lanes[1])
