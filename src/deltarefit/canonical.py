"""Canonical coordinates: the checkpoint's names, shapes and dtypes, and flat indices into them (paper 4).

A canonical tensor is addressed by the row-major flat index of its element, a Python int or an int64 array. Nothing here
reads a model's structure from its names.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltarefit.errors import RejectedError

__all__ = [
    "DTYPE_NBYTES",
    "WORDS",
    "Catalog",
    "TensorDigest",
    "TensorSpec",
    "Words",
    "digest_of_digests",
    "word_dtype",
]

Words = NDArray[Any]
"""A one-dimensional array of unsigned integers: the stored bits of a tensor's elements."""

DTYPE_NBYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of one element, by the dtype's name in safetensors files. Every fixed-width dtype passes byte for byte."""

WORDS: Mapping[int, np.dtype[Any]] = {n: np.dtype(f"<u{n}") for n in (1, 2, 4, 8)}
"""The unsigned integer that spells the stored bits of an element of that many bytes, little-endian."""

_MAX_ELEMENTS = 2**62
_LANE = 2**64


def word_dtype(dtype: str) -> np.dtype[Any]:
    """The unsigned integer dtype that holds one element's bits.

    Raises:
        RejectedError: the dtype has no fixed whole-byte width known here.
    """
    try:
        return WORDS[DTYPE_NBYTES[dtype]]
    except KeyError:
        raise RejectedError(f"dtype {dtype!r}: expected one of {', '.join(DTYPE_NBYTES)}") from None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of one canonical tensor."""

    name: str
    dtype: str
    """As safetensors spells it, e.g. ``BF16``."""
    shape: tuple[int, ...]
    """Empty for rank 0, which has one element. A dimension may be 0."""

    def __post_init__(self) -> None:
        word_dtype(self.dtype)
        if not self.name or not _is_utf8(self.name) or len(self.name.encode()) > 65535:
            raise RejectedError(f"tensor name {self.name[:80]!r}: expected 1 to 65535 bytes of UTF-8")
        if any(n < 0 for n in self.shape) or math.prod(self.shape) > _MAX_ELEMENTS:
            raise RejectedError(f"tensor {self.name}: shape {self.shape} is not a shape of at most 2^62 elements")

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def element_nbytes(self) -> int:
        return DTYPE_NBYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.num_elements * self.element_nbytes

    @property
    def word_dtype(self) -> np.dtype[Any]:
        return WORDS[self.element_nbytes]

    @property
    def strides(self) -> tuple[int, ...]:
        """Row-major strides in elements."""
        strides = [1] * len(self.shape)
        for axis in range(len(self.shape) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * max(1, self.shape[axis + 1])
        return tuple(strides)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """Two 64-bit lanes, each the sum modulo 2^64 of a mix of (flat index, bits) over elements.

    Sums add over disjoint parts of a tensor, whoever holds them, and update from the changed elements alone
    (design note 0004). It detects accidents, not forgery: payloads carry keyed digests for that.
    """

    lane0: int = 0
    lane1: int = 0

    def __add__(self, other: TensorDigest) -> TensorDigest:
        return TensorDigest((self.lane0 + other.lane0) % _LANE, (self.lane1 + other.lane1) % _LANE)

    def __sub__(self, other: TensorDigest) -> TensorDigest:
        return TensorDigest((self.lane0 - other.lane0) % _LANE, (self.lane1 - other.lane1) % _LANE)

    def hex(self) -> str:
        return f"{self.lane0:016x}{self.lane1:016x}"

    @classmethod
    def from_hex(cls, text: str) -> TensorDigest:
        return cls(int(text[:16], 16), int(text[16:], 16))


class Catalog(Mapping[str, TensorSpec]):
    """All canonical tensors of a policy, in name order. Immutable; equal catalogs have equal digests."""

    __slots__ = ("_digest", "_specs")

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        ordered = sorted(specs, key=lambda spec: spec.name)
        self._specs = {spec.name: spec for spec in ordered}
        if len(self._specs) != len(ordered):
            names = [spec.name for spec in ordered]
            twice = sorted({name for name, after in itertools.pairwise(names) if name == after})
            raise RejectedError(f"catalog lists {', '.join(twice[:5])} more than once; expected one spec per name")
        lines = "".join(f"{s.name}\0{s.dtype}\0{','.join(map(str, s.shape))}\n" for s in ordered)
        self._digest = hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()

    def __getitem__(self, name: str) -> TensorSpec:
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Catalog) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    @property
    def digest(self) -> str:
        """32 hex digits over names, dtypes and shapes."""
        return self._digest

    def to_wire(self) -> bytes:
        """JSON bytes for another process; equal catalogs have equal bytes."""
        return msgspec.json.encode([(spec.name, spec.dtype, spec.shape) for spec in self._specs.values()])

    @classmethod
    def from_wire(cls, data: bytes | memoryview) -> Catalog:
        """The catalog that ``to_wire`` spelled.

        Raises:
            RejectedError: the bytes are no catalog.
        """
        try:
            rows = msgspec.json.decode(data, type=list[tuple[str, str, tuple[int, ...]]])
        except msgspec.DecodeError as error:
            raise RejectedError(f"catalog of {len(data)} bytes: expected what Catalog.to_wire writes, got {error}") from error
        return cls(TensorSpec(name, dtype, shape) for name, dtype, shape in rows)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self._specs.values())

    @property
    def num_elements(self) -> int:
        return sum(spec.num_elements for spec in self._specs.values())


def digest_of_digests(digests: Mapping[str, TensorDigest]) -> str:
    """One digest (32 hex digits) for a whole policy, from the digests of its tensors."""
    lines = "".join(f"{name}\0{digests[name].hex()}\n" for name in sorted(digests))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()
