"""A chain of deltas, each of which needs what the one before it gives, seen as one change of a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from deltarefit.canonical import WORDS, Words
from deltarefit.errors import BaseMismatchError, RejectedError
from deltarefit.kernels import apply_item
from deltarefit.offline.checkpoint import Checkpoint
from deltarefit.offline.container import Delta
from deltarefit.offline.grid import Slice, Unit
from deltarefit.offline.manifest import FileRow, TensorState, first_difference
from deltarefit.offline.pool import scratch
from deltarefit.payload.compose import Changes
from deltarefit.pieces import contiguous
from deltarefit.records import CodedItem

__all__ = ["Chain", "check_base"]


@dataclass(frozen=True, slots=True)
class _Path:
    """One target tensor's way through the chain."""

    first_step: int
    """The deltas before this one do not matter for it."""
    base_words: int | None
    """Length of what it starts from; None: from zeros."""
    steps: tuple[int, ...]
    """Words that it has after each delta from ``first_step`` on."""

    def length(self, step: int, piece: Slice) -> int:
        """Words of the slice that the tensor has after a delta."""
        return max(0, min(self.steps[step - self.first_step] - piece.first_word, piece.num_words))

    def image_length(self, piece: Slice) -> int:
        """Words of the slice that come from the base."""
        return max(0, min((self.base_words or 0) - piece.first_word, piece.num_words))


class Chain:
    """One or more open deltas, oldest first, whose links were checked. Use as a context manager.

    Raises:
        RejectedError: a delta needs another checkpoint than the one before it gives; the text names both.
        PayloadInvalidError: a file is no delta or was cut or altered.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        if not paths:
            raise RejectedError("no delta given; expected at least one")
        self._stack = ExitStack()
        try:
            self.deltas = tuple(self._stack.enter_context(Delta(path)) for path in paths)
            _check_links(self.deltas)
            self.base_states = self.deltas[0].manifest.base_states()
            self.target_states = self.deltas[-1].manifest.target_states()
            self.grid = self.deltas[-1].grid
            self._paths = {name: _path(self.deltas, name) for name in self.target_states}
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    @property
    def last(self) -> Delta:
        return self.deltas[-1]

    @property
    def base_id(self) -> str:
        return self.deltas[0].manifest.base

    @property
    def target_id(self) -> str:
        return self.last.manifest.target

    @property
    def nbytes(self) -> int:
        """Bytes of all delta files."""
        return sum(delta.nbytes for delta in self.deltas)

    def is_carried(self, name: str) -> bool:
        """Whether a target tensor starts from the base's words."""
        return self._paths[name].base_words is not None

    def carrier(self, file: FileRow) -> tuple[Delta, FileRow] | None:
        """The delta that carries a companion of the target, and its row there; None if the base has to have it."""
        for delta in reversed(self.deltas):
            row = next((row for row in delta.manifest.files if row.name == file.name and not row.holds_tensors), None)
            if row is None and delta.manifest.tensors_only:
                continue
            if row is None or row.digest != file.digest:
                raise RejectedError(f"{delta.path}: says that the base has {file.name}, which the delta before does not give")
            if row.blob is not None:
                return delta, row
        return None

    def rebuild(self, unit: Unit, base: Checkpoint) -> list[Words]:
        """The target's words of each slice, from the base's and the chain. They lie in this thread's scratch memory.

        Raises:
            PayloadInvalidError: a payload is invalid.
        """
        buffers = _carve(unit)
        filled = [self._read_image(piece, buffer, base) for piece, buffer in zip(unit.slices, buffers, strict=True)]
        for step, delta in enumerate(self.deltas):
            items = self._items(step, delta, unit)
            for number, piece in enumerate(unit.slices):
                path = self._paths[piece.name]
                if step < path.first_step:
                    continue
                length = path.length(step, piece)
                buffers[number][filled[number] : length] = 0
                filled[number] = length
                # An item may reach further than the slice does in the end; those words are cut later and never come back.
                for item in items.get(piece.ordinal, ()):
                    apply_item(buffers[number], (contiguous(0, length),), item)
        return buffers

    def compose(self, unit: Unit) -> list[list[CodedItem]]:
        """The chain's items for each slice, merged without the base.

        Raises:
            RejectedError: an element was changed by difference and by xor.
            PayloadInvalidError: a payload is invalid.
        """
        changes = [
            Changes(piece.word_dtype, piece.num_words, self._paths[piece.name].image_length(piece)) for piece in unit.slices
        ]
        for step, delta in enumerate(self.deltas):
            items = self._items(step, delta, unit)
            for piece, changed in zip(unit.slices, changes, strict=True):
                path = self._paths[piece.name]
                if step >= path.first_step:
                    changed.resize(path.length(step, piece))
                    changed.then(items.get(piece.ordinal, ()), piece)
        return [changed.coded(piece.spec) for piece, changed in zip(unit.slices, changes, strict=True)]

    def _read_image(self, piece: Slice, buffer: Words, base: Checkpoint) -> int:
        length = self._paths[piece.name].image_length(piece)
        if length:
            base.read_words(piece.name, piece.first_word, buffer[:length])
        return length

    def _items(self, step: int, delta: Delta, unit: Unit) -> dict[int, list[CodedItem]]:
        """One delta's items for a unit of the target, by the target's slice ordinals."""
        wanted: dict[int, int] = {}
        for piece in unit.slices:
            path = self._paths[piece.name]
            if step >= path.first_step and path.length(step, piece):
                wanted[delta.grid.first_of(piece.name) + piece.number] = piece.ordinal
        numbers: dict[int, None] = {}
        for ordinal in wanted:
            numbers.update(dict.fromkeys(delta.payload_numbers(ordinal, ordinal + 1)))
        return {
            wanted[ordinal]: items for number in numbers for ordinal, items in delta.items(number).items() if ordinal in wanted
        }


def check_base(chain: Chain, states: dict[str, TensorState], where: str) -> None:
    """Refuse a checkpoint that the chain does not start from.

    Raises:
        BaseMismatchError: it differs; the text names the first tensor and how it differs.
    """
    difference = first_difference(chain.base_states, states)
    if difference is None:
        return
    if first_difference(chain.target_states, states) is None:
        raise BaseMismatchError(f"{where}: already is what the delta gives ({chain.target_id}); nothing was written")
    raise BaseMismatchError(
        f"{where}: is not the base of {chain.deltas[0].path} ({chain.base_id}): {difference}; nothing was written. "
        "Give the checkpoint that the delta was made from"
    )


def _check_links(deltas: Sequence[Delta]) -> None:
    for before, after in itertools.pairwise(deltas):
        if before.manifest.target == after.manifest.base:
            continue
        difference = first_difference(after.manifest.base_states(), before.manifest.target_states())
        fitting = [delta.path.name for delta in deltas if delta.manifest.target == after.manifest.base]
        hint = f"{fitting[0]} gives it: put it right before" if fitting else "the delta that gives it is missing"
        raise RejectedError(
            f"chain: {after.path} needs {after.manifest.base}, but {before.path} before it gives {before.manifest.target}: "
            f"{difference}; {hint}. Nothing was written"
        )


def _path(deltas: Sequence[Delta], name: str) -> _Path:
    """Walk back until the tensor starts afresh."""
    steps: list[int] = []
    for step in range(len(deltas) - 1, -1, -1):
        row = deltas[step].row(name)
        if row is None or row.target is None:
            raise RejectedError(f"{deltas[step].path}: does not give tensor {name}, which the next delta needs")
        steps.insert(0, row.target.num_words)
        if not row.is_carried:
            return _Path(step, None, tuple(steps))
        if step == 0 and row.base is not None:
            return _Path(0, row.base.num_words, tuple(steps))
    raise RejectedError("empty chain")


def _carve(unit: Unit) -> list[Words]:
    """One array per slice, out of this thread's scratch memory."""
    starts = list(itertools.accumulate((-(-piece.nbytes // 64) * 64 for piece in unit.slices), initial=0))
    memory = scratch(0, starts[-1], WORDS[1])
    return [
        memory[start : start + piece.nbytes].view(piece.word_dtype) for start, piece in zip(starts, unit.slices, strict=False)
    ]
