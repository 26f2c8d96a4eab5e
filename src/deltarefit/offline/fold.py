"""Merge a chain of deltas into one, from the deltas alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from deltarefit.offline.chain import Chain
from deltarefit.offline.container import DeltaWriter, encode_items
from deltarefit.offline.diff import DiffReport, report_of
from deltarefit.offline.files import DISK, Disk, new_file, require_apart, require_free
from deltarefit.offline.grid import Unit, group
from deltarefit.offline.manifest import FileRow, Manifest, TensorRow
from deltarefit.offline.pool import FOLD_COST, SILENT, Meter, Settings, Workers
from deltarefit.offline.prepare import check_bodies, target_files

__all__ = ["fold_deltas"]


def fold_deltas(
    deltas: Sequence[Path],
    output: Path,
    *,
    settings: Settings | None = None,
    meter: Meter = SILENT,
    replace: bool = False,
    disk: Disk = DISK,
) -> DiffReport:
    """Write one delta that does what a chain of them does, oldest first. No checkpoint is read.

    Applied to the chain's base, it gives the same bits and files as applying the chain. It may send a word that the chain
    changed and changed back by overwrite, so it can be larger than a new ``diff`` of the two ends.

    Raises:
        RejectedError: the chain has a gap, the output exists or is one of the deltas, or an element was changed by difference
            in one delta and by xor in another.
        PayloadInvalidError: a delta was cut or altered.
        OSError: reading or writing failed.
    """
    with Chain(deltas) as chain, Workers(settings or Settings(), FOLD_COST) as workers:
        require_free(output, directory=False, replace=replace)
        require_apart(output, deltas)
        target_files(chain.last)
        check_bodies(chain.deltas, workers, meter)
        with new_file(output, disk, replace=replace) as fd:
            writer = DeltaWriter(fd, disk)
            plan = hashlib.blake2b("".join(delta.id for delta in chain.deltas).encode(), digest_size=16).hexdigest()
            sent = _merge_all(chain, writer, plan, workers, meter)
            files = tuple(_carry(chain, row, writer) for row in chain.last.manifest.files)
            manifest = Manifest(
                base=chain.base_id,
                target=chain.target_id,
                layout=chain.last.manifest.layout,
                tensors_only=chain.last.manifest.tensors_only,
                encoding="folded",
                plan=plan,
                tensors=_rows(chain, sent),
                files=files,
                payloads=tuple(writer.payloads),
                blobs=tuple(writer.blobs),
            )
            delta_id, nbytes = writer.finish(manifest)
    return report_of(manifest, output, delta_id, nbytes)


def _merge_all(chain: Chain, writer: DeltaWriter, plan: str, workers: Workers, meter: Meter) -> dict[str, int]:
    """Merge every unit and write the payloads; gives the words sent by tensor."""
    sent: dict[str, int] = {}
    meter.start("fold", sum(state.nbytes for state in chain.target_states.values()))

    def work(unit: Unit) -> tuple[Unit, bytes | None, list[int]]:
        merged = chain.compose(unit)
        items = [item for slice_items in merged for item in slice_items]
        counts = [sum(item.count for item in slice_items) for slice_items in merged]
        return unit, encode_items(items, first_slice=unit.first, plan=plan) if items else None, counts

    for unit, data, counts in workers.map(work, group(chain.grid.range(0, len(chain.grid)))):
        if data is not None:
            writer.add_payload(data, unit.first, unit.end)
        for piece, count in zip(unit.slices, counts, strict=True):
            sent[piece.name] = sent.get(piece.name, 0) + count
        meter.advance(unit.nbytes)
    return sent


def _rows(chain: Chain, sent: dict[str, int]) -> tuple[TensorRow, ...]:
    base, target = chain.base_states, chain.target_states
    return tuple(
        TensorRow(name, base.get(name), target.get(name), name in target and chain.is_carried(name), sent.get(name, 0))
        for name in sorted(base.keys() | target.keys())
    )


def _carry(chain: Chain, row: FileRow, writer: DeltaWriter) -> FileRow:
    """The last delta's row for a file, its bytes taken over from whichever delta carries them."""
    carrier = (chain.last, row) if row.holds_tensors else chain.carrier(row)
    if carrier is None:
        return row
    delta, held = carrier
    if held.blob is None:
        return row
    blob = writer.add_frame(delta.frame(held.blob), delta.manifest.blobs[held.blob].content_nbytes)
    return FileRow(row.name, row.holds_tensors, row.nbytes, row.digest, blob)
