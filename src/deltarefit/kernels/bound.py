"""Pieces bound to the words that they address: checked and tabulated once, applied to at every refit.

A model has tens of thousands of canonical tensors and each takes one small item per refit, so checks that do not depend on the
item would cost more than the changes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from deltarefit.canonical import WORDS, TensorSpec, Words
from deltarefit.errors import PayloadInvalidError, RejectedError
from deltarefit.kernels import twins
from deltarefit.kernels.checks import check_injective, check_pieces, check_words, check_writeable, common_cast
from deltarefit.kernels.coding import check_columns, decode_positions, decode_values
from deltarefit.kernels.isa import Isa
from deltarefit.kernels.library import ApplyCall, library, resolve
from deltarefit.kernels.native import piece_table
from deltarefit.pieces import Cast, Piece
from deltarefit.records import CodedItem

__all__ = ["BoundPieces"]


class BoundPieces:
    """``apply_item`` for one canonical tensor and one storage."""

    __slots__ = ("_cast", "_isa", "_pieces", "_spec", "_storage", "_table")

    def __init__(self, storage: Words, pieces: Sequence[Piece], spec: TensorSpec, *, isa: Isa | None = None) -> None:
        """Check once what ``apply_item`` checks at every call. ``storage`` must stay where it is.

        Raises:
            RejectedError: storage, pieces and the tensor do not fit each other.
        """
        where = f"pieces of {spec}"
        held = tuple(piece.normalised() for piece in pieces if piece.num_elements)
        check_words(storage, where)
        check_writeable(storage, where)
        check_pieces(held, storage, where, spec)
        check_injective(held, where)
        self._cast = common_cast(held)
        width = 2 * spec.element_nbytes if self._cast is Cast.WIDEN else spec.element_nbytes
        if storage.dtype != WORDS.get(width) or (self._cast is Cast.WIDEN and spec.element_nbytes != 2):
            raise RejectedError(f"{where}: cannot go to storage words {storage.dtype} with cast {self._cast.name}")
        self._storage, self._pieces, self._spec, self._isa = storage, held, spec, resolve(isa)
        self._table = piece_table.__wrapped__(held)

    def apply_item(self, item: CodedItem) -> int:
        """Decode an item and apply it; returns the storage elements changed. Once per attempt, unless it overwrites.

        Raises:
            PayloadInvalidError: the item is of another tensor, or its columns are not what they must be. Nothing was written.
        """
        if item.spec is not self._spec and item.spec != self._spec:
            raise PayloadInvalidError(f"item of {item.spec}: these pieces are bound to {self._spec}")
        check_columns(item)
        if self._isa is not Isa.NUMPY:
            applied = self._native(item)
            if applied >= 0:
                return applied
        # The twin, or the words for what the compiled decoder refused.
        return twins.apply(self._storage, self._pieces, decode_positions(item), decode_values(item), item.encoding)

    def _native(self, item: CodedItem) -> int:
        kept = []  # contiguous copies must outlive the call
        call = ApplyCall(
            storage=_address(self._storage),
            table=_address(self._table),
            pieces=len(self._pieces),
            width=self._spec.element_nbytes,
            widen=self._cast is Cast.WIDEN,
            encoding=item.encoding,
            form=item.location_form,
            start=item.start,
            count=item.count,
            location_nbytes=item.location_planes[0].size if item.location_planes else 0,
            num_elements=self._spec.num_elements,
        )
        for slots, planes in ((call.locations, item.location_planes), (call.values, item.value_planes)):
            for number, plane in enumerate(planes):
                whole = plane if plane.flags.c_contiguous else plane.copy()
                kept.append(whole)
                slots[number] = _address(whole)
        return int(library().deltarefit_apply(ctypes.byref(call), self._isa))


def _address(array: Words) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
