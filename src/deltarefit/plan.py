"""The integration setup that both sides agree on before any byte moves (the paper's script M)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from deltarefit.canonical import Catalog
from deltarefit.errors import RejectedError
from deltarefit.records import Encoding, EncodingMode

__all__ = ["RefitPlan"]


@dataclass(frozen=True, slots=True)
class RefitPlan:
    """Catalog, owners and, per tensor, the best encoding that every rank of every required receiver can take.

    The encoding of an item is decided here, in advance, never from its values (paper D.1).
    """

    catalog: Catalog
    encodings: Mapping[str, Encoding]
    """One entry per name of the catalog: the encoding used in mixed mode."""
    num_owners: int
    dense: frozenset[str] = frozenset()
    """Tensors of which every element is sent, as overwrites: receivers could not prove that they hold the base of these."""
    digest: str = field(init=False, default="")
    """32 hex digits over everything above; every payload carries it."""

    def __post_init__(self) -> None:
        if set(self.encodings) != set(self.catalog):
            missing = sorted(set(self.catalog) ^ set(self.encodings))
            raise RejectedError(f"plan: encodings and catalog differ in {len(missing)} names, first {missing[:3]}")
        if unknown := sorted(self.dense - set(self.catalog)):
            raise RejectedError(f"plan: dense names that the catalog lacks: {unknown[:3]}")
        lines = "".join(f"{name}\0{int(self.encodings[name])}\0{int(name in self.dense)}\n" for name in self.catalog)
        text = f"{self.catalog.digest}\0{self.num_owners}\n{lines}"
        object.__setattr__(self, "digest", hashlib.blake2b(text.encode(), digest_size=16).hexdigest())

    def encoding(self, name: str, mode: EncodingMode) -> Encoding:
        """The encoding that an item of this tensor has in an attempt of this mode."""
        if mode is EncodingMode.OVERWRITE or name in self.dense:
            return Encoding.OVERWRITE
        return self.encodings[name]
