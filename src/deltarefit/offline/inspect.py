"""Say what a delta holds, without the checkpoints."""

from __future__ import annotations

from pathlib import Path

import msgspec

from deltarefit.offline.container import Delta
from deltarefit.offline.diff import DiffReport, report_of
from deltarefit.offline.manifest import FileRow, TensorRow, policy_digest_of
from deltarefit.offline.pool import SILENT, Meter, Settings, Workers
from deltarefit.offline.prepare import check_bodies, target_files

__all__ = ["InspectReport", "inspect_delta"]


class InspectReport(msgspec.Struct, frozen=True, kw_only=True):
    """A delta's own account of itself, its bytes compared with their digests."""

    summary: DiffReport
    layout: str
    encoding: str
    policy_digest: str
    """As a run reports it for a policy with the target's tensors."""
    payload_nbytes: int
    blob_nbytes: int
    """Headers and companions, compressed."""
    num_payloads: int
    tensors: tuple[TensorRow, ...]
    """Those that are not the same on both sides."""
    files: tuple[FileRow, ...]


def inspect_delta(path: Path, *, settings: Settings | None = None, meter: Meter = SILENT) -> InspectReport:
    """Read a delta and check every byte of it.

    Raises:
        PayloadInvalidError: it was cut or altered.
        RejectedError: no file is there.
    """
    with Delta(path) as delta, Workers(settings or Settings()) as workers:
        target_files(delta)
        check_bodies((delta,), workers, meter)
        manifest = delta.manifest
        return InspectReport(
            summary=report_of(manifest, path, delta.id, delta.nbytes),
            layout=manifest.layout,
            encoding=manifest.encoding,
            policy_digest=policy_digest_of(manifest.target_states()),
            payload_nbytes=sum(row.nbytes for row in manifest.payloads),
            blob_nbytes=sum(row.nbytes for row in manifest.blobs),
            num_payloads=len(manifest.payloads),
            tensors=tuple(row for row in manifest.tensors if row.kind != "same"),
            files=manifest.files,
        )
