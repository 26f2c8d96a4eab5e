"""Probes: tensors whose values say which element they are.

An element's id is written in base 256 (smaller for narrow dtypes), one digit a pass, as a number that the dtype holds
exactly. bf16 holds every integer up to 256, so a digit also survives a cast to any wider float. Digit 0 everywhere is kept
for "no element": ids start at 1, so padding of zeros is never mistaken for element 0.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deltarefit.bits import DTYPES
from deltarefit.canonical import TensorSpec, Words, word_dtype

__all__ = ["IdSpace", "add_digit", "base_of", "decode_digits", "digit_words", "ordinary_words", "random_words", "special_words"]

Ids = NDArray[np.int64]

_NARROW_BASE = {"BOOL": 2, "I8": 128, "F8_E4M3": 16, "F8_E4M3FNUZ": 16, "F8_E5M2": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 128}
"""Number of leading integers that the dtype holds exactly; 8-bit exponents hold no integers, their raw patterns count."""
_WIDE_BASE = 256
_RAW = frozenset({"F8_E8M0"})
_MAX_ID = 2**54
"""Above any id, and small enough that sums of digits do not leave int64."""


def base_of(dtype: str) -> int:
    """How many digits a pass can tell apart in this dtype."""
    return _NARROW_BASE.get(dtype, _WIDE_BASE)


@functools.cache
def _table(dtype: str, base: int) -> Words:
    """The stored bits of 0 .. base - 1, shape [base]."""
    if dtype in _RAW:
        return np.arange(base, dtype=word_dtype(dtype))
    numbers = torch.arange(base, dtype=torch.float64, device="cpu").to(DTYPES[dtype])
    words: Words = numbers.view(torch.uint8).numpy().view(word_dtype(dtype)).copy()
    return words


def digit_words(dtype: str, first_id: int, count: int, digit: int) -> Words:
    """Stored bits, shape [count], of one digit (0 is the lowest) of the ids ``first_id``, ``first_id + 1``, ..."""
    base = base_of(dtype)
    if base**digit >= first_id + count:  # all zero; and the power may not fit a word
        return np.full(count, _table(dtype, base)[0])
    ids = np.arange(first_id, first_id + count, dtype=np.int64)
    ids >>= digit * (base.bit_length() - 1)  # bases are powers of two
    ids &= base - 1
    words: Words = _table(dtype, base)[ids]
    return words


def add_digit(ids: Ids, dtype: str, words: Words, digit: int) -> None:
    """Add what one pass says about each element to ``ids``, shape [n]; ids that can be none become negative."""
    digits = decode_digits(dtype, words).astype(np.int64)
    place_value = base_of(dtype) ** digit
    ids[digits < 0] = -_MAX_ID
    if place_value < _MAX_ID:
        ids += np.maximum(digits, 0) * place_value
    else:
        ids[digits > 0] = -_MAX_ID


@functools.cache
def _lookup(dtype: str, base: int) -> NDArray[np.int16]:
    """Digit of every 1- or 2-byte pattern, -1 where it spells none."""
    table = _table(dtype, base)
    digits = np.full(1 << (8 * table.itemsize), -1, dtype=np.int16)
    digits[table] = np.arange(base, dtype=np.int16)
    return digits


def decode_digits(dtype: str, words: Words) -> NDArray[np.int16]:
    """The digits that stored bits of this dtype spell; -1 where a pattern spells none."""
    base = base_of(dtype)
    if words.itemsize <= 2:
        return _lookup(dtype, base)[words]
    table = _table(dtype, base)
    order = np.argsort(table)
    place = np.searchsorted(table[order], words)
    place[place == base] = 0
    digits = order[place].astype(np.int16)
    digits[table[digits] != words] = -1
    return digits


_SPECIAL: Mapping[str, tuple[int, ...]] = {
    "BF16": (0x8000, 0x0001, 0x7FC1, 0xFFC0, 0x7F81, 0x7F80, 0xFF80, 0x007F, 0x3F80, 0x7F7F),
    "F16": (0x8000, 0x0001, 0x7E01, 0xFE00, 0x7C01, 0x7C00, 0xFC00, 0x03FF, 0x3C00, 0x7BFF),
    "F32": (0x80000000, 1, 0x7FC00001, 0xFFC00000, 0x7F800001, 0x7F800000, 0xFF800000, 0x007FFFFF, 0x3F800000, 0x7F7FFFFF),
}
"""Negative zero, subnormals, quiet and signalling NaN with payload, infinities, one, the largest finite number."""


def special_words(dtype: str) -> Words:
    """Patterns that value arithmetic is prone to lose; empty where every pattern is alike."""
    return np.array(_SPECIAL.get(dtype, ()), dtype=word_dtype(dtype))


def random_words(dtype: str, count: int, generator: np.random.Generator, *, turn: int = 0) -> Words:
    """Random stored bits, shape [count], the special patterns of the dtype scattered among them. Bools stay 0 or 1.

    ``turn`` numbers the passes over one tensor: a tensor too small for all special patterns meets them one after another.
    """
    width = word_dtype(dtype)
    if dtype == "BOOL":
        return generator.integers(0, 2, count, dtype=width)
    words = np.frombuffer(generator.bytes(count * width.itemsize), dtype=width).copy()
    special = special_words(dtype)
    if special.size and count:
        places = generator.choice(count, max(1, min(count // 4, 4 * special.size)), replace=False)
        words[places] = np.resize(np.roll(special, -turn * places.size), places.size)
    return words


def ordinary_words(dtype: str, count: int, generator: np.random.Generator) -> Words:
    """Stored bits, shape [count], of ordinary finite numbers around 0 in floating-point dtypes; random bits in others."""
    if not DTYPES[dtype].is_floating_point or dtype in _RAW:
        return random_words(dtype, count, generator)
    numbers = torch.from_numpy(generator.normal(0, 0.5, count).astype(np.float32)).to(DTYPES[dtype])
    words: Words = numbers.view(torch.uint8).numpy().view(word_dtype(dtype)).copy()
    return words


@dataclass(frozen=True, slots=True)
class IdSpace:
    """Numbers all elements of several tensors: element ``i`` of a tensor has id ``1 + start of the tensor + i``."""

    starts: Mapping[str, int]
    specs: Mapping[str, TensorSpec]
    total: int
    """Elements of all tensors together."""

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> IdSpace:
        starts: dict[str, int] = {}
        listed: dict[str, TensorSpec] = {}
        total = 0
        for spec in specs:
            starts[spec.name] = total
            listed[spec.name] = spec
            total += spec.num_elements
        return cls(starts, listed, total)

    @property
    def num_digits(self) -> int:
        """Passes that tell all elements apart, in the narrowest base of these tensors."""
        base = min((base_of(spec.dtype) for spec in self.specs.values()), default=_WIDE_BASE)
        digits = 1
        while base**digits <= self.total:
            digits += 1
        return digits

    def digit(self, name: str, digit: int) -> Words:
        """The probe of one tensor for one pass."""
        spec = self.specs[name]
        return digit_words(spec.dtype, 1 + self.starts[name], spec.num_elements, digit)

    def split(self, ids: Ids) -> Iterator[tuple[str, NDArray[Any], Ids]]:
        """Sort ids by tensor: name, places in ``ids`` (ascending) and flat indices there. Ids out of range are left out."""
        names = list(self.starts)
        starts = np.fromiter(self.starts.values(), np.int64, len(names))
        order = np.searchsorted(starts, ids - 1, side="right") - 1
        order[(ids < 1) | (ids > self.total)] = -1
        for position in np.unique(order):
            if position >= 0:
                places = np.flatnonzero(order == position)
                yield names[position], places, ids[places] - 1 - starts[position]
