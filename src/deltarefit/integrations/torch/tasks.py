"""From a local tensor and pieces of a canonical tensor on it to a conversion task."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from deltarefit.bits import DTYPES, dtype_name
from deltarefit.canonical import TensorSpec
from deltarefit.integrations.torch.local import LocalTensor
from deltarefit.pieces import Piece
from deltarefit.source import ConversionTask, window

__all__ = ["task_of"]


def task_of(key: str, spec: TensorSpec, local: LocalTensor, pieces: Sequence[Piece], world_size: int) -> ConversionTask | None:
    """The task of this rank's part of ``spec``, which pieces place on the whole tensor as if it were row-major.

    ``key`` names the part of ``spec`` that comes from this tensor; the shard's own label is added. None if this rank holds
    nothing of it, unless there is nothing at all to hold.
    """
    first, count, placed = window(local.place(pieces))
    if not placed and spec.num_elements:
        return None
    shard = local.shard
    stored = dtype_name(local.dtype)
    return ConversionTask(
        key if shard is None else f"{key}[{shard.label}]",
        spec,
        placed,
        functools.partial(local.words, first, count, DTYPES[spec.dtype]),
        tuple(range(world_size)) if shard is None else (),  # a shard does not say where its copies are
        stored if stored != spec.dtype else "",
    )
