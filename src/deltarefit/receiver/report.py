"""What prewarm tells the coordinator, and how the reports of several ranks add up. Plain values that travel as msgspec."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from deltarefit.canonical import Catalog, TensorDigest
from deltarefit.errors import BaseMismatchError
from deltarefit.records import Encoding

__all__ = [
    "WRONG_DIGEST",
    "MergedReport",
    "PartDigest",
    "PrewarmReport",
    "RankDigest",
    "RankSurvey",
    "TensorRoute",
    "merge_digests",
    "merge_reports",
    "survey_ranks",
]

WRONG_DIGEST = TensorDigest(1, 1)
"""Added to a digest that storage does not live up to, so that no comparison can pass."""


class TensorRoute(msgspec.Struct, frozen=True):
    """How one rank takes changes of one canonical tensor."""

    kind: str
    """``pieces``: straight to storage. ``scratch``: through the engine's loader. ``skipped``: this rank holds none of it."""
    encodings: tuple[int, ...]
    """Encodings that this rank can take, best first; empty if skipped (it takes whatever comes)."""
    cast: str = "same"
    """``same``, ``widen``, or ``opaque`` if the loader computes."""
    reason: str = ""
    """Why it is not plain pieces."""
    num_elements: int = 0
    """Canonical elements that this rank holds."""
    num_pieces: int = 0
    coverage: str = ""
    """Equal for ranks that hold the same canonical elements; empty if unknown."""
    is_dense: bool = False
    """Whether every element must be sent each time: the loader's computation cannot be masked."""
    is_rerun: bool = False
    """Whether the engine's post-load step derives further state from it, which is computed anew after each refit."""


class PrewarmReport(msgspec.Struct, frozen=True):
    """What one rank learned."""

    routes: dict[str, TensorRoute]
    """One per name of the catalog."""
    fingerprint: str
    """32 hex digits over the model's layout, the catalog and all routes; changes when a new prewarm is needed."""
    unreached: dict[str, int]
    """Elements that no canonical tensor reaches, by the name of the parameter or buffer (padding, caches, constants)."""
    misreported: tuple[str, ...] = ()
    """Names that the loader returned as loaded although nothing was written for them here."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Pairs of canonical tensors that share all their storage, such as a tied head and its embedding."""
    num_storages: int = 0
    resident_nbytes: int = 0
    scratch_nbytes: int = 0
    """Host memory reserved for tensors that go through the loader."""


class MergedReport(msgspec.Struct, frozen=True):
    """The reports of all ranks of all required receivers, as the plan needs them."""

    encodings: dict[str, int]
    """Per tensor the best encoding that every rank can take."""
    dense: tuple[str, ...]
    """Tensors of which every element must be sent each time."""
    unheld: tuple[str, ...]
    """Tensors of which no rank holds anything."""


class PartDigest(msgspec.Struct, frozen=True):
    """The digest of one box of a canonical tensor."""

    coverage: str
    """Equal key: the same canonical elements."""
    num_elements: int
    lane0: int
    lane1: int

    @property
    def digest(self) -> TensorDigest:
        return TensorDigest(self.lane0, self.lane1)


class RankDigest(msgspec.Struct, frozen=True):
    """The digest of the elements of one canonical tensor that one rank holds."""

    coverage: str
    """Equal key: the same canonical elements."""
    num_elements: int
    lane0: int
    lane1: int
    parts: tuple[PartDigest, ...] = ()
    """The same elements box by box, where a rank holds several boxes but not all: other ranks may hold some of them too."""

    @property
    def digest(self) -> TensorDigest:
        return TensorDigest(self.lane0, self.lane1)


def merge_reports(reports: Iterable[PrewarmReport], catalog: Catalog) -> MergedReport:
    """What all ranks can take."""
    listed = list(reports)
    encodings: dict[str, int] = {}
    dense: list[str] = []
    unheld: list[str] = []
    for name in catalog:
        routes = [report.routes[name] for report in listed]
        held = [route for route in routes if route.kind != "skipped"]
        common = [code for code in _preference(held) if all(code in route.encodings for route in held)]
        encodings[name] = common[0] if common else int(Encoding.OVERWRITE)
        if any(route.is_dense for route in held):
            dense.append(name)
        if not held and catalog[name].num_elements:
            unheld.append(name)
    return MergedReport(encodings, tuple(dense), tuple(unheld))


def _preference(held: Sequence[TensorRoute]) -> tuple[int, ...]:
    return held[0].encodings if held else (int(Encoding.DIFFERENCE),)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name fits one of these patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class RankSurvey:
    """What the ranks of one receiver hold, together."""

    digests: dict[str, TensorDigest | None]
    """Per canonical tensor its digest. None where the ranks' parts do not add up to the whole tensor, so that nothing can be
    proved: its canonical bits cannot be read back, or ranks hold boxes that overlap in part."""
    disagreeing: dict[str, tuple[int, ...]]
    """Tensors of which ranks hold the same elements with different bits, and these ranks. Their digest is wrong on purpose."""


def survey_ranks(per_rank: Sequence[Mapping[str, RankDigest]], catalog: Catalog) -> RankSurvey:
    """The digest of each whole canonical tensor, summed over the ranks of one receiver."""
    merged: dict[str, TensorDigest | None] = {}
    disagreeing: dict[str, tuple[int, ...]] = {}
    for name, spec in catalog.items():
        held = [(rank, digests[name]) for rank, digests in enumerate(per_rank) if name in digests]
        if held and held[0][1].num_elements == spec.num_elements and _are_alike([digest for _, digest in held]):
            merged[name] = held[0][1].digest  # almost every tensor; the rest of this says the same
            continue
        ranks: set[int] = set()
        total = _sum_of([(rank, _whole(d)) for rank, d in held], spec.num_elements, ranks)
        if total is None:
            total = _sum_of([(rank, part) for rank, d in held for part in d.parts or (_whole(d),)], spec.num_elements, ranks)
        if ranks:
            disagreeing[name] = tuple(sorted(ranks))
            total = (total or TensorDigest()) + WRONG_DIGEST
        merged[name] = total
    return RankSurvey(merged, disagreeing)


def merge_digests(per_rank: Sequence[Mapping[str, RankDigest]], catalog: Catalog) -> dict[str, TensorDigest | None]:
    """``survey_ranks``, for callers that have no use for a receiver whose ranks disagree.

    Raises:
        BaseMismatchError: two ranks hold different bits for the same elements.
    """
    survey = survey_ranks(per_rank, catalog)
    if survey.disagreeing:
        first = [f"{name} (ranks {' and '.join(map(str, ranks))})" for name, ranks in list(survey.disagreeing.items())[:3]]
        raise BaseMismatchError(
            f"{len(survey.disagreeing)} tensors have different bits on ranks that hold the same elements, first {first}; "
            "repair the receiver by a dense overwrite"
        )
    return survey.digests


def _are_alike(digests: Sequence[RankDigest]) -> bool:
    """Whether all are of the same elements, and the same."""
    first = digests[0]
    return all(one.coverage == first.coverage and one.lane0 == first.lane0 and one.lane1 == first.lane1 for one in digests[1:])


def _whole(digest: RankDigest) -> PartDigest:
    """A rank's whole share as one part."""
    return PartDigest(digest.coverage, digest.num_elements, digest.lane0, digest.lane1)


def _sum_of(parts: Sequence[tuple[int, PartDigest]], num_elements: int, disagreeing: set[int]) -> TensorDigest | None:
    """The sum over distinct parts if they are all of the tensor. Ranks that disagree about a part are noted."""
    distinct: dict[str, tuple[int, PartDigest]] = {}
    for rank, part in parts:
        first_rank, first = distinct.setdefault(part.coverage, (rank, part))
        if first != part:
            disagreeing.update((first_rank, rank))
    if sum(part.num_elements for _, part in distinct.values()) != num_elements:
        return None
    return sum((part.digest for _, part in distinct.values()), TensorDigest())
