"""A checkpoint that deltas make of another one, read in parts without being written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from deltarefit.canonical import Words
from deltarefit.kernels import digest
from deltarefit.offline.apply import Rebuilt, rebuild_all
from deltarefit.offline.chain import Chain
from deltarefit.offline.checkpoint import Checkpoint
from deltarefit.offline.container import MAGIC
from deltarefit.offline.grid import Unit, group
from deltarefit.offline.manifest import TensorState
from deltarefit.offline.pool import SILENT, Meter, Settings, Workers
from deltarefit.offline.prepare import Prepared, prepare

__all__ = ["PatchedCheckpoint", "is_delta"]


class PatchedCheckpoint:
    """The checkpoint that a chain of deltas, oldest first, makes of ``base``. Everything is proven before anything is read.

    Args:
        base: the checkpoint that the first delta was made from.
        deltas: one or more.

    Raises:
        RejectedError: the chain has a gap, or a file is no checkpoint or delta.
        BaseMismatchError: the base is another checkpoint.
        PayloadInvalidError: a delta was cut or altered, or does not give what it promises.
    """

    def __init__(self, base: Path, deltas: Sequence[Path], *, settings: Settings | None = None, meter: Meter = SILENT) -> None:
        self._stack = ExitStack()
        try:
            self._chain = self._stack.enter_context(Chain(deltas))
            self._base = self._stack.enter_context(Checkpoint(base))
            with Workers(settings or Settings()) as workers:
                prepared = prepare(self._chain, self._base, workers, meter)
                rebuild_all(prepared, lambda unit: _digests(prepared, unit), workers, meter, "check result")
        except BaseException:
            self._stack.close()
            raise

    @property
    def states(self) -> Mapping[str, TensorState]:
        """Every tensor by name."""
        return self._chain.target_states

    def close(self) -> None:
        """Close every file."""
        self._stack.close()

    def read_words(self, name: str, first_word: int, out: Words) -> None:
        """Fill ``out`` with the words ``first_word ..`` of a tensor, which has at least so many. Any thread may ask."""
        end = first_word + out.size
        wanted = [piece for piece in self._chain.grid.of(name) if _overlaps(piece.first_word, piece.num_words, first_word, end)]
        for unit in group(wanted):
            for piece, words in zip(unit.slices, self._chain.rebuild(unit, self._base), strict=True):
                low, high = max(first_word, piece.first_word), min(end, piece.first_word + piece.num_words)
                out[low - first_word : high - first_word] = words[low - piece.first_word : high - piece.first_word]

    def check_unchanged(self) -> None:
        """Refuse if a file of the base was replaced or written since it was opened.

        Raises:
            RejectedError: it was.
        """
        self._base.check_unchanged()


def is_delta(path: Path) -> bool:
    """Whether a file says that it is a delta; the rest of it may be anything."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _digests(prepared: Prepared, unit: Unit) -> Rebuilt:
    words = prepared.chain.rebuild(unit, prepared.base)
    return Rebuilt([digest(part, (piece.digest_piece,)) for piece, part in zip(unit.slices, words, strict=True)])


def _overlaps(first: int, count: int, low: int, high: int) -> bool:
    return first < high and low < first + count
