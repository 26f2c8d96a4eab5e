"""What several payloads do to the words of one tensor, or of a slice of it, as one set of changes. Pure; no files.

It is the arithmetic of ``deltarefit fold``, and of receivers that catch up over several versions.

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import TensorSpec, Words
from deltarefit.errors import RejectedError
from deltarefit.kernels import code_records, decode_positions, decode_values, scan
from deltarefit.pieces import contiguous
from deltarefit.records import CodedItem, DeltaRecords, Encoding

__all__ = ["Changes"]

_UNTOUCHED = 255
"""Kind of a word that no delta changed. The other kinds are encodings."""


class Changes:
    """Accumulated changes of one slice of the last target: for each word, what kind of change and by what value.

    Args:
        word_dtype: the slice's words.
        num_words: words that the slice has in the last target; longer states on the way are cut to it.
        num_image: words of them that the image takes from the base; the rest of it is zeros. 0 for a tensor that starts from
            zeros.
    """

    def __init__(self, word_dtype: np.dtype[Any], num_words: int, num_image: int) -> None:
        self._kinds = np.full(num_words, _UNTOUCHED, np.uint8)
        self._values: Words = np.zeros(num_words, word_dtype)
        self._num_image = num_image
        self._length = num_image

    def resize(self, length: int) -> None:
        """The tensor was cut or continued with zeros: so much of the slice is there now."""
        if length > self._length:
            # Where the direct image would bring the base's words back, the zeros have to be said.
            revived = slice(self._length, max(self._length, min(length, self._num_image)))
            self._kinds[revived] = Encoding.OVERWRITE
        else:
            self._kinds[length:] = _UNTOUCHED
            self._values[length:] = 0
        self._length = length

    def then(self, items: Iterable[CodedItem], where: object) -> None:
        """Add the items that one delta has for the slice; what lies past its present length is left out.

        Raises:
            RejectedError: an element was changed by difference and by mask, which nothing but the base's words could merge.
            PayloadInvalidError: an item's columns do not fit it.
        """
        for item in items:
            positions, values = decode_positions(item), decode_values(item)
            end = int(np.searchsorted(positions, self._length))
            self._add(positions[:end], values[:end], item.encoding, where)

    def _add(self, positions: NDArray[np.int64], values: Words, encoding: Encoding, where: object) -> None:
        if encoding is Encoding.OVERWRITE:
            self._kinds[positions] = encoding
            self._values[positions] = values
            return
        kinds, before = self._kinds[positions], self._values[positions]
        # A word that was changed and changed back is as good as untouched.
        kinds[(kinds != Encoding.OVERWRITE) & (before == 0)] = _UNTOUCHED
        mixed = kinds == (Encoding.XOR if encoding is Encoding.DIFFERENCE else Encoding.DIFFERENCE)
        if mixed.any():
            raise RejectedError(
                f"{where}: word {int(positions[np.argmax(mixed)])} is changed by difference in one delta and by xor in "
                "another; only the base's bits could merge them. Apply the chain instead, and diff its two ends"
            )
        # An untouched word has value 0, which both operations leave as the new value.
        self._values[positions] = before + values if encoding is Encoding.DIFFERENCE else before ^ values
        on_image = int(np.searchsorted(positions, self._num_image))
        kinds[:on_image][kinds[:on_image] == _UNTOUCHED] = encoding
        # Behind it the image is zeros, so the change is the new value.
        kinds[on_image:] = Encoding.OVERWRITE
        self._kinds[positions] = kinds

    def coded(self, spec: TensorSpec) -> list[CodedItem]:
        """The changes as items of disjoint elements, at most one per encoding."""
        items = []
        for encoding in Encoding:
            chosen = self._kinds == encoding
            if encoding is not Encoding.OVERWRITE:
                chosen &= self._values != 0
            if chosen.any():
                items.append(self._coded(spec, encoding, chosen))
        return items

    def _coded(self, spec: TensorSpec, encoding: Encoding, chosen: NDArray[np.bool_]) -> CodedItem:
        values = np.where(chosen, self._values, self._values.dtype.type(0))
        # Against zeros, difference and mask are the values themselves; the bits of an overwrite differ from their complement.
        baseline = np.where(chosen, ~values, values) if encoding is Encoding.OVERWRITE else np.zeros_like(values)
        item = scan(spec, values, baseline, (contiguous(0, values.size),), encoding).item
        if item is not None and (item.count == np.count_nonzero(chosen) or self._may_be_dense(encoding, chosen)):
            return item
        positions, sent = np.flatnonzero(chosen), values[chosen]
        return code_records(DeltaRecords(spec, positions, sent, np.zeros_like(sent)), encoding)

    def _may_be_dense(self, encoding: Encoding, chosen: NDArray[np.bool_]) -> bool:
        """Whether an item may address all words of the slice, where the scan finds that smaller.

        Words that are not chosen then get the value 0: harmless as a difference or mask if no other item addresses them, and
        as an overwrite where the image is zero.
        """
        if encoding is Encoding.OVERWRITE:
            return bool(chosen[: self._num_image].all())
        return bool(((self._kinds == encoding) | (self._kinds == _UNTOUCHED)).all())
