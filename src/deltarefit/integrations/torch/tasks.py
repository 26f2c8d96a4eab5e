"""From a local tensor and pieces of a canonical tensor on it to conversion tasks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from deltarefit.bits import DTYPES, dtype_name
from deltarefit.canonical import TensorSpec, Words
from deltarefit.integrations.torch.local import LocalTensor, is_in_host_memory
from deltarefit.pieces import Piece
from deltarefit.source import ConversionTask, cut_into_parts, pack, window

__all__ = ["reading", "tasks_of"]

_MOST_SPREAD = 2
"""Elements copied at once for each that a part has."""


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
        moved, words = reading(local, part, DTYPES[spec.dtype])
        found.append(
            ConversionTask(
                label if len(parts) == 1 else f"{label}#{number}",
                spec,
                moved,
                words,
                tuple(range(world_size)) if shard is None else (),  # a shard does not say where its copies are
                stored if stored != spec.dtype else "",
            )
        )
    return found


def reading(local: LocalTensor, part: Sequence[Piece], dtype: torch.dtype) -> tuple[tuple[Piece, ...], Callable[[], Words]]:
    """The pieces of a part on the words that a scan is given, and what gives them.

    What must be copied anyway is copied without the elements between the part's own: those of a transposed parameter would be
    nearly all of it, for every part anew.
    """
    first, count, moved = window(part)
    is_copied = local.dtype != dtype or not is_in_host_memory(local.tensor())
    if not is_copied or count <= _MOST_SPREAD * sum(piece.num_elements for piece in moved):
        return moved, functools.partial(local.words, first, count, dtype)
    packed, views = pack(part)
    return packed, functools.partial(local.packed_words, views, dtype)
