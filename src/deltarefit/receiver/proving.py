"""What a rank proves about a tensor: the digest of the bits that it holds, home by home."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deltarefit import kernels
from deltarefit.canonical import TensorDigest, TensorSpec
from deltarefit.errors import BaseMismatchError
from deltarefit.pieces import Piece
from deltarefit.placement.run import Home
from deltarefit.receiver.report import WRONG_DIGEST, PartDigest, RankDigest
from deltarefit.receiver.routes import HeldPieces, view_key
from deltarefit.receiver.writers import HostTarget, WordsTarget, bit_target, target_of_piece

__all__ = ["DigestPlan", "Proofs", "digest_plan_of"]

_MAX_PARTS = 64
"""Boxes of one tensor whose digests are shown one by one; enough for fused projections whose groups are replicated."""


class _Read:
    """Pieces and the target that reads them."""

    __slots__ = ("bound", "pieces", "target")

    def __init__(self, target: WordsTarget, pieces: tuple[Piece, ...]) -> None:
        self.target = target
        self.pieces = pieces
        self.bound = kernels.BoundDigest(target.words, pieces) if isinstance(target, HostTarget) else None
        """What many reads at once are made with; None where the target reads by itself."""

    def digest(self) -> TensorDigest | None:
        """None if a widened element has bits below the canonical ones: no canonical tensor looks like that."""
        try:
            return self.target.digest(self.pieces)
        except BaseMismatchError:
            return None


@dataclass(frozen=True, slots=True, eq=False)
class DigestPlan:
    """How to compute the digest of one tensor from what a rank holds."""

    coverage: str
    num_elements: int
    primary: tuple[_Read, ...]
    """What its elements are read by."""
    replicas: tuple[tuple[_Read, _Read], ...]
    """Further homes of elements, each with the first home of the same."""
    has_parts: bool
    """Whether each read's digest is shown too."""

    @property
    def reads(self) -> tuple[_Read, ...]:
        """In the order of ``combine``."""
        return (*self.primary, *(read for pair in self.replicas for read in pair))

    def digest(self) -> RankDigest:
        """One read after the other: the plain twin of ``Proofs``."""
        return self.combine([read.digest() for read in self.reads])

    def combine(self, digests: Sequence[TensorDigest | None]) -> RankDigest:
        """Sum over the first homes. A further home that differs shifts it, whichever of the two is wrong."""
        if len(digests) == 1 and (only := digests[0]) is not None and not self.has_parts:  # almost every tensor
            return RankDigest(self.coverage, self.num_elements, only.lane0, only.lane1)
        known = [digest for digest in digests if digest is not None]
        if len(known) < len(digests):
            return RankDigest(self.coverage, self.num_elements, WRONG_DIGEST.lane0, WRONG_DIGEST.lane1)
        parts: list[PartDigest] = []
        total = TensorDigest()
        for read, digest in zip(self.primary, known, strict=False):
            total += digest
            if self.has_parts:
                (piece,) = read.pieces
                parts.append(PartDigest(view_key(piece.canonical), piece.num_elements, digest.lane0, digest.lane1))
        further = known[len(self.primary) :]
        for copy, first in zip(further[::2], further[1::2], strict=True):
            difference = copy - first
            total = total + difference + difference + difference
        return RankDigest(self.coverage, self.num_elements, total.lane0, total.lane1, tuple(parts))


def digest_plan_of(spec: TensorSpec, homes: Sequence[Home], held: HeldPieces, *, torch_writes: bool) -> DigestPlan:
    """How to compute the digest of a tensor with these homes."""
    makers = [bit_target(spec, home) if home.bits else target_of_piece(home, torch_writes=torch_writes) for home in homes]
    by_home: dict[int, list[Piece]] = {}
    for number, piece in held.primary:
        by_home.setdefault(number, []).append(piece)
    has_parts = 1 < len(held.primary) <= _MAX_PARTS and held.num_elements < spec.num_elements
    groups = [
        (number, group)
        for number, pieces in by_home.items()
        for group in ([(piece,) for piece in pieces] if has_parts else [tuple(pieces)])
    ]
    return DigestPlan(
        held.coverage,
        held.num_elements,
        tuple(_Read(makers[number], group) for number, group in groups),
        tuple((_Read(makers[n], copy), _Read(makers[m], first)) for (n, copy), (m, first) in held.replicas),
        has_parts,
    )


class Proofs:
    """How to compute the digests of many tensors, tabulated once: they are asked for while a request gate is closed."""

    __slots__ = ("_plans", "_prepared", "_reads")

    def __init__(self, plans: Mapping[str, DigestPlan]) -> None:
        self._plans = dict(plans)
        self._reads = [plan.reads for plan in self._plans.values()]
        self._prepared = kernels.PreparedDigests(
            [read.bound for reads in self._reads for read in reads if read.bound is not None]
        )

    def digests(self) -> dict[str, RankDigest]:
        """What each plan gives. Host memory is read on several threads."""
        found = iter(self._prepared.run())
        return {
            name: plan.combine([next(found) if read.bound is not None else read.digest() for read in reads])
            for (name, plan), reads in zip(self._plans.items(), self._reads, strict=True)
        }
