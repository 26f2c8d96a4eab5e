"""Apply a chain of deltas to a checkpoint where it is, so that a crash at any moment ends in the old or the new one.

It is a redo log. First everything is checked, and a journal directory is filled: ``redo.delta`` holds the *new bits* of every
word that changes in files whose header stays as it is (overwrites: they may be repeated), ``new/`` every file that is written
anew, ``journal.json`` what to do. Giving the journal its name is the one step that decides: before it, the checkpoint is
untouched and the leftovers are invisible; after it, the work can be repeated from any point until it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from deltarefit.canonical import WORDS, TensorDigest, Words
from deltarefit.errors import OperatorRequiredError, RefitError, RejectedError
from deltarefit.kernels import apply_item, digest, scan
from deltarefit.offline.apply import ApplyReport, Rebuilt, rebuild_all, report_of
from deltarefit.offline.chain import Chain
from deltarefit.offline.checkpoint import INDEX_SUFFIX, Checkpoint, journal_path
from deltarefit.offline.container import Delta, DeltaWriter, encode_items
from deltarefit.offline.digests import Digests
from deltarefit.offline.files import (
    DISK,
    Disk,
    check_file_name,
    locked,
    new_directory,
    partial_path,
    read_exact,
    read_into,
    write_file,
)
from deltarefit.offline.grid import Slice, Unit, group
from deltarefit.offline.manifest import FileRow, Manifest, TensorRow, first_difference
from deltarefit.offline.pool import SILENT, Meter, Settings, Workers, scratch
from deltarefit.offline.prepare import Prepared, TargetFile, check_bodies, prepare
from deltarefit.records import Encoding

__all__ = ["apply_in_place", "resume_in_place"]

_REDO = "redo.delta"
_STATE = "journal.json"
_NEW = "new"
_FORMAT_VERSION = 2  # of the journal, redo.delta included: raised with the delta's
_MAX_STATE_NBYTES = 2**30


class _Journal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is to be done, in this order."""

    format_version: int
    report: ApplyReport
    patched: tuple[str, ...]
    """Tensor files that keep their header: changed words are overwritten by ``redo.delta``."""
    renamed: tuple[str, ...]
    """Files in ``new/`` that take their place."""
    removed: tuple[str, ...]
    """Files of the old checkpoint that the new one does not have."""


def apply_in_place(
    base: Path,
    deltas: Sequence[Path],
    *,
    settings: Settings | None = None,
    meter: Meter = SILENT,
    disk: Disk = DISK,
) -> ApplyReport:
    """Turn ``base`` itself into the last delta's target. Needs free space for the changes, not for a second checkpoint.

    Whoever reads the checkpoint meanwhile may see old and new mixed. If this is interrupted, every command refuses the
    checkpoint until ``resume_in_place`` was run, unless nothing had been changed yet.

    Args:
        base: a file, if the last delta was made from a single file, else a directory.

    Raises:
        RejectedError: the chain has a gap, the base is of the wrong kind, or another process is writing it.
        BaseMismatchError: the base is another checkpoint.
        PayloadInvalidError: a delta was cut or altered.
        OperatorRequiredError: an earlier in-place apply has to be finished first, or what is on disk in the end is wrong.
        OSError: reading or writing failed. Run ``resume_in_place``.
    """
    if base.name.endswith(INDEX_SUFFIX):
        raise RejectedError(f"{base}: in place needs the checkpoint's directory, not its index")
    with locked(base), Workers(settings or Settings()) as workers:
        with Chain(deltas) as chain, Checkpoint(base) as source:
            if (chain.last.manifest.layout == "directory") != source.is_directory:
                raise RejectedError(
                    f"{base}: the last delta gives a {chain.last.manifest.layout}, this is none; nothing was written. "
                    "Apply to a new output instead"
                )
            plan = _Plan.of(prepare(chain, source, workers, meter))
            with new_directory(journal_path(base), disk) as directory:
                _write_journal(plan, report_of(chain, base), directory, workers, meter, disk)
        return _finish(base, workers, meter, disk)


def resume_in_place(
    base: Path, *, settings: Settings | None = None, meter: Meter = SILENT, disk: Disk = DISK
) -> ApplyReport | None:
    """Finish an in-place apply that was interrupted. Gives None if there is nothing to finish: the checkpoint is the old one,
    or was complete.

    Raises:
        RejectedError: another process is writing the checkpoint.
        OperatorRequiredError: the journal was altered, or what is on disk in the end is wrong.
        OSError: reading or writing failed. Run it again.
    """
    journal = journal_path(base)
    with locked(base if base.exists() else base.parent), Workers(settings or Settings()) as workers:
        if journal.exists():
            return _finish(base, workers, meter, disk)
        disk.remove(partial_path(journal))
        return None


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which files are patched, written anew and removed."""

    prepared: Prepared
    patched: frozenset[str]
    companions: tuple[str, ...]
    """Those that differ from the base's."""
    removed: tuple[str, ...]

    @classmethod
    def of(cls, prepared: Prepared) -> _Plan:
        base, manifest = prepared.base, prepared.chain.last.manifest
        patched = frozenset(file.row.name for file in prepared.files if _can_patch(base, file))
        companions = tuple(
            name
            for name in sorted(prepared.companions)
            if name not in base.companions or base.companions[name].read() != prepared.companion(name)
        )
        stale = {file.name for file in base.files} if base.is_directory else set()
        stale |= {name for name in base.companions if name.endswith(INDEX_SUFFIX) or not manifest.tensors_only}
        removed = sorted(stale - {row.name for row in manifest.files})
        return cls(prepared, patched, companions, tuple(removed))

    def new_files(self) -> list[TargetFile]:
        return [file for file in self.prepared.files if file.row.name not in self.patched]


def _can_patch(base: Checkpoint, file: TargetFile) -> bool:
    """Whether the base's file can be overwritten word by word: same header, and its bytes are nobody else's."""
    for held in base.files:
        if not base.is_directory or held.name == file.row.name:
            # A link, as in a Hugging Face cache, leads to bytes that other checkpoints share.
            is_own = not held.path.is_symlink() and os.fstat(held.fd).st_nlink == 1 and os.access(held.path, os.W_OK)
            return is_own and held.header.raw == file.header.raw
    return False


def _write_journal(plan: _Plan, report: ApplyReport, directory: Path, workers: Workers, meter: Meter, disk: Disk) -> None:
    """Fill the journal directory; it has no name yet that anyone looks for."""
    disk.make_directory(directory / _NEW)
    for name in plan.companions:
        write_file(directory / _NEW / name, plan.prepared.companion(name), disk)
    with ExitStack() as stack:
        fds: dict[str, int] = {}
        for file in plan.new_files():
            fd = fds[file.row.name] = disk.create(directory / _NEW / file.row.name)
            stack.callback(os.close, fd)
            disk.truncate(fd, file.header.file_nbytes)
            disk.write(fd, file.header.prefix, 0)
        redo = disk.create(directory / _REDO)
        stack.callback(os.close, redo)
        _write_redo(plan, DeltaWriter(redo, disk), fds, workers, meter, disk)
        for fd in (redo, *fds.values()):
            disk.sync(fd)
    disk.sync_directory(directory / _NEW)
    journal = _Journal(
        format_version=_FORMAT_VERSION,
        report=report,
        patched=tuple(sorted(plan.patched)),
        renamed=(*plan.companions, *sorted(fds)),
        removed=plan.removed,
    )
    write_file(directory / _STATE, msgspec.json.encode(journal), disk)


def _write_redo(plan: _Plan, writer: DeltaWriter, fds: dict[str, int], workers: Workers, meter: Meter, disk: Disk) -> None:
    """Rebuild every unit: words of new files are written to them, words that change in patched files become overwrites."""
    prepared = plan.prepared
    places = prepared.places()
    plan_digest = prepared.chain.last.manifest.plan

    def work(unit: Unit) -> Rebuilt:
        digests, items = [], []
        for piece, words in zip(unit.slices, prepared.chain.rebuild(unit, prepared.base), strict=True):
            digests.append(digest(words, (piece.digest_piece,)))
            number, tensor = places[piece.name]
            file = prepared.files[number]
            if file.row.name in fds:
                start = file.header.data_offset + tensor.begin + piece.first_word * words.itemsize
                disk.write(fds[file.row.name], words.view(WORDS[1]).data, start)
                continue
            old = scratch(1, piece.num_words, piece.word_dtype)
            prepared.base.read_words(piece.name, piece.first_word, old)
            item = scan(piece.spec, words, old, (piece.piece,), Encoding.OVERWRITE).item
            if item is not None:
                items.append(item)
        return Rebuilt(digests, encode_items(items, first_slice=unit.first, plan=plan_digest) if items else None)

    def keep(unit: Unit, data: bytes) -> None:
        writer.add_payload(data, unit.first, unit.end)

    rebuild_all(prepared, work, workers, meter, "write journal", keep)
    writer.finish(_redo_manifest(prepared, writer))


def _redo_manifest(prepared: Prepared, writer: DeltaWriter) -> Manifest:
    last = prepared.chain.last.manifest
    base, target = prepared.chain.base_states, prepared.chain.target_states
    rows = []
    for file in prepared.files:
        blob = writer.add_blob(file.header.raw)
        rows.append(FileRow(file.row.name, True, file.row.nbytes, file.row.digest, blob))
    return Manifest(
        base=prepared.chain.base_id,
        target=prepared.chain.target_id,
        layout=last.layout,
        tensors_only=True,
        encoding=Encoding.OVERWRITE.name.lower(),
        plan=last.plan,
        tensors=tuple(
            TensorRow(name, base.get(name), target.get(name), False, 0) for name in sorted(base.keys() | target.keys())
        ),
        files=tuple(rows),
        payloads=tuple(writer.payloads),
        blobs=tuple(writer.blobs),
    )


def _finish(path: Path, workers: Workers, meter: Meter, disk: Disk) -> ApplyReport:
    """Carry out a journal, from the start, whatever of it was done before."""
    journal = journal_path(path)
    state = _read_state(journal / _STATE)
    directory = path if path.is_dir() else path.parent
    try:
        with Delta(journal / _REDO) as redo:
            check_bodies((redo,), workers, meter)
            _patch(path, state, redo, workers, meter, disk)
            for name in state.renamed:
                if (journal / _NEW / name).exists():
                    disk.rename(journal / _NEW / name, directory / name if path.is_dir() else path)
            for name in state.removed:
                disk.remove(directory / name)
            disk.sync_directory(directory)
            _prove(path, redo, workers, meter)
    except RefitError as error:
        raise OperatorRequiredError(f"{path}: in-place apply cannot be finished: {error}. {_restore(journal)}") from error
    # Removing takes many steps, so the journal first loses its name.
    done = partial_path(journal)
    disk.remove(done)
    disk.rename(journal, done)
    disk.sync_directory(done.parent)
    disk.remove(done)
    return state.report


def _restore(journal: Path) -> str:
    return f"The checkpoint may be half changed: restore it from a copy, then remove {journal}"


def _read_state(path: Path) -> _Journal:
    try:
        if path.stat().st_size > _MAX_STATE_NBYTES:
            raise RejectedError(f"{path.stat().st_size} bytes")
        state = msgspec.json.decode(path.read_bytes(), type=_Journal)
        for name in (*state.patched, *state.renamed, *state.removed):
            check_file_name(name, str(path))
    except (msgspec.DecodeError, RejectedError, FileNotFoundError) as error:
        raise OperatorRequiredError(f"{path}: not the state of an in-place apply: {error}. {_restore(path.parent)}") from error
    if state.format_version != _FORMAT_VERSION:
        raise OperatorRequiredError(
            f"{path}: format version {state.format_version}, this build reads {_FORMAT_VERSION}; resume with that build"
        )
    return state


class _Place(NamedTuple):
    """Where a tensor is on disk."""

    path: Path
    fd: int
    byte_offset: int
    """Of its first byte in the file."""

    def start(self, piece: Slice) -> int:
        return self.byte_offset + piece.first_word * piece.word_dtype.itemsize

    def read(self, piece: Slice) -> Words:
        """A slice's words, in this thread's scratch memory."""
        words = scratch(0, piece.num_words, piece.word_dtype)
        read_into(self.fd, words, self.start(piece), str(self.path))
        return words


@contextmanager
def _open_places(path: Path, redo: Delta, names: Iterable[str], flags: int) -> Iterator[dict[str, _Place]]:
    """The target's tensors in its files of these names, as they are on disk now.

    Raises:
        RejectedError: a file's header is not the target's.
    """
    wanted = set(names)
    places: dict[str, _Place] = {}
    with ExitStack() as stack:
        for row in redo.manifest.files:
            if row.name not in wanted or not row.holds_tensors:
                continue
            file = path / row.name if path.is_dir() else path
            fd = os.open(file, flags | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            header = redo.header(row)
            if os.fstat(fd).st_size != header.file_nbytes or read_exact(fd, header.data_offset, 0, str(file)) != header.prefix:
                raise RejectedError(f"{file}: its header or length is not what the delta gives")
            for tensor in header.tensors:
                places[tensor.name] = _Place(file, fd, header.data_offset + tensor.begin)
        yield places


def _patch(path: Path, state: _Journal, redo: Delta, workers: Workers, meter: Meter, disk: Disk) -> None:
    """Overwrite changed words in the files that keep their header."""
    with _open_places(path, redo, state.patched, os.O_RDWR) as places:

        def work(number: int) -> int:
            for ordinal, items in redo.items(number).items():
                piece = redo.grid.slice(ordinal)
                place = places[piece.name]
                words = place.read(piece)
                for item in items:
                    apply_item(words, (piece.piece,), item)
                disk.write(place.fd, words.view(WORDS[1]).data, place.start(piece))
            return redo.manifest.payloads[number].nbytes

        meter.start("overwrite", sum(row.nbytes for row in redo.manifest.payloads))
        for nbytes in workers.map(work, range(len(redo.manifest.payloads))):
            meter.advance(nbytes)
        for fd in sorted({place.fd for place in places.values()}):
            disk.sync(fd)


def _prove(path: Path, redo: Delta, workers: Workers, meter: Meter) -> None:
    """Read back everything that is on disk now and compare it with the target's digests."""
    expected = redo.manifest.target_states()
    digests = Digests()
    with _open_places(path, redo, [row.name for row in redo.manifest.files], os.O_RDONLY) as places:

        def work(unit: Unit) -> tuple[Unit, list[TensorDigest]]:
            return unit, [digest(places[piece.name].read(piece), (piece.digest_piece,)) for piece in unit.slices]

        meter.start("check result", sum(state.nbytes for state in expected.values()))
        for unit, parts in workers.map(work, group(redo.grid.range(0, len(redo.grid)))):
            for piece, part in zip(unit.slices, parts, strict=True):
                digests.add(piece.name, part)
            meter.advance(unit.nbytes)
    difference = first_difference(expected, digests.of(expected))
    if difference is not None:
        raise RejectedError(f"the result is not the target: {difference}")
