"""The integration setup that both sides agree on before any byte moves (the paper's script M)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

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

    def to_wire(self) -> bytes:
        """JSON bytes for another process, catalog and digest included; equal plans have equal bytes."""
        return msgspec.json.encode(
            _PlanWire(
                catalog=msgspec.Raw(self.catalog.to_wire()),
                encodings=[int(self.encodings[name]) for name in self.catalog],
                num_owners=self.num_owners,
                dense=sorted(self.dense),
                digest=self.digest,
            )
        )

    @classmethod
    def from_wire(cls, data: bytes | memoryview) -> RefitPlan:
        """The plan that ``to_wire`` spelled.

        Raises:
            RejectedError: the bytes are no plan, or its digest is not that of its contents.
        """
        try:
            wire = msgspec.json.decode(data, type=_PlanWire)
            encodings = [Encoding(value) for value in wire.encodings]
        except (msgspec.DecodeError, ValueError) as error:
            raise RejectedError(f"plan of {len(data)} bytes: expected what RefitPlan.to_wire writes, got {error}") from error
        catalog = Catalog.from_wire(bytes(wire.catalog))
        if len(encodings) != len(catalog):
            raise RejectedError(f"plan: {len(encodings)} encodings for {len(catalog)} tensors; expected one each")
        plan = cls(catalog, dict(zip(catalog, encodings, strict=True)), wire.num_owners, frozenset(wire.dense))
        if plan.digest != wire.digest:
            raise RejectedError(
                f"plan: digest is {plan.digest}, its sender computed {wire.digest}; both sides need one version"
            )
        return plan


class _PlanWire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan as it travels."""

    catalog: msgspec.Raw
    encodings: list[int]
    """In the catalog's order."""
    num_owners: int
    dense: list[str]
    digest: str
