"""Start-up cross-check: for some tensors, the loader alone must leave random bits exactly where the learned pieces say.

The survey gave the loader all tensors at once, as a dense reload does; the paper's path gives it one. This holds the two ways
together on the model at hand before the first refit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deltarefit.canonical import WORDS, TensorSpec
from deltarefit.pieces import Cast
from deltarefit.placement.digits import random_words
from deltarefit.placement.inputs import LoadWeights
from deltarefit.placement.run import Home, run_loader
from deltarefit.placement.shadow import Shadow, byte_bounds
from deltarefit.placement.storages import StorageMap

__all__ = ["contradiction", "sample"]

_RAW_DTYPE = {1: "U8", 2: "I16", 4: "I32", 8: "I64"}


def sample(names: Sequence[str], count: int) -> list[str]:
    """``count`` names, evenly spread, first and last among them."""
    if count >= len(names):
        return list(names)
    return [names[round(place)] for place in np.linspace(0, len(names) - 1, count)]


def contradiction(
    load_weights: LoadWeights, storages: StorageMap, spec: TensorSpec, homes: Sequence[Home], generator: np.random.Generator
) -> str | None:
    """How a load of this tensor alone contradicts its pieces; None if it does not. Changes nothing of the model."""
    ranges = [
        (home.storage, *byte_bounds(piece.storage, home.width)) for home in homes for piece in home.pieces if piece.num_elements
    ]
    shadow = Shadow(storages, ranges)
    bits = random_words(spec.dtype, spec.num_elements, generator)
    run = run_loader(load_weights, storages, [spec], content=lambda _: bits.copy(), shadow=shadow)
    if run.failure is not None:
        return f"the loader does not take it alone: {run.failure}"
    for home in homes:
        for piece in home.pieces:
            expected = bits[piece.canonical.positions()]
            if piece.cast is Cast.WIDEN:
                expected = expected.astype(WORDS[home.width]) << WORDS[home.width].type(16)
            found = shadow.read(home.storage, piece.storage, _RAW_DTYPE[home.width]).view(WORDS[home.width])
            if not np.array_equal(found, expected):
                return f"the loader alone puts it elsewhere than with all tensors, first seen in {home.storage.key}"
    return None
