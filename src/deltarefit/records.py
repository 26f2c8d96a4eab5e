"""Changed elements: before coding (``DeltaRecords``) and in the coded columns that travel (``CodedItem``).

Both are structures of arrays; there is no object per element.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import TensorDigest, TensorSpec, Words
from deltarefit.errors import RejectedError
from deltarefit.ids import EncodingMode

__all__ = ["Bucket", "CodedItem", "DeltaRecords", "Encoding", "EncodingMode", "LocationForm", "ScanResult"]

Plane = NDArray[np.uint8]


class Encoding(IntEnum):
    """What is sent for a changed element. All are exact."""

    OVERWRITE = 0
    """The new bits. May be applied any number of times."""
    DIFFERENCE = 1
    """Stored bits new - old modulo 2^width, taken on the integers that the bits spell. Applied once, onto the base."""
    XOR = 2
    """Stored bits new ^ old. Applied once, onto the base."""

    @property
    def is_repeatable(self) -> bool:
        return self is Encoding.OVERWRITE


class LocationForm(IntEnum):
    """How an item says which elements it changes."""

    width: int
    """Bytes of one location word, each with a plane of its own; 0 for RUN, which has none."""
    escape: int
    """The byte that adds itself to a gap and goes on; 0 for forms that have none."""

    def __new__(cls, code: int, width: int = 0, escape: int = 0) -> Self:
        form = int.__new__(cls, code)
        form._value_, form.width, form.escape = code, width, escape
        return form

    RUN = 0, 0, 0
    """``count`` consecutive elements from ``start``; no location bytes. A dense item is a run over the whole tensor."""
    GAPS = 1, 1, 255
    """One byte a gap; 255 means 'add 255 and go on'. A gap counts the unchanged elements since the one before."""
    WIDE2 = 2, 2, 0
    """Gaps as two-byte words, split into byte planes, low first."""
    SHORT_GAPS = 3, 1, 85
    """One byte a gap; 85 means 'add 85 and go on', and no byte is above it. Short gaps compress better than as GAPS."""
    WIDE4 = 4, 4, 0
    """Gaps as four-byte words, split into byte planes, low first."""
    WIDE8 = 8, 8, 0
    """Gaps as eight-byte words, split into byte planes, low first."""


@dataclass(frozen=True, slots=True, eq=False)
class DeltaRecords:
    """Changed elements of one canonical tensor, uncoded."""

    spec: TensorSpec
    flat_index: NDArray[np.int64]
    """Strictly ascending flat indices, shape [n]."""
    new_bits: Words
    """Words of the tensor's width, shape [n]."""
    old_bits: Words | None
    """Same shape; None on the residual path, which can only become overwrites (paper A.1)."""

    def __post_init__(self) -> None:
        if self.flat_index.shape != self.new_bits.shape or (
            self.old_bits is not None and self.old_bits.shape != self.new_bits.shape
        ):
            raise RejectedError(f"records of {self.spec}: arrays differ in length")

    def values(self, encoding: Encoding) -> Words:
        """The words to send, not yet zigzagged."""
        if encoding is Encoding.OVERWRITE:
            return self.new_bits
        if self.old_bits is None:
            raise RejectedError(f"records of {self.spec}: {encoding.name} needs the old bits; residual records are overwrites")
        if encoding is Encoding.XOR:
            return np.bitwise_xor(self.new_bits, self.old_bits)
        return np.subtract(self.new_bits, self.old_bits)


@dataclass(frozen=True, slots=True, eq=False)
class CodedItem:
    """One owner's changed elements of one tensor (one group of pieces of it), as columns ready for a payload.

    Differences are zigzagged in the value planes: ``(d << 1) ^ (d >> (w - 1))`` with an arithmetic shift, so that small
    steps up and down both have small codes.
    """

    spec: TensorSpec
    encoding: Encoding
    location_form: LocationForm
    start: int
    """Flat index of the first changed element, in every form."""
    count: int
    """Changed elements, at least 1."""
    location_planes: tuple[Plane, ...]
    """() for RUN; one byte stream for GAPS and SHORT_GAPS (``count`` bytes, and one for each escape); else 2, 4 or 8 planes of
    ``count`` bytes. The first gap is 0: ``start`` says where it ends."""
    value_planes: tuple[Plane, ...]
    """As many planes as an element has bytes, each of ``count`` bytes, low byte first."""


@dataclass(frozen=True, slots=True, eq=False)
class ScanResult:
    """What one scan of candidate against baseline found."""

    item: CodedItem | None
    """None if no bit differs."""
    digest_change: TensorDigest
    """What to add to the tensor's digest once the candidate is committed."""


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Items that travel as one payload."""

    items: tuple[CodedItem, ...]
    input_nbytes: int
    """Bytes of the scanned tensors, unchanged elements included (paper C, Fig. C.3)."""

    @property
    def num_changed(self) -> int:
        return sum(item.count for item in self.items)


def word_view(array: NDArray[Any]) -> Words:
    """The stored bits of a contiguous array as flat unsigned words; shares memory."""
    return array.reshape(-1).view(np.dtype(f"<u{array.dtype.itemsize}"))
