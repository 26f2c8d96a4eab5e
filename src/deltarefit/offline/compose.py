"""What several deltas do to one slice, as one set of changes: the arithmetic of ``fold``. Pure; no files.

A slice's words are an image (the base's words, or zeros) and then changes to single words. Changes compose without knowing
the image:

* a later overwrite replaces whatever came before;
* a difference after an overwrite is an overwrite of the sum; after a difference, the sum of both, modulo the word;
* a mask likewise, with exclusive or;
* a mask after a difference, or the reverse, on one word depends on the image and is refused;
* where the image is known to be zeros, a difference or mask is an overwrite.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import TensorSpec, Words
from deltarefit.errors import RejectedError
from deltarefit.kernels import code_records, decode_positions, decode_values
from deltarefit.records import CodedItem, DeltaRecords, Encoding

__all__ = ["Changes", "Sparse"]

_RELATIVE = (Encoding.DIFFERENCE, Encoding.XOR)


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """Values at strictly ascending positions of a slice."""

    positions: NDArray[np.int64]
    values: Words

    @classmethod
    def nothing(cls, word_dtype: np.dtype[Any]) -> Sparse:
        return cls(np.empty(0, np.int64), np.empty(0, word_dtype))

    def keep(self, chosen: NDArray[np.bool_]) -> Sparse:
        return Sparse(self.positions[chosen], self.values[chosen])

    def without(self, positions: NDArray[np.int64]) -> Sparse:
        """All but the entries at these positions (ascending)."""
        if not positions.size or not self.positions.size:
            return self
        return self.keep(~_holds(positions, self.positions))

    def joined(self, other: Sparse) -> Sparse:
        """Both, which share no position."""
        if not other.positions.size:
            return self
        if not self.positions.size:
            return other
        positions = np.concatenate((self.positions, other.positions))
        order = np.argsort(positions, kind="stable")
        return Sparse(positions[order], np.concatenate((self.values, other.values))[order])


def _holds(sorted_positions: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.bool_]:
    """For each wanted position, whether it is among the sorted ones."""
    at = np.searchsorted(sorted_positions, wanted)
    at[at == sorted_positions.size] = 0
    found: NDArray[np.bool_] = sorted_positions[at] == wanted if sorted_positions.size else np.zeros(wanted.size, np.bool_)
    return found


class Changes:
    """Accumulated changes of one slice of the last target.

    Args:
        word_dtype: the slice's words.
        num_image: words that the image takes from the base; the rest of it is zeros. 0 for a tensor that starts from zeros.
    """

    def __init__(self, word_dtype: np.dtype[Any], num_image: int) -> None:
        self._num_image = num_image
        self._num_words = num_image
        nothing = Sparse.nothing(word_dtype)
        self._by_encoding = dict.fromkeys(Encoding, nothing)
        self._word_dtype = word_dtype

    def resize(self, num_words: int) -> None:
        """The tensor was cut or continued with zeros: so much of the slice, at most its last length, is there now."""
        if num_words > self._num_words:
            # Where the direct image would bring the base's words back, the zeros have to be said.
            revived = np.arange(self._num_words, min(num_words, self._num_image), dtype=np.int64)
            zeros = Sparse(revived, np.zeros(revived.size, self._word_dtype))
            self._by_encoding[Encoding.OVERWRITE] = self._by_encoding[Encoding.OVERWRITE].joined(zeros)
        else:
            for encoding, held in self._by_encoding.items():
                self._by_encoding[encoding] = held.keep(held.positions < num_words)
        self._num_words = num_words

    def then(self, items: Iterable[CodedItem], where: object) -> None:
        """Add the items that one delta has for the slice; what lies past its present length is left out.

        Raises:
            RejectedError: an element was changed by difference and by mask, which nothing but the base's words could merge.
            PayloadInvalidError: an item's columns do not fit it.
        """
        for item in items:
            self._add(Sparse(decode_positions(item), decode_values(item)), item.encoding, where)

    def _add(self, added: Sparse, encoding: Encoding, where: object) -> None:
        held = self._by_encoding
        added = added.keep(added.positions < self._num_words)
        if encoding is Encoding.OVERWRITE:
            for other in _RELATIVE:
                held[other] = held[other].without(added.positions)
            held[encoding] = held[encoding].without(added.positions).joined(added)
            return
        self._refuse_mix(added, _RELATIVE[1 - _RELATIVE.index(encoding)], where)
        on_known = _holds(held[Encoding.OVERWRITE].positions, added.positions)
        known = _combined(held[Encoding.OVERWRITE], added.keep(on_known), encoding)
        rest = added.keep(~on_known)
        on_zeros = rest.positions >= self._num_image
        held[Encoding.OVERWRITE] = known.joined(rest.keep(on_zeros))
        held[encoding] = _without_zeros(_combined(held[encoding], rest.keep(~on_zeros), encoding))

    def _refuse_mix(self, added: Sparse, other: Encoding, where: object) -> None:
        mixed = _holds(self._by_encoding[other].positions, added.positions)
        if mixed.any():
            raise RejectedError(
                f"{where}: word {int(added.positions[np.argmax(mixed)])} is changed by difference in one delta and by xor in "
                "another; only the base's bits could merge them. Apply the chain instead, and diff its two ends"
            )

    def coded(self, spec: TensorSpec) -> list[CodedItem]:
        """The changes as items of disjoint elements, at most one per encoding."""
        items = []
        for encoding, held in self._by_encoding.items():
            if held.positions.size:
                zeros = np.zeros(held.values.size, held.values.dtype)
                # Against zeros, difference and mask are the values themselves.
                items.append(code_records(DeltaRecords(spec, held.positions, held.values, zeros), encoding))
        return items


def _combined(held: Sparse, added: Sparse, encoding: Encoding) -> Sparse:
    """Entries of both; where they meet, the sum or the exclusive or."""
    if not added.positions.size:
        return held
    meets = _holds(held.positions, added.positions)
    values = held.values.copy()
    at = np.searchsorted(held.positions, added.positions[meets])
    if encoding is Encoding.DIFFERENCE:
        values[at] += added.values[meets]
    else:
        values[at] ^= added.values[meets]
    return Sparse(held.positions, values).joined(added.keep(~meets))


def _without_zeros(held: Sparse) -> Sparse:
    return held.keep(held.values != 0)
