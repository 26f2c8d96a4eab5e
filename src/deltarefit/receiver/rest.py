"""What no canonical tensor reaches: caches, runtime constants, padding. No refit changes it, so whatever changes it is news.

Together with the digests of the canonical tensors this covers every byte of every parameter and buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import TensorDigest
from deltarefit.placement.fit import fit_pieces
from deltarefit.placement.overlap import Claim
from deltarefit.placement.run import Home
from deltarefit.placement.storages import ModelStorage, StorageMap
from deltarefit.receiver.guard import storage_digest
from deltarefit.receiver.writers import WordsTarget, target_of_piece

__all__ = ["Rest", "rests_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Rest:
    """The bytes of one storage that no canonical tensor reaches."""

    storage: ModelStorage
    target: WordsTarget | None
    """Reads them; None if they are the whole storage."""

    @property
    def key(self) -> str:
        return self.storage.key

    def digest(self) -> TensorDigest:
        """Keyed by position in the storage, computed now."""
        return storage_digest(self.storage) if self.target is None else self.target.digest(self.target.pieces)


def rests_of(storages: StorageMap, claims: Iterable[Claim], *, torch_writes: bool = False) -> tuple[Rest, ...]:
    """The rest of every storage that has one. ``claims``: what canonical tensors write; overlaps do no harm.

    A rest that lies in no regular pattern is left out: thousands of single holes between claims, which no loader seen makes.
    """
    by_storage: dict[str, dict[tuple[object, int], Claim]] = {}
    for claim in claims:
        if claim.view.num_elements:
            by_storage.setdefault(claim.storage, {})[claim.view, claim.width] = claim
    found: list[Rest] = []
    for storage in storages.storages:
        here = list(by_storage.get(storage.key, {}).values())
        if not here:
            found.append(Rest(storage, None))
        elif not _is_tiled(storage, here):
            home = _unclaimed(storage, here)
            if home is not None and home.pieces:
                found.append(Rest(storage, target_of_piece(home, torch_writes=torch_writes)))
    return tuple(found)


def _is_tiled(storage: ModelStorage, claims: Sequence[Claim]) -> bool:
    """Whether claims without holes lie one behind the other over the whole storage; cheap, and nearly always so."""
    end = 0
    for claim in sorted((claim for claim in claims if claim.is_solid), key=lambda claim: claim.first_byte):
        if claim.first_byte > end:
            return False
        end = max(end, claim.end_byte)
    return end >= storage.nbytes


def _unclaimed(storage: ModelStorage, claims: Sequence[Claim]) -> Home | None:
    """Pieces over the words that no claim touches; None if there are too many holes."""
    width = min(claim.width for claim in claims)
    if storage.nbytes % width or any(claim.width % width for claim in claims):
        width = 1
    is_claimed = np.zeros(storage.nbytes // width, dtype=bool)
    for claim in claims:
        _cells(is_claimed, claim, claim.width // width)[...] = True
    positions = np.flatnonzero(~is_claimed).astype(np.int64)
    pieces = fit_pieces(positions, positions)
    return None if pieces is None else Home(storage, width, tuple(pieces))


def _cells(words: NDArray[np.bool_], claim: Claim, ratio: int) -> NDArray[Any]:
    shape = (*claim.view.shape, ratio)
    strides = (*(step * ratio for step in claim.view.stride), 1)
    return np.lib.stride_tricks.as_strided(words[claim.view.offset * ratio :], shape, strides)
