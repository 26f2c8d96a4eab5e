"""The ``publish`` command: from one checkpoint on disk to the next, straight into the engines of a run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltarefit.cli._output import emit, format_nbytes, format_seconds, guarded, json_option, key_file_option, progress

if TYPE_CHECKING:
    from deltarefit.runtime.report import RefitReport

__all__ = ["publish"]

_PATH = click.Path(exists=True, path_type=Path)


@click.command()
@click.argument("following", metavar="NEXT...", type=_PATH, nargs=-1, required=True)
@click.option("--run", "run", required=True, help="The run's URL, as its receivers name it.")
@click.option("--from", "base", type=_PATH, required=True, help="The checkpoint that the engines hold.")
@click.option("--receivers", "min_receivers", type=click.IntRange(0), default=1, show_default=True, help="Wait for so many.")
@click.option(
    "--wait", "wait_s", type=click.FloatRange(0), default=600.0, show_default=True, help="Seconds to wait for receivers."
)
@click.option(
    "--baseline",
    "baseline_directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=None,
    help="Keep the copy of the committed checkpoint in a file here, not in memory.",
)
@key_file_option
@json_option
@guarded
def publish(
    following: Sequence[Path],
    *,
    run: str,
    base: Path,
    min_receivers: int,
    wait_s: float,
    baseline_directory: Path | None,
    key_file: Path | None,
    as_json: bool,
) -> None:
    """Refit a run's engines from one checkpoint to the next, without a trainer.

    Each NEXT is a checkpoint, or a delta that 'deltarefit diff' made from what came before it; each becomes one policy version.
    Only what changed travels. Quantised checkpoints too: engines end with the bits of a fresh load of the last one.
    """
    from deltarefit.offline import is_delta
    from deltarefit.run_key import read_key
    from deltarefit.runtime.publisher import Publisher
    from deltarefit.runtime.settings import PublisherSettings
    from deltarefit.source import LocalCollective

    settings = PublisherSettings(
        min_receivers=min_receivers,
        join_timeout_s=wait_s,
        group_timeout_s=wait_s + PublisherSettings().group_timeout_s,
        baseline_directory=str(baseline_directory or ""),
    )
    key = None if key_file is None else read_key(key_file)
    make_source: Any = importlib.import_module("deltarefit.integrations.checkpoints").CheckpointSource
    reports: list[RefitReport] = []
    with (
        make_source(base) as source,
        Publisher(None, run=run, adapter=source, collective=LocalCollective(), settings=settings, key=key) as publisher,
    ):
        for path in following:
            if is_delta(path):
                with progress(quiet=as_json) as meter:
                    source.move_by(path, meter=meter)
            else:
                source.move_to(path)
            reports.append(publisher.refit())
            if not as_json:
                _show(path, reports[-1])
    emit({"refits": reports}, as_json=as_json, human=lambda: None)


def _show(path: Path, report: RefitReport) -> None:
    click.echo(
        f"policy version {report.policy_version} is {path}: {report.changed_elements:,} of {report.total_elements:,} elements, "
        f"{format_nbytes(report.payload_nbytes)} to {', '.join(report.receivers) or 'no receiver'} in "
        f"{format_seconds(report.refit_s)}" + ("; every receiver proved its digest" if report.audited else "")
    )
