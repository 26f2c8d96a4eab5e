"""Compare two checkpoints and write the delta that leads from one to the other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from deltarefit.canonical import TensorDigest, Words
from deltarefit.errors import RejectedError
from deltarefit.kernels import digest, scan
from deltarefit.offline.checkpoint import Checkpoint, Companion
from deltarefit.offline.container import DeltaWriter, digest_of, encode_items
from deltarefit.offline.digests import Digests, digest_slices
from deltarefit.offline.files import DISK, Disk, new_file, require_apart
from deltarefit.offline.grid import Grid, Slice, Unit, group
from deltarefit.offline.manifest import FileRow, Manifest, TensorRow, identity_of
from deltarefit.offline.pool import SILENT, Meter, Settings, Workers, scratch
from deltarefit.records import CodedItem, Encoding

__all__ = ["SINGLE_FILE", "DiffReport", "diff_checkpoints"]

SINGLE_FILE = "model.safetensors"
"""What a manifest calls the file of a checkpoint that is a single file; ``apply`` names it as the user says."""


class DiffReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a comparison found and wrote."""

    delta: str
    """Path of the delta."""
    id: str
    base: str
    target: str
    nbytes: int
    """Of the delta."""
    target_nbytes: int
    """Of all tensors of NEW."""
    num_words: int
    num_sent: int
    """Words that the delta changes or gives."""
    kinds: dict[str, int]
    """Tensors by kind: same, changed, reshaped, retyped, added, removed."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What one unit gave."""

    unit: Unit
    payload: bytes | None
    old_digests: list[tuple[str, TensorDigest]]
    new_digests: list[TensorDigest]
    sent: list[int]
    """Words in items, slice by slice."""


class _Comparison:
    """Two open checkpoints and what is to be done with each tensor of the new one."""

    def __init__(self, old: Checkpoint, new: Checkpoint, encoding: Encoding) -> None:
        self.old, self.new, self.encoding = old, new, encoding
        self.old_grid = Grid({name: tensor for name, (_, tensor) in old.tensors.items()})
        self.new_grid = Grid({name: tensor for name, (_, tensor) in new.tensors.items()})
        self.plan = _plan_digest(old, new, encoding)
        # A new tensor is told as changes of the old one if both have one dtype; their shapes may differ.
        self._image_words = {
            name: min(old.tensor(name).num_words, tensor.num_words)
            for name, (_, tensor) in new.tensors.items()
            if name in old.tensors
            and (old.tensor(name).dtype, old.tensor(name).word_nbytes) == (tensor.dtype, tensor.word_nbytes)
        }

    def is_carried(self, name: str) -> bool:
        """Whether the new tensor is told as changes of the old one."""
        return name in self._image_words

    def uncovered(self) -> Iterator[Slice]:
        """Old slices that comparing the new ones does not read whole."""
        for piece in self.old_grid.range(0, len(self.old_grid)):
            if piece.first_word + piece.num_words > self._image_words.get(piece.name, 0):
                yield piece

    def compare(self, unit: Unit) -> _Found:
        """Read one unit on both sides; runs in a worker thread."""
        items: list[CodedItem] = []
        found = _Found(unit, None, [], [], [])
        for piece in unit.slices:
            new = scratch(0, piece.num_words, piece.word_dtype)
            self.new.read_words(piece.name, piece.first_word, new)
            image = self._image(piece, found)
            encoding = self.encoding if self.is_carried(piece.name) else Encoding.OVERWRITE
            item = scan(piece.spec, new, image, (piece.piece,), encoding).item
            found.new_digests.append(digest(new, (piece.digest_piece,)))
            found.sent.append(0 if item is None else item.count)
            if item is not None:
                items.append(detached(item, new))
        if not items:
            return found
        data = encode_items(items, first_slice=unit.first, plan=self.plan)
        return _Found(unit, data, found.old_digests, found.new_digests, found.sent)

    def _image(self, piece: Slice, found: _Found) -> Words:
        """The old words in the slice's place, continued with zeros."""
        image = scratch(1, piece.num_words, piece.word_dtype)
        count = max(0, min(self._image_words.get(piece.name, 0) - piece.first_word, piece.num_words))
        image[count:] = 0
        if count:
            self.old.read_words(piece.name, piece.first_word, image[:count])
            old = self.old_grid.slice(self.old_grid.first_of(piece.name) + piece.number)
            if old.num_words == count:
                found.old_digests.append((piece.name, digest(image[:count], (old.digest_piece,))))
        return image


def _refuse_among_companions(output: Path, new: Checkpoint) -> None:
    if new.is_directory and not output.name.startswith(".") and output.resolve().parent == new.path.resolve():
        raise RejectedError(
            f"{output}: would belong to the checkpoint {new.path} from then on, which then is not what the delta gives; choose "
            "an output in another directory"
        )


def diff_checkpoints(
    old: Path,
    new: Path,
    output: Path,
    *,
    encoding: Encoding = Encoding.DIFFERENCE,
    settings: Settings | None = None,
    meter: Meter = SILENT,
    tensors_only: bool = False,
    replace: bool = False,
    disk: Disk = DISK,
) -> DiffReport:
    """Write the delta that turns ``old`` into ``new``, bit for bit and file by file.

    Args:
        old: a safetensors file, a directory with one or with a sharded index, or an index file.
        new: the same; the two may be arranged differently.
        output: the delta to write; appears complete or not at all.
        encoding: for tensors that both sides hold in one dtype; all others are overwrites.
        settings: memory and threads.
        meter: is told bytes read.
        tensors_only: leave companion files (configuration, tokenizer) out.
        replace: overwrite an existing ``output``.
        disk: where to write; for tests.

    Raises:
        RejectedError: an input is no checkpoint or changed while it was read, or the output exists or belongs to an input.
        OSError: reading or writing failed.
    """
    with (
        Checkpoint(old, tensors_only=tensors_only) as old_side,
        Checkpoint(new, tensors_only=tensors_only) as new_side,
    ):
        require_apart(output, (*old_side.paths(), *new_side.paths()))
        if not tensors_only:
            _refuse_among_companions(output, new_side)
        with new_file(output, disk, replace=replace) as fd, Workers(settings or Settings()) as workers:
            comparison = _Comparison(old_side, new_side, encoding)
            writer = DeltaWriter(fd, disk)
            uncovered_nbytes = sum(piece.nbytes for piece in comparison.uncovered())
            meter.start("compare", new_side.nbytes + uncovered_nbytes)
            rows = _compare_all(comparison, writer, workers, meter)
            files = _store_files(writer, old_side, new_side)
            manifest = Manifest(
                base=identity_of({row.name: row.base for row in rows if row.base is not None}),
                target=identity_of({row.name: row.target for row in rows if row.target is not None}),
                layout="directory" if new_side.is_directory else "file",
                tensors_only=tensors_only,
                encoding=encoding.name.lower(),
                plan=comparison.plan,
                tensors=rows,
                files=files,
                payloads=tuple(writer.payloads),
                blobs=tuple(writer.blobs),
            )
            old_side.check_unchanged()
            new_side.check_unchanged()
            delta_id, nbytes = writer.finish(manifest)
    return report_of(manifest, output, delta_id, nbytes)


def report_of(manifest: Manifest, output: Path, delta_id: str, nbytes: int) -> DiffReport:
    """Counts of a delta that was just written."""
    kinds = dict.fromkeys(("same", "changed", "reshaped", "retyped", "added", "removed"), 0)
    for row in manifest.tensors:
        kinds[row.kind] += 1
    targets = manifest.target_states().values()
    return DiffReport(
        delta=str(output),
        id=delta_id,
        base=manifest.base,
        target=manifest.target,
        nbytes=nbytes,
        target_nbytes=sum(state.nbytes for state in targets),
        num_words=sum(state.num_words for state in targets),
        num_sent=sum(row.num_sent for row in manifest.tensors),
        kinds=kinds,
    )


def _compare_all(comparison: _Comparison, writer: DeltaWriter, workers: Workers, meter: Meter) -> tuple[TensorRow, ...]:
    """Compare every unit, write the payloads, and give the manifest's rows."""
    old_digests, new_digests = Digests(), Digests()
    sent: dict[str, int] = {}
    grid = comparison.new_grid
    for found in workers.map(comparison.compare, group(grid.range(0, len(grid)))):
        if found.payload is not None:
            writer.add_payload(found.payload, found.unit.first, found.unit.end)
        for name, part in found.old_digests:
            old_digests.add(name, part)
        for piece, part, count in zip(found.unit.slices, found.new_digests, found.sent, strict=True):
            new_digests.add(piece.name, part)
            sent[piece.name] = sent.get(piece.name, 0) + count
        meter.advance(found.unit.nbytes)
    digest_slices(comparison.old, comparison.uncovered(), old_digests, workers, meter)
    old_states, new_states = old_digests.states(comparison.old), new_digests.states(comparison.new)
    return tuple(
        TensorRow(name, old_states.get(name), new_states.get(name), comparison.is_carried(name), sent.get(name, 0))
        for name in sorted(old_states.keys() | new_states.keys())
    )


def _store_files(writer: DeltaWriter, old: Checkpoint, new: Checkpoint) -> tuple[FileRow, ...]:
    """Rows for the new side's files; headers are always carried, companions where the old side's differ."""
    rows = []
    for file in new.files:
        name = file.name if new.is_directory else SINGLE_FILE
        blob = writer.add_blob(file.header.raw)
        rows.append(FileRow(name, True, file.header.file_nbytes, digest_of(file.header.raw), blob))
    for companion in new.companions.values():
        content = companion.read()
        known = _same_content(old.companions.get(companion.name), content)
        row = FileRow(companion.name, False, len(content), digest_of(content), None if known else writer.add_blob(content))
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: row.name))


def _same_content(companion: Companion | None, content: bytes) -> bool:
    return companion is not None and companion.nbytes == len(content) and companion.read() == content


def _plan_digest(old: Checkpoint, new: Checkpoint, encoding: Encoding) -> str:
    """Binds the payloads to one pair of layouts, so that none can pass for another delta's by its place alone."""
    state = hashlib.blake2b(digest_size=16)
    for side in (old, new):
        for name, (_, tensor) in sorted(side.tensors.items()):
            state.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\n".encode())
        state.update(b"\0")
    state.update(encoding.name.encode())
    return state.hexdigest()


def detached(item: CodedItem, scratch_words: Words) -> CodedItem:
    """The item with planes of its own: a dense plane of single-byte words may be a view of memory that the next slice fills."""
    if not any(np.may_share_memory(plane, scratch_words) for plane in item.value_planes):
        return item
    planes = tuple(plane.copy() for plane in item.value_planes)
    return CodedItem(item.spec, item.encoding, item.location_form, item.start, item.count, item.location_planes, planes)
