"""From what was learned of a loader to one route per canonical tensor, with every refusal named."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from deltarefit.canonical import DTYPE_NBYTES, TensorSpec
from deltarefit.pieces import Cast, Piece, StridedView
from deltarefit.placement.learn import LearnedLoader
from deltarefit.placement.overlap import Claim, colliding
from deltarefit.placement.run import Home, claims_of_homes, places_of
from deltarefit.receiver.report import TensorRoute
from deltarefit.receiver.trial import TrialResult
from deltarefit.records import Encoding

__all__ = [
    "HeldPieces",
    "aliases_and_collisions",
    "held_pieces",
    "is_constant",
    "pieces_route",
    "scratch_route",
    "view_key",
    "written_twice",
]

_ALL = (int(Encoding.DIFFERENCE), int(Encoding.XOR), int(Encoding.OVERWRITE))
_BITWISE = (int(Encoding.XOR), int(Encoding.OVERWRITE))
_OVERWRITE_ONLY = (int(Encoding.OVERWRITE),)
_FILL = "\0constant of "
_MAX_REPLICA_PIECES = 512
"""Above this many pieces that share elements, no digest is kept: finding replicas compares all pairs."""


_Copy = tuple[int, tuple[Piece, ...]]
"""Number of the home, and pieces of it."""


@dataclass(frozen=True, slots=True)
class HeldPieces:
    """The elements of one tensor that a rank holds, each listed once, and further copies of them."""

    primary: tuple[tuple[int, Piece], ...]
    """(number of the home, piece); disjoint in the canonical tensor."""
    replicas: tuple[tuple[_Copy, _Copy], ...]
    """Pairs of a further copy and the primary one of the same elements."""
    coverage: str
    num_elements: int


def held_pieces(homes: Iterable[Home]) -> HeldPieces | None:
    """Sort pieces into first and further homes; None if they share elements in part only."""
    pieces = [(number, piece) for number, home in enumerate(homes) for piece in home.element_pieces]
    claims = [Claim(str(place), "", piece.canonical, 1) for place, (_, piece) in enumerate(pieces)]
    primary = pieces
    replicas: list[tuple[_Copy, _Copy]] = []
    if len(pieces) > 1 and colliding(claims):
        if len(pieces) > _MAX_REPLICA_PIECES:
            return None
        by_view: dict[StridedView, tuple[int, Piece]] = {}
        primary = []
        for entry in pieces:
            first = by_view.setdefault(entry[1].canonical, entry)
            if first is entry:
                primary.append(entry)
            else:
                replicas.append(((entry[0], (entry[1],)), (first[0], (first[1],))))
        if colliding(Claim(str(place), "", piece.canonical, 1) for place, (_, piece) in enumerate(primary)):
            return None
    views = sorted((piece.canonical for _, piece in primary), key=lambda view: (view.offset, view.shape, view.stride))
    key = view_key(*_joined(views))
    return HeldPieces(tuple(primary), tuple(replicas), key, sum(piece.num_elements for _, piece in primary))


def held_homes(homes: Sequence[Home]) -> HeldPieces | None:
    """The same where whole homes hold the same elements, whatever pieces each is made of; None if they do so in part only."""
    primary: list[tuple[int, Piece]] = []
    replicas: list[tuple[_Copy, _Copy]] = []
    first_of: dict[tuple[StridedView, ...], int] = {}
    for number, home in enumerate(homes):
        first = first_of.setdefault(home.elements, number)
        if first == number:
            primary += [(number, piece) for piece in home.element_pieces]
        else:
            replicas.append(((number, home.element_pieces), (first, homes[first].element_pieces)))
    views = [view for elements in first_of for view in elements]
    if () in first_of or colliding(Claim(str(place), "", view, 1) for place, view in enumerate(views)):
        return None
    key = view_key(*_joined(sorted(views, key=lambda view: (view.offset, view.shape, view.stride))))
    return HeldPieces(tuple(primary), tuple(replicas), key, sum(view.num_elements for view in views))


def view_key(*views: StridedView) -> str:
    """Equal for equal lists of views."""
    text = ";".join(f"{view.offset},{view.shape},{view.stride}" for view in views)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _joined(views: list[StridedView]) -> list[StridedView]:
    """Runs that touch become one, so that ranks which cut the same elements differently have the same key."""
    joined: list[StridedView] = []
    for view in views:
        last = joined[-1] if joined else None
        if last is not None and last.stride == view.stride == (1,) and last.offset + last.shape[0] == view.offset:
            joined[-1] = StridedView(last.offset, (last.shape[0] + view.shape[0],), (1,))
        else:
            joined.append(view)
    return joined


def pieces_route(
    homes: tuple[Home, ...], held: HeldPieces | None, *, is_alias: bool, has_low_bits: bool, derives: str = ""
) -> TensorRoute:
    """The route of a tensor that goes straight to storage. ``derives``: what post-load computes from it, in words."""
    casts = {piece.cast for home in homes for piece in home.pieces}
    reason = ""
    encodings: tuple[int, ...] = _ALL
    if any(home.bits for home in homes):
        reason, encodings = "post-load cuts or flips its elements; no differences", _BITWISE
    if is_alias:
        reason = "shares its storage with another tensor; overwrites only"
    elif has_low_bits:
        reason = "resident values have more bits than the canonical dtype; overwrites only"
    return TensorRoute(
        kind="pieces",
        encodings=_OVERWRITE_ONLY if is_alias or has_low_bits else encodings,
        cast="widen" if Cast.WIDEN in casts else "same",
        reason="; ".join(part for part in (reason, derives) if part),
        is_rerun=bool(derives),
        num_elements=sum(p.num_elements for h in homes for p in h.element_pieces) if held is None else held.num_elements,
        num_pieces=sum(len(home.pieces) for home in homes),
        coverage="" if held is None or has_low_bits else held.coverage,
    )


def scratch_route(spec: TensorSpec, trial: TrialResult) -> TensorRoute:
    """The route of a tensor that goes through the engine's loader."""
    return TensorRoute(
        kind="scratch",
        encodings=_OVERWRITE_ONLY,
        cast="opaque",
        reason=trial.reason,
        num_elements=spec.num_elements,
        is_dense=trial.is_dense,
    )


def claims_of(learned: LearnedLoader) -> list[Claim]:
    """Every element of storage that the loader writes, with the tensor it belongs to."""
    claims = claims_of_homes(learned.homes)
    for name, opaque in learned.opaque.items():
        claims += [
            Claim(name, w.storage.key, w.view, DTYPE_NBYTES[w.dtype]) for w in {w.key: w for w in opaque.writes}.values()
        ]
    fills = {(write.current, write.key): write for write in learned.fills}
    return claims + [Claim(f"{_FILL}{w.current}", w.storage.key, w.view, DTYPE_NBYTES[w.dtype]) for w in fills.values()]


def is_constant(claim: Claim) -> bool:
    """Whether a claim is a constant that the loader writes, not an element of a tensor."""
    return claim.owner.startswith(_FILL)


def aliases_and_collisions(
    learned: LearnedLoader, claims: Iterable[Claim], dropped: Callable[[str], bool] = lambda _: False
) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Pairs of tensors that share all their storage element by element, and refusals for every other shared byte.

    ``dropped`` says of which tensors no bit is served: bytes that only such tensors share are nobody's concern.
    """
    aliases: list[tuple[str, str]] = []
    refused: dict[str, str] = {}
    for first, second in sorted(colliding(claims)):
        fills = [name.removeprefix(_FILL) for name in (first, second) if name.startswith(_FILL)]
        names = [name for name in (first, second) if not name.startswith(_FILL)]
        if all(dropped(name) for name in names):  # or there are none
            continue
        if fills:
            if fills[0] != names[0]:
                refused[names[0]] = f"the loader overwrites elements of it with a constant when it loads {fills[0]}"
        elif first == second:
            if first not in learned.opaque:
                refused[first] = "the loader writes the same bytes twice with different elements of it"
        elif _same_homes(learned.homes.get(first), learned.homes.get(second)):
            aliases.append((first, second))
        else:
            refused[first] = written_twice(second)
    return aliases, refused


def written_twice(other: str) -> str:
    """Why a tensor that shares bytes with another one is refused."""
    return f"the loader writes the same bytes for {other}; which one wins depends on their order. Have it take one of the two"


def _same_homes(first: tuple[Home, ...] | None, second: tuple[Home, ...] | None) -> bool:
    return first is not None and second is not None and places_of(first) == places_of(second)
