"""Canonical copies of the few tensors whose values the loader computes, such as ``A_log`` behind ``-exp``.

From such storage nobody can read the canonical bits back. A kept copy makes up for it: changes go into the copy, the whole copy
goes through the engine's loader, and a load of the copy on a shadow proves that storage still holds what it should. These
tensors are small; the paper's rule that a receiver keeps no baseline (6.1) holds for everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deltarefit import kernels
from deltarefit.canonical import TensorDigest, TensorSpec, Words
from deltarefit.errors import PayloadMissingError
from deltarefit.pieces import Piece, StridedView
from deltarefit.placement.inputs import LoadWeights
from deltarefit.placement.shadow import Shadow
from deltarefit.placement.storages import ModelStorage, StorageMap
from deltarefit.receiver.report import WRONG_DIGEST
from deltarefit.receiver.scratch import LoaderPath, ScratchBuffer
from deltarefit.records import CodedItem

__all__ = ["KeptCopy"]


@dataclass(slots=True, eq=False)
class KeptCopy:
    """The canonical bits of one tensor, as far as they came by."""

    spec: TensorSpec
    ranges: Sequence[tuple[ModelStorage, int, int]]
    """Bytes of storage that a load of the tensor writes."""
    is_dense: bool
    """Whether only whole loads are right, so that a part must wait for the rest of its attempt."""
    words: Words = field(init=False)
    arrived: NDArray[np.bool_] = field(init=False)
    """Elements that arrived since the attempt began."""
    known: NDArray[np.bool_] = field(init=False)
    """Elements that ever arrived."""

    def __post_init__(self) -> None:
        self.words = np.zeros(self.spec.num_elements, self.spec.word_dtype)
        self.arrived = np.zeros(self.spec.num_elements, bool)
        self.known = np.zeros(self.spec.num_elements, bool)

    @property
    def is_complete(self) -> bool:
        return bool(self.known.all())

    def begin(self) -> None:
        """A new attempt: nothing of it has arrived."""
        self.arrived[:] = False

    def apply(self, item: CodedItem, path: LoaderPath) -> int:
        """Take an overwrite into the copy and storage; returns the storage elements written."""
        positions, values = kernels.decode_positions(item), kernels.decode_values(item)
        was_complete = self.is_complete
        self.words[positions] = values
        self.arrived[positions] = True
        self.known[positions] = True
        if was_complete and not self.is_dense:
            return path.dense(self.spec, self.words)
        if self.is_dense:
            return path.dense(self.spec, self.words) if self.arrived.all() else 0
        return path.values(self.spec, positions, values)

    def require_whole(self) -> None:
        """Check that nothing of this attempt is still waiting for the rest of its tensor.

        Raises:
            PayloadMissingError: a part arrived, and the tensor can only be loaded whole.
        """
        count = int(self.arrived.sum())
        if self.is_dense and 0 < count < self.arrived.size:
            raise PayloadMissingError(
                f"tensor {self.spec.name}: must be loaded whole, {count} of {self.arrived.size} elements arrived"
            )

    def digest(self, load_weights: LoadWeights, storages: StorageMap) -> TensorDigest | None:
        """The digest of the copy if storage holds what a load of it leaves, else a wrong one. None before it is complete."""
        if not self.is_complete:
            return None
        view = StridedView(0, (self.words.size,), (1,))
        digest = kernels.digest(self.words, [Piece(view, view)])
        live = Shadow(storages, self.ranges).snapshot()
        shadow = Shadow(storages, self.ranges)
        LoaderPath(load_weights, storages, ScratchBuffer(0), shadow=shadow).dense(self.spec, self.words)
        return digest if shadow.snapshot() == live else digest + WRONG_DIGEST
