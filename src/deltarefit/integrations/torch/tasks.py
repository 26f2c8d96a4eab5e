"""From a local tensor and pieces of a canonical tensor on it to conversion tasks."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from deltarefit.bits import DTYPES, dtype_name
from deltarefit.canonical import TensorSpec
from deltarefit.integrations.torch.local import LocalTensor
from deltarefit.pieces import Piece
from deltarefit.source import ConversionTask, cut_into_parts, window

__all__ = ["tasks_of"]


def tasks_of(key: str, spec: TensorSpec, local: LocalTensor, pieces: Sequence[Piece], world_size: int) -> list[ConversionTask]:
    """The tasks of this rank's part of ``spec``, which pieces place on the whole tensor as if it were row-major.

    ``key`` names the part of ``spec`` that comes from this tensor; the shard's own label is added, and a number where it is so
    large that it is cut. None if this rank holds nothing of it, unless there is nothing at all to hold.
    """
    placed = local.place(pieces)
    if not any(piece.num_elements for piece in placed) and spec.num_elements:
        return []
    shard = local.shard
    label = key if shard is None else f"{key}[{shard.label}]"
    stored = dtype_name(local.dtype)
    parts = cut_into_parts(placed, spec.element_nbytes)
    found = []
    for number, part in enumerate(parts):
        first, count, moved = window(part)
        found.append(
            ConversionTask(
                label if len(parts) == 1 else f"{label}#{number}",
                spec,
                moved,
                functools.partial(local.words, first, count, DTYPES[spec.dtype]),
                tuple(range(world_size)) if shard is None else (),  # a shard does not say where its copies are
                stored if stored != spec.dtype else "",
            )
        )
    return found
