"""Conversion tasks: which part of a canonical tensor lies where in this rank's memory (paper 4, A.1).

An adapter states facts (pieces, replicas, how to read the storage); it holds no code path of the refit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from deltarefit.canonical import Catalog, TensorSpec, Words
from deltarefit.errors import RejectedError
from deltarefit.pieces import Cast, Piece

if TYPE_CHECKING:
    from deltarefit.source.conversion import ResidualConverter

__all__ = ["ConversionTask", "ResidualSource", "SourceAdapter"]


@dataclass(frozen=True, slots=True, eq=False)
class ConversionTask:
    """One shard of one canonical tensor that this rank holds, and that it may or may not own."""

    key: str
    """Names the shard: equal on all ranks that hold a copy of it, else different. Input of the owner election."""
    spec: TensorSpec
    """The canonical tensor that the shard is part of."""
    pieces: tuple[Piece, ...]
    """Where its elements lie: flat indices of the canonical tensor against positions in ``words()``. Padding has no piece.
    Empty for an empty shard."""
    words: Callable[[], Words]
    """The stored bits now, in host memory, of the canonical dtype's width. Shares the parameter's memory where it can; a shard
    on an accelerator or of another dtype is copied. Asked anew for every scan, so a rebound parameter is followed."""
    replicas: tuple[int, ...]
    """Ascending training ranks that hold bitwise equal copies of this shard, this one included.

    Empty: every rank that lists a task of this key. For layouts of which a rank sees its own part only, such as a parameter
    sharded over one dimension of a mesh and copied along another that it does not mention."""
    stored_dtype: str = ""
    """The parameter's own dtype where ``words`` casts it; empty where the stored bits are the canonical ones."""

    def __post_init__(self) -> None:
        if not self.key:
            raise RejectedError(f"conversion task of {self.spec}: expected a key")
        if list(self.replicas) != sorted(set(self.replicas)):
            raise RejectedError(f"conversion task {self.key}: replicas {self.replicas} are not ascending, distinct ranks")
        for piece in self.pieces:
            if piece.cast is not Cast.SAME:
                raise RejectedError(f"conversion task {self.key}: piece {piece} casts; give words of dtype {self.spec.dtype}")
            if piece.canonical.last >= self.spec.num_elements:
                raise RejectedError(
                    f"conversion task {self.key}: piece {piece} reaches flat index {piece.canonical.last}; "
                    f"{self.spec} has {self.spec.num_elements} elements"
                )

    @property
    def num_elements(self) -> int:
        return sum(piece.num_elements for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        return self.num_elements * self.spec.element_nbytes


class SourceAdapter(Protocol):
    """What a training framework tells about its parameters. Called on every training rank."""

    def catalog(self) -> Catalog:
        """All canonical tensors of the policy, not only those this rank holds; equal on every rank."""
        ...

    def tasks(self) -> Sequence[ConversionTask]:
        """Every shard that this rank holds, whoever owns it. May be called again; the facts may not change meanwhile."""
        ...

    def barrier(self) -> None:
        """Return when the parameters of all ranks are final: no kernel, optimizer write or parameter gather is under way.

        Called by every rank before shards are read.
        """
        ...


@runtime_checkable
class ResidualSource(Protocol):
    """A SourceAdapter of which some canonical tensors are computed."""

    def residual(self) -> ResidualConverter | None:
        """How they are computed; None if there are none. Their specs are part of the catalog, and no task covers them."""
        ...
