"""The tensors of safetensors checkpoints, read from disk in parts whenever they are asked for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from deltarefit.canonical import Catalog, TensorSpec, Words
from deltarefit.errors import RejectedError
from deltarefit.offline.checkpoint import Checkpoint
from deltarefit.offline.patched import PatchedCheckpoint
from deltarefit.offline.pool import SILENT, Meter
from deltarefit.pieces import Piece, StridedView
from deltarefit.source import ConversionTask
from deltarefit.wording import some_of

__all__ = ["CheckpointSource"]

_PART_NBYTES = 64 * 2**20
"""Read at a time, and the size of a shard as owners see it."""
_SHOWN = 3


class _Tensors(Protocol):
    """A checkpoint, as it lies on disk or as deltas make it."""

    def read_words(self, name: str, first_word: int, out: Words) -> None: ...

    def check_unchanged(self) -> None: ...

    def close(self) -> None: ...


class CheckpointSource:
    """A SourceAdapter of one rank whose weights are a checkpoint's on disk: first those of ``base``, then of what follows.

    Only the committed policy takes memory, as for any source, or a file (``PublisherSettings.baseline_directory``). The files
    of the present checkpoint, and of those that its deltas start from, must stay as they are. Use as a context manager.
    """

    def __init__(self, base: Path) -> None:
        """``base``: what the run's engines hold: a safetensors file, a directory, or an index file.

        Raises:
            RejectedError: no checkpoint is there, or a tensor's dtype has no whole-byte elements.
        """
        self._base, self._deltas = base, tuple[Path, ...]()
        self._tensors: _Tensors
        self._tensors, self._catalog = _open(base)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        self._tensors.close()

    def move_to(self, checkpoint: Path) -> None:
        """From now on, be this checkpoint.

        Raises:
            RejectedError: it is none, or has other tensors than the one before. The source is then what it was.
        """
        tensors, catalog = _open(checkpoint)
        self._become(tensors, catalog, str(checkpoint))
        self._base, self._deltas = checkpoint, ()

    def move_by(self, delta: Path, *, meter: Meter = SILENT) -> None:
        """From now on, be what a delta of ``deltarefit diff`` makes of the present checkpoint. Nothing is written to disk.

        Raises:
            RejectedError: it is no delta, was made from another checkpoint, or changes names, dtypes or shapes.
            BaseMismatchError: the checkpoint that the deltas start from is another one.
            PayloadInvalidError: the delta was cut or altered.
        """
        deltas = (*self._deltas, delta)
        patched = PatchedCheckpoint(self._base, deltas, meter=meter)
        catalog = Catalog(TensorSpec(name, state.dtype, state.shape) for name, state in patched.states.items())
        self._become(patched, catalog, str(delta))
        self._deltas = deltas

    def _become(self, tensors: _Tensors, catalog: Catalog, what: str) -> None:
        specs, now = dict(catalog), dict(self._catalog)
        if differing := sorted(name for name in specs.keys() | now.keys() if specs.get(name) != now.get(name)):
            tensors.close()
            raise RejectedError(
                f"{what}: has other tensors than the checkpoint before it: {some_of(differing, _SHOWN)}; expected the same "
                "names, dtypes and shapes, for engines were loaded with these"
            )
        self._tensors, before = tensors, self._tensors
        before.close()

    def catalog(self) -> Catalog:
        """See SourceAdapter."""
        return self._catalog

    def tasks(self) -> Sequence[ConversionTask]:
        """See SourceAdapter. Tensors are cut into parts of 64 MiB, so that no more than one part a thread is in memory."""
        return [task for spec in self._catalog.values() for task in self._parts(spec)]

    def barrier(self) -> None:
        """See SourceAdapter.

        Raises:
            RejectedError: a file of the present checkpoint was changed since it was opened.
        """
        self._tensors.check_unchanged()

    def _parts(self, spec: TensorSpec) -> list[ConversionTask]:
        step = _PART_NBYTES // spec.element_nbytes
        parts: list[ConversionTask] = []
        for first in range(0, max(1, spec.num_elements), step):
            count = min(step, spec.num_elements - first)
            piece = Piece(StridedView(first, (count,), (1,)), StridedView(0, (count,), (1,)))
            words = functools.partial(self._words, spec, first, count)
            parts.append(ConversionTask(f"{spec.name}@{first}", spec, (piece,) if count else (), words, replicas=(0,)))
        return parts

    def _words(self, spec: TensorSpec, first: int, count: int) -> Words:
        words = np.empty(count, spec.word_dtype)
        if count:
            self._tensors.read_words(spec.name, first, words)
        return words


def _open(path: Path) -> tuple[Checkpoint, Catalog]:
    checkpoint = Checkpoint(path, tensors_only=True)
    try:
        specs = [TensorSpec(name, tensor.dtype, tensor.shape) for name, (_, tensor) in checkpoint.tensors.items()]
        return checkpoint, Catalog(specs)
    except BaseException:
        checkpoint.close()
        raise
