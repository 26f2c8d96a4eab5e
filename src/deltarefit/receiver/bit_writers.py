"""Straight to storage where engines cut elements: nibbles, bytes of wider elements, and granules with flipped bits.

Differences would carry from one granule into the next, so these places take xor masks and overwrites only. Everything is plain
torch and numpy; the bytes that hold the changed granules are read, changed and written back, whatever else they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deltarefit import kernels
from deltarefit.canonical import WORDS, TensorDigest, TensorSpec, Words
from deltarefit.pieces import Piece, StridedView, strided
from deltarefit.placement.granules import granules_of_bytes, granules_of_words, words_of_granules
from deltarefit.placement.locate import locate
from deltarefit.records import CodedItem, Encoding

__all__ = ["BitTarget"]


@dataclass(frozen=True, slots=True, eq=False)
class BitTarget:
    """Granules of one tensor in one storage; all granules of every element that it holds."""

    key: str
    spec: TensorSpec
    flat: torch.Tensor
    """All bytes of the storage, shape [bytes]."""
    pieces: tuple[Piece, ...]
    """Positions are granules."""
    bits: int
    flip: int

    def apply(self, item: CodedItem) -> int:
        """Apply an xor or overwrite item; returns the elements that were written."""
        positions, values = kernels.decode_positions(item), kernels.decode_values(item)
        per_element = self.spec.element_nbytes * 8 // self.bits
        numbers = (positions[:, None] * per_element + np.arange(per_element)).reshape(-1)
        granules = granules_of_words(values, self.bits)
        written = np.zeros(positions.size, bool)
        for piece in self.pieces:
            places, targets = locate(piece, numbers)
            if places.size:
                written[places // per_element] = True
                self._write(targets, granules[places], item.encoding)
        return int(written.sum())

    def _write(self, targets: NDArray[np.int64], granules: NDArray[Any], encoding: Encoding) -> None:
        """Change granules at these positions of the storage, each position once."""
        if encoding is Encoding.OVERWRITE:
            granules = granules ^ granules.dtype.type(self.flip)
        index, keep, change = _byte_masks(targets, granules, self.bits)
        places = torch.from_numpy(index).to(self.flat.device)
        resident = self.flat[places]
        if encoding is Encoding.OVERWRITE:
            resident = resident & torch.from_numpy(keep).to(self.flat.device)
        self.flat[places] = resident ^ torch.from_numpy(change).to(self.flat.device)

    def read(self, flat_index: NDArray[np.int64]) -> tuple[NDArray[np.int64], Words]:
        """Resident canonical words of those flat indices that are held here: places in ``flat_index`` and words."""
        per_element = self.spec.element_nbytes * 8 // self.bits
        numbers = (flat_index[:, None] * per_element + np.arange(per_element)).reshape(-1)
        granules = np.zeros(numbers.size, WORDS[max(1, self.bits // 8)])
        found = np.zeros(numbers.size, bool)
        for piece in self.pieces:
            places, targets = locate(piece, numbers)
            granules[places] = self._granules(targets) ^ granules.dtype.type(self.flip)
            found[places] = True
        held = np.flatnonzero(found.reshape(-1, per_element).all(axis=1))
        words = words_of_granules(granules, self.bits, self.spec.element_nbytes)
        return held, words[held]

    def _granules(self, targets: NDArray[np.int64]) -> NDArray[Any]:
        if self.bits >= 8:
            width = self.bits // 8
            index = (targets[:, None] * width + np.arange(width)).reshape(-1)
            return self._bytes(index).view(WORDS[width])
        per_byte = 8 // self.bits
        shifts = (targets % per_byte * self.bits).astype(np.uint8)
        return (self._bytes(targets // per_byte) >> shifts) & np.uint8((1 << self.bits) - 1)

    def _bytes(self, index: NDArray[np.int64]) -> NDArray[np.uint8]:
        raw: NDArray[np.uint8] = self.flat[torch.from_numpy(index).to(self.flat.device)].cpu().numpy()
        return raw

    def digest(self, pieces: Sequence[Piece]) -> TensorDigest:
        """Digest of the elements that pieces name; what they say of the storage is left aside."""
        words = np.zeros(self.spec.num_elements, self.spec.word_dtype)
        self.copy_to(words)
        return kernels.digest(words, [Piece(piece.canonical, piece.canonical) for piece in pieces])

    def copy_to(self, words: Words) -> None:
        """Fill in the canonical words that lie here; ``words`` has all elements of the tensor."""
        granules = granules_of_words(words, self.bits)
        held = [piece for piece in self.pieces if piece.num_elements]
        if held:
            stored, first = self._span(held)
            for piece in held:
                near = StridedView(piece.storage.offset - first, piece.storage.shape, piece.storage.stride)
                strided(granules, piece.canonical)[...] = strided(stored, near) ^ stored.dtype.type(self.flip)
        words[:] = words_of_granules(granules, self.bits, words.itemsize)

    def _span(self, pieces: Sequence[Piece]) -> tuple[NDArray[Any], int]:
        """Resident granules from the first to the last of pieces, and the first one's number."""
        low = min(piece.storage.first for piece in pieces) * self.bits // 8
        end = -(-(max(piece.storage.last for piece in pieces) + 1) * self.bits // 8)
        return granules_of_bytes(self.flat[low:end].cpu().numpy(), self.bits), low * 8 // self.bits

    def low_bits_are_zero(self) -> bool:
        """Nothing is widened here."""
        return True


def _byte_masks(
    targets: NDArray[np.int64], granules: NDArray[Any], bits: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint8]]:
    """Bytes to change, each once: their positions, the bits to keep, and the bits to set or flip."""
    if bits >= 8:
        width = bits // 8
        index = (targets[:, None] * width + np.arange(width)).reshape(-1)
        return index, np.zeros(index.size, np.uint8), np.ascontiguousarray(granules).view(np.uint8).copy()
    per_byte = 8 // bits
    shifts = (targets % per_byte * bits).astype(np.uint8)
    order = np.argsort(targets, kind="stable")
    index, starts = np.unique((targets // per_byte)[order], return_index=True)
    change = np.bitwise_or.reduceat((granules.astype(np.uint8) << shifts)[order], starts)
    touched = np.bitwise_or.reduceat((np.uint8((1 << bits) - 1) << shifts)[order], starts)
    return index, np.invert(touched).astype(np.uint8), change.astype(np.uint8)
