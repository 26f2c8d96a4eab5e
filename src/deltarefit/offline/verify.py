"""Prove that a chain of deltas turns one checkpoint into another, without writing anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from deltarefit.errors import PayloadInvalidError, RefitError
from deltarefit.kernels import digest
from deltarefit.offline.apply import Rebuilt, rebuild_all
from deltarefit.offline.chain import Chain
from deltarefit.offline.checkpoint import Checkpoint
from deltarefit.offline.grid import Unit
from deltarefit.offline.pool import SILENT, Meter, Settings, Workers, scratch
from deltarefit.offline.prepare import Prepared, prepare

__all__ = ["VerifyReport", "verify_deltas"]


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the deltas do what they should."""

    ok: bool
    base: str
    target: str
    problem: str
    """The first thing that is wrong; empty if ``ok``."""
    nbytes: int
    """Bytes of tensors that were rebuilt and compared."""


def verify_deltas(
    base: Path, deltas: Sequence[Path], new: Path, *, settings: Settings | None = None, meter: Meter = SILENT
) -> VerifyReport:
    """Rebuild the target in memory, slice by slice, and compare it with ``new``: every word, header and companion.

    Whatever is wrong with the deltas or the base is reported, not raised.

    Raises:
        RejectedError: a checkpoint cannot be read as one, or is ambiguous.
        OSError: reading failed.
    """
    with Checkpoint(base) as source, Checkpoint(new) as wanted, Workers(settings or Settings()) as workers:
        base_id = target_id = problem = ""
        try:
            with Chain(deltas) as chain:
                base_id, target_id = chain.base_id, chain.target_id
                prepared = prepare(chain, source, workers, meter)
                _compare_files(prepared, wanted)
                _compare_words(prepared, wanted, workers, meter)
        except RefitError as error:
            problem = str(error)
        return VerifyReport(ok=not problem, base=base_id, target=target_id, problem=problem, nbytes=wanted.nbytes)


def _compare_files(prepared: Prepared, wanted: Checkpoint) -> None:
    """Headers and companions decide where every tensor is, so that equal words then mean equal files."""
    given = [file.row.name for file in prepared.files]
    held = [file.name for file in wanted.files]
    manifest = prepared.chain.last.manifest
    if len(given) != len(held) or (manifest.layout == "directory" and wanted.is_directory and given != held):
        raise PayloadInvalidError(f"{wanted.path}: holds the tensors in {held[:5]}, the delta gives {given[:5]}")
    for file, found in zip(prepared.files, wanted.files, strict=True):
        if file.header.raw != found.header.raw:
            raise PayloadInvalidError(f"{found.path}: the delta gives another header (order, dtypes, shapes or metadata)")
    companions = {
        name: companion
        for name, companion in wanted.companions.items()
        if name in prepared.companions or not manifest.tensors_only
    }
    for name in sorted(prepared.companions.keys() | companions.keys()):
        both = name in companions and name in prepared.companions
        if not both or prepared.companion(name) != companions[name].read():
            raise PayloadInvalidError(f"{wanted.path}: {name}: the delta gives other bytes, or one of the two has no such file")


def _compare_words(prepared: Prepared, wanted: Checkpoint, workers: Workers, meter: Meter) -> None:
    def work(unit: Unit) -> Rebuilt:
        parts = []
        for piece, words in zip(unit.slices, prepared.chain.rebuild(unit, prepared.base), strict=True):
            expected = scratch(1, piece.num_words, piece.word_dtype)
            wanted.read_words(piece.name, piece.first_word, expected)
            if not np.array_equal(words, expected):
                at = int(np.argmax(words != expected))
                raise PayloadInvalidError(
                    f"tensor {piece.name}: element {piece.first_word + at} is {int(expected[at]):#x} in {wanted.path}, "
                    f"the delta gives {int(words[at]):#x}"
                )
            parts.append(digest(words, (piece.digest_piece,)))
        return Rebuilt(parts)

    rebuild_all(prepared, work, workers, meter, "compare")
