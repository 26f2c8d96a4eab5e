"""Pieces bound to the words that they address: checked and tabulated once, applied to at every refit.

A model has tens of thousands of canonical tensors and each takes one small item per refit, so checks that do not depend on the
item would cost more than the changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from deltarefit.canonical import TensorSpec, Words
from deltarefit.errors import PayloadInvalidError
from deltarefit.kernels import native, twins
from deltarefit.kernels.checks import check_pieces, check_target
from deltarefit.kernels.coding import check_columns, decode_positions, decode_values
from deltarefit.kernels.isa import Isa
from deltarefit.kernels.library import address, resolve
from deltarefit.kernels.table import PieceTable
from deltarefit.pieces import Cast, Piece
from deltarefit.records import CodedItem

__all__ = ["BoundPieces"]


class BoundPieces:
    """``apply_item`` for one canonical tensor and one storage."""

    __slots__ = ("_isa", "_pieces", "_spec", "_storage", "_target")

    def __init__(
        self, storage: Words, pieces: PieceTable | Sequence[Piece], spec: TensorSpec, *, isa: Isa | None = None
    ) -> None:
        """Check once what ``apply_item`` checks at every call. ``storage`` must stay where it is.

        Raises:
            RejectedError: storage, pieces and the tensor do not fit each other.
        """
        where = f"pieces of {spec}"
        self._pieces = pieces if isinstance(pieces, PieceTable) else PieceTable(pieces)
        check_pieces(self._pieces.pieces, storage, where, spec)
        check_target(storage, self._pieces.pieces, spec.element_nbytes, where)
        self._storage, self._spec, self._isa = storage, spec, resolve(isa)
        widens = self._pieces.cast is Cast.WIDEN
        self._target = native.ApplyTarget(address(storage), self._pieces.address, len(self._pieces.pieces), widens)

    @property
    def isa(self) -> Isa:
        return self._isa

    @property
    def target(self) -> native.ApplyTarget:
        """Valid as long as these pieces are."""
        return self._target

    def apply_item(self, item: CodedItem) -> int:
        """Decode an item and apply it; returns the storage elements changed. Once per attempt, unless it overwrites.

        Raises:
            PayloadInvalidError: the item is of another tensor, or its columns are not what they must be. Nothing was written.
        """
        self.check(item)
        if self._isa is not Isa.NUMPY:
            applied = native.apply_item(self._target, item, self._isa)
            if applied >= 0:
                return applied
        # The twin, which also has the words for what the compiled decoder refused.
        return twins.apply(self._storage, self._pieces.pieces, decode_positions(item), decode_values(item), item.encoding)

    def check(self, item: CodedItem) -> None:
        """Raise what ``apply_item`` would raise before it looks at the locations."""
        self.check_spec(item.spec)
        check_columns(item)

    def check_spec(self, spec: TensorSpec) -> None:
        """Raises PayloadInvalidError: these pieces are of another tensor."""
        if spec is not self._spec and spec != self._spec:
            raise PayloadInvalidError(f"item of {spec}: these pieces are bound to {self._spec}")
