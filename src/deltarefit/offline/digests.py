"""Digests of whole checkpoints, slice by slice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deltarefit.canonical import TensorDigest
from deltarefit.kernels import digest
from deltarefit.offline.checkpoint import Checkpoint
from deltarefit.offline.grid import Grid, Slice, Unit, group
from deltarefit.offline.manifest import TensorState
from deltarefit.offline.pool import Meter, Workers, scratch

__all__ = ["Digests", "digest_slices", "states_of"]


class Digests:
    """Sums of slice digests by tensor. Not safe from several threads."""

    def __init__(self) -> None:
        self._sums: dict[str, TensorDigest] = {}

    def add(self, name: str, part: TensorDigest) -> None:
        self._sums[name] = self._sums.get(name, TensorDigest()) + part

    def of(self, expected: Mapping[str, TensorState]) -> dict[str, TensorState]:
        """The expected tensors with the digests that were summed here."""
        return {
            name: TensorState(state.dtype, state.shape, state.nbytes, self._sums.get(name, TensorDigest()).hex())
            for name, state in expected.items()
        }

    def states(self, checkpoint: Checkpoint) -> dict[str, TensorState]:
        """The checkpoint's tensors, once all of their slices were added; a tensor without words has the sum of nothing."""
        return {
            name: TensorState(tensor.dtype, tensor.shape, tensor.nbytes, self._sums.get(name, TensorDigest()).hex())
            for name, (_, tensor) in checkpoint.tensors.items()
        }


def states_of(checkpoint: Checkpoint, workers: Workers, meter: Meter) -> dict[str, TensorState]:
    """Read a whole checkpoint and give its tensors' states."""
    grid = Grid({name: tensor for name, (_, tensor) in checkpoint.tensors.items()})
    digests = Digests()
    digest_slices(checkpoint, grid.range(0, len(grid)), digests, workers, meter)
    return digests.states(checkpoint)


def digest_slices(checkpoint: Checkpoint, slices: Iterable[Slice], digests: Digests, workers: Workers, meter: Meter) -> None:
    """Add the digests of these slices of a checkpoint."""

    def work(unit: Unit) -> tuple[Unit, list[TensorDigest]]:
        return unit, [_digest_slice(checkpoint, piece) for piece in unit.slices]

    for unit, parts in workers.map(work, group(slices)):
        for piece, part in zip(unit.slices, parts, strict=True):
            digests.add(piece.name, part)
        meter.advance(unit.nbytes)


def _digest_slice(checkpoint: Checkpoint, piece: Slice) -> TensorDigest:
    words = scratch(0, piece.num_words, piece.word_dtype)
    checkpoint.read_words(piece.name, piece.first_word, words)
    return digest(words, (piece.digest_piece,))
