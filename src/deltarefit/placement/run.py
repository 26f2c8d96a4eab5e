"""One observed call of a loader, and the homes that observation leads to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from deltarefit.canonical import TensorSpec, Words
from deltarefit.pieces import Piece, StridedView
from deltarefit.placement.inputs import Inputs, LoadWeights
from deltarefit.placement.overlap import Claim
from deltarefit.placement.shadow import Shadow
from deltarefit.placement.storages import ModelStorage, StorageMap
from deltarefit.placement.watch import LoadWatch, Write

__all__ = ["Home", "OpaqueWrites", "Run", "claims_of_homes", "group_homes", "places_of", "run_loader"]


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """Pieces of one canonical tensor in one storage."""

    storage: ModelStorage
    width: int
    """Bytes of a storage word."""
    pieces: tuple[Piece, ...]
    """Normalised and ascending; disjoint in the storage."""
    bits: int = 0
    """If not 0, pieces count in granules of so many bits, for post-load cut elements or flipped bits (``granules``)."""
    flip: int = 0
    """What each granule is xored with on its way."""
    elements: tuple[StridedView, ...] = ()
    """After post-load, the canonical elements that it holds; empty for homes as a loader leaves them."""

    @property
    def element_pieces(self) -> tuple[Piece, ...]:
        """Pieces whose canonical side counts in elements, whatever the storage side counts in."""
        return tuple(Piece(view, view) for view in self.elements) if self.bits else self.pieces


def group_homes(grouped: Mapping[tuple[str, int], tuple[ModelStorage, Sequence[Piece]]]) -> tuple[Home, ...]:
    """Homes from pieces by (storage key, width)."""
    return tuple(Home(storage, width, tuple(pieces)) for (_, width), (storage, pieces) in grouped.items())


def places_of(homes: Iterable[Home]) -> frozenset[tuple[str, int, Piece]]:
    """What homes say of storage; equal for two tensors if they share all of it element by element."""
    return frozenset((home.storage.key, home.width, piece) for home in homes for piece in home.pieces)


def claims_of_homes(homes: Mapping[str, Sequence[Home]]) -> list[Claim]:
    """What tensors take of storages, piece by piece."""
    return [
        Claim(name, home.storage.key, piece.storage, home.width)
        for name, listed in homes.items()
        for home in listed
        for piece in home.pieces
    ]


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueWrites:
    """Writes of a tensor whose values are not its stored bits moved, or that are not straight from it."""

    writes: tuple[Write, ...]
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What one call of a loader did."""

    writes: list[Write]
    changed_inputs: set[str]
    """Tensors that the loader changed in place."""
    read_inputs: set[str]
    """Tensors during which it took values into Python."""
    reported: frozenset[str]
    failure: str | None
    """The loader's own words if it raised."""
    last: str | None
    """The tensor that it asked for last."""
    is_exhausted: bool
    """Whether it had asked for every tensor when it ended."""
    is_collecting: bool
    """Whether it had asked for every tensor before it wrote anything, so that order says nothing."""


def run_loader(
    load_weights: LoadWeights,
    storages: StorageMap,
    specs: Sequence[TensorSpec],
    *,
    content: Callable[[TensorSpec], Words] | None = None,
    shadow: Shadow | None = None,
) -> Run:
    """Call a loader under the hook. Nothing of the model changes, unless it writes behind the hook's back."""
    inputs = Inputs(specs, content)
    watch = LoadWatch(storages, inputs, shadow)
    failure = None
    returned: object = None
    try:
        with torch.no_grad(), watch:
            returned = load_weights(iter(inputs))
    except Exception as error:  # the engine's code: whatever it raises is its verdict on a tensor
        failure = f"{type(error).__name__}: {error}"
    return Run(
        writes=watch.writes,
        changed_inputs=watch.changed_inputs,
        read_inputs=watch.read_inputs,
        reported=_names(returned),
        failure=failure,
        last=inputs.current,
        is_exhausted=inputs.is_exhausted,
        is_collecting=watch.is_collecting and len(specs) > 1,
    )


def _names(returned: object) -> frozenset[str]:
    if isinstance(returned, set | frozenset | list | tuple):
        return frozenset(name for name in returned if isinstance(name, str))
    return frozenset()
