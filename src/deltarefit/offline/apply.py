"""Apply a chain of deltas to a checkpoint and write the result beside it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deltarefit.canonical import WORDS, TensorDigest
from deltarefit.errors import PayloadInvalidError
from deltarefit.kernels import digest
from deltarefit.offline.chain import Chain
from deltarefit.offline.checkpoint import Checkpoint
from deltarefit.offline.digests import Digests
from deltarefit.offline.files import DISK, Disk, new_directory, new_file, require_apart, require_free, write_file
from deltarefit.offline.grid import Unit, group
from deltarefit.offline.manifest import first_difference, policy_digest_of
from deltarefit.offline.pool import SILENT, Meter, Settings, Workers
from deltarefit.offline.prepare import Prepared, prepare

__all__ = ["ApplyReport", "Rebuilt", "apply_deltas", "rebuild_all", "report_of", "write_tensors"]


class ApplyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was applied and written."""

    output: str
    base: str
    target: str
    policy_digest: str
    """As a run reports it for a policy with these tensors."""
    num_deltas: int
    delta_nbytes: int
    target_nbytes: int


def apply_deltas(
    base: Path,
    deltas: Sequence[Path],
    output: Path,
    *,
    settings: Settings | None = None,
    meter: Meter = SILENT,
    replace: bool = False,
    disk: Disk = DISK,
) -> ApplyReport:
    """Write the checkpoint that a chain of deltas, oldest first, makes of ``base``. The base stays as it is.

    Every byte of the deltas and the base is checked before the first one is written; the result is compared with the digests
    that the last delta states, and appears complete or not at all.

    Args:
        base: the checkpoint that the first delta was made from, in any arrangement of files.
        output: a directory that does not exist or is empty, or, if the last delta was made from a single file, a file.
        replace: overwrite an existing output file. Directories are never overwritten.

    Raises:
        RejectedError: the chain has a gap, or the output exists or is one of the inputs.
        BaseMismatchError: the base is another checkpoint.
        PayloadInvalidError: a delta was cut or altered.
        OSError: reading or writing failed.
    """
    with Chain(deltas) as chain, Checkpoint(base) as source, Workers(settings or Settings()) as workers:
        is_directory = chain.last.manifest.layout == "directory"
        if is_directory and output.is_symlink():
            output = output.resolve()  # no directory can be renamed onto a link
        require_free(output, directory=is_directory, replace=replace)
        require_apart(output, (*deltas, *source.paths()))
        prepared = prepare(chain, source, workers, meter)
        if is_directory:
            with new_directory(output, disk) as directory:
                _write_directory(prepared, directory, workers, meter, disk)
        else:
            with new_file(output, disk, replace=replace) as fd:
                write_tensors(prepared, [fd], workers, meter, disk)
        return report_of(chain, output)


def report_of(chain: Chain, output: Path) -> ApplyReport:
    return ApplyReport(
        output=str(output),
        base=chain.base_id,
        target=chain.target_id,
        policy_digest=policy_digest_of(chain.target_states),
        num_deltas=len(chain.deltas),
        delta_nbytes=chain.nbytes,
        target_nbytes=sum(state.nbytes for state in chain.target_states.values()),
    )


def _write_directory(prepared: Prepared, directory: Path, workers: Workers, meter: Meter, disk: Disk) -> None:
    with ExitStack() as stack:
        fds = []
        for file in prepared.files:
            fds.append(disk.create(directory / file.row.name))
            stack.callback(os.close, fds[-1])
        write_tensors(prepared, fds, workers, meter, disk)
        for fd in fds:
            disk.sync(fd)
    for name in prepared.companions:
        write_file(directory / name, prepared.companion(name), disk)


def write_tensors(prepared: Prepared, fds: Sequence[int], workers: Workers, meter: Meter, disk: Disk) -> None:
    """Fill the target's tensor files, given open and empty in the order of ``prepared.files``, and prove the result.

    Raises:
        PayloadInvalidError: the result is not what the last delta promises. The files are then worthless.
    """
    for fd, file in zip(fds, prepared.files, strict=True):
        disk.truncate(fd, file.header.file_nbytes)
        disk.write(fd, file.header.prefix, 0)
    places = prepared.places()

    def work(unit: Unit) -> Rebuilt:
        parts = []
        for piece, words in zip(unit.slices, prepared.chain.rebuild(unit, prepared.base), strict=True):
            number, tensor = places[piece.name]
            start = prepared.files[number].header.data_offset + tensor.begin + piece.first_word * words.itemsize
            parts.append(digest(words, (piece.digest_piece,)))
            disk.write(fds[number], words.view(WORDS[1]).data, start)
        return Rebuilt(parts)

    rebuild_all(prepared, work, workers, meter, "write")


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a worker made of one unit."""

    digests: list[TensorDigest]
    """Of each slice as rebuilt."""
    payload: bytes | None = None
    """What is to be kept in order, if anything."""


def rebuild_all(
    prepared: Prepared,
    work: Callable[[Unit], Rebuilt],
    workers: Workers,
    meter: Meter,
    stage: str,
    keep: Callable[[Unit, bytes], None] | None = None,
) -> None:
    """Run ``work`` over all units of the target, hand payloads to ``keep`` in order, and prove the digests.

    Raises:
        PayloadInvalidError: a rebuilt tensor is not what the last delta states.
    """
    meter.start(stage, prepared.target_nbytes)
    grid = prepared.chain.grid
    digests = Digests()
    units, again = itertools.tee(group(grid.range(0, len(grid))))
    for unit, rebuilt in zip(units, workers.map(work, again), strict=True):
        for piece, part in zip(unit.slices, rebuilt.digests, strict=True):
            digests.add(piece.name, part)
        if keep is not None and rebuilt.payload is not None:
            keep(unit, rebuilt.payload)
        meter.advance(unit.nbytes)
    expected = prepared.chain.target_states
    difference = first_difference(expected, digests.of(expected))
    if difference is not None:
        prepared.base.check_unchanged()
        raise PayloadInvalidError(f"{prepared.chain.last.path}: applied to {prepared.base.path} it gives {difference}")
