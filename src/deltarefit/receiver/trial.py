"""Trial of a computing loader on a shadow: may changes be masked, or must every element be sent? (paper A.2)

A tensor whose values the loader computes (``-exp``, casts, clamps) is loaded on copies of the storage that it writes: densely
from two different starting contents, and sparsely onto an older load. Dense loads that differ mean that the result depends on
what storage held before. A sparse load that differs from the dense one means that placeholders do not survive, or that
elements influence one another; then only dense loads are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import DTYPE_NBYTES, TensorSpec, Words
from deltarefit.errors import LoaderContractError
from deltarefit.placement.digits import random_words
from deltarefit.placement.inputs import LoadWeights
from deltarefit.placement.run import OpaqueWrites, run_loader
from deltarefit.placement.shadow import Shadow, byte_bounds
from deltarefit.placement.storages import ModelStorage, StorageMap
from deltarefit.receiver.scratch import LoaderPath, ScratchBuffer

__all__ = ["TrialResult", "try_loader"]

_ROUNDS = 3
_CHANGED_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What a trial showed."""

    is_dense: bool
    """Whether every element must be sent each time."""
    reason: str
    refusal: str | None = None
    """Why the tensor cannot be refit at all."""
    ranges: tuple[tuple[ModelStorage, int, int], ...] = ()
    """Bytes of storage that a load of it writes."""


def try_loader(
    load_weights: LoadWeights, storages: StorageMap, spec: TensorSpec, opaque: OpaqueWrites, generator: np.random.Generator
) -> TrialResult:
    """Find out how changes of a tensor that fits no piece can be applied. Changes nothing of the model."""
    alone = run_loader(load_weights, storages, [spec])
    if alone.failure is not None:
        return _refused(opaque, f"the loader does not take it alone: {alone.failure}")
    expected = {write.key for write in opaque.writes if write.view.num_elements}
    if not expected or not expected <= {write.key for write in alone.writes}:
        return _refused(opaque, "the loader writes it only together with other tensors, and changes its values")
    ranges = [(w.storage, *byte_bounds(w.view, DTYPE_NBYTES[w.dtype])) for w in alone.writes if w.view.num_elements]
    trial = _Trial(load_weights, storages, spec, ranges)
    problem = None
    for turn in range(_ROUNDS):
        old = random_words(spec.dtype, spec.num_elements, generator, turn=turn)
        changed = np.flatnonzero(generator.random(spec.num_elements) < _CHANGED_SHARE).astype(np.int64)
        new = old.copy()
        new[changed] = random_words(spec.dtype, changed.size, generator, turn=turn)
        try:
            fresh = trial.dense(new)
            if fresh != trial.dense(old, new):
                return _refused(opaque, "what the loader leaves depends on what the parameter held before")
        except LoaderContractError as error:
            return _refused(opaque, str(error))
        problem = problem or trial.sparse_problem(old, changed, new, fresh)
    reason = f"{opaque.reason}; {problem}" if problem else opaque.reason
    return TrialResult(problem is not None, reason, ranges=tuple(ranges))


def _refused(opaque: OpaqueWrites, why: str) -> TrialResult:
    return TrialResult(is_dense=True, reason=opaque.reason, refusal=f"{opaque.reason}; {why}")


class _Trial:
    def __init__(
        self,
        load_weights: LoadWeights,
        storages: StorageMap,
        spec: TensorSpec,
        ranges: Sequence[tuple[ModelStorage, int, int]],
    ) -> None:
        self._load_weights = load_weights
        self._storages = storages
        self._spec = spec
        self._ranges = ranges
        self._scratch = ScratchBuffer(spec.nbytes)

    def _path(self) -> tuple[LoaderPath, Shadow]:
        shadow = Shadow(self._storages, self._ranges)
        return LoaderPath(self._load_weights, self._storages, self._scratch, shadow=shadow), shadow

    def dense(self, *loads: Words) -> dict[str, list[bytes]]:
        """What one dense load after the other leaves."""
        path, shadow = self._path()
        for words in loads:
            path.dense(self._spec, words)
        return shadow.snapshot()

    def sparse_problem(self, old: Words, changed: NDArray[np.int64], new: Words, fresh: dict[str, list[bytes]]) -> str | None:
        """Why a sparse load of the changed elements onto the old ones is not the dense load; None if it is."""
        path, shadow = self._path()
        path.dense(self._spec, old)
        try:
            path.values(self._spec, changed, new[changed])
        except LoaderContractError as error:
            return f"sent whole: {error}"
        if shadow.snapshot() != fresh:
            return "sent whole: elements without an entry would not keep their bits"
        return None
