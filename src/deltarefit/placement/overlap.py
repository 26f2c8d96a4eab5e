"""Which claims on storage bytes collide. Cheap where claims lie one after another, exact where they interleave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltarefit.pieces import StridedView

__all__ = ["Claim", "colliding"]


@dataclass(frozen=True, slots=True)
class Claim:
    """Elements of one storage that somebody writes."""

    owner: str
    storage: str
    view: StridedView
    width: int
    """Bytes of one element."""

    @property
    def first_byte(self) -> int:
        return self.view.first * self.width

    @property
    def end_byte(self) -> int:
        return (self.view.last + 1) * self.width

    @property
    def is_solid(self) -> bool:
        """Whether it fills its bounds without holes."""
        return self.view.num_elements * self.width == self.end_byte - self.first_byte


def colliding(claims: Iterable[Claim]) -> set[tuple[str, str]]:
    """Pairs of owners (each pair sorted) whose claims share a byte; an owner that collides with itself is paired with itself.

    Cost: sorting, plus painting the bytes of claims whose bounds interleave.
    """
    by_storage: dict[str, list[Claim]] = {}
    for claim in claims:
        if claim.view.num_elements:
            by_storage.setdefault(claim.storage, []).append(claim)
    pairs: set[tuple[str, str]] = set()
    for group in by_storage.values():
        for cluster in _clusters(group):
            pairs |= _collisions(cluster)
    return pairs


def _clusters(claims: list[Claim]) -> Iterator[list[Claim]]:
    """Runs of claims whose bounds intersect, of at least two claims."""
    claims.sort(key=lambda claim: (claim.first_byte, claim.end_byte))
    cluster: list[Claim] = []
    end = -1
    for claim in claims:
        if cluster and claim.first_byte >= end:
            if len(cluster) > 1:
                yield cluster
            cluster = []
            end = -1
        cluster.append(claim)
        end = max(end, claim.end_byte)
    if len(cluster) > 1:
        yield cluster


def _collisions(cluster: list[Claim]) -> set[tuple[str, str]]:
    unit = min(claim.width for claim in cluster)
    unit = unit if all(claim.first_byte % unit == 0 for claim in cluster) else 1
    start = cluster[0].first_byte // unit
    end = max(claim.end_byte for claim in cluster) // unit + 1
    layers: list[NDArray[Any]] = []
    pairs: set[tuple[str, str]] = set()
    for number, claim in enumerate(cluster):
        free: NDArray[Any] | None = None
        for layer in layers:
            cells = _cells(layer, claim, start, unit)
            others = [cluster[other].owner for other in np.unique(cells) if other >= 0]
            pairs |= {(min(claim.owner, owner), max(claim.owner, owner)) for owner in others}
            free = cells if free is None and not others else free
        if free is None:  # one more layer than claims that lie over one another: usually one or two
            layers.append(np.full(end - start, -1, dtype=np.int32))
            free = _cells(layers[-1], claim, start, unit)
        free[...] = number
    return pairs


def _cells(painted: NDArray[Any], claim: Claim, start: int, unit: int) -> NDArray[Any]:
    ratio = claim.width // unit
    shape = (*claim.view.shape, ratio)
    strides = (*(step * ratio * painted.itemsize for step in claim.view.stride), painted.itemsize)
    base = painted[claim.view.offset * ratio - start :]
    return np.lib.stride_tricks.as_strided(base, shape, strides)
