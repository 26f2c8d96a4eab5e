"""The ``coverage`` command: what a policy would send directly, from a configuration or a checkpoint's headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from deltarefit.cli._output import emit, format_nbytes, guarded, json_option, print_table

if TYPE_CHECKING:
    from deltarefit.canonical import Catalog
    from deltarefit.source import CoverageReport, ParallelDegrees

__all__ = ["coverage"]

_DEGREE = click.IntRange(min=1)
_MOST_CONFIG_NBYTES = 2**24


@click.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True),
    default=None,
    help="A model's config.json, or its directory. Needs transformers; no weights are made.",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, exists=True),
    default=None,
    help="A safetensors file or checkpoint directory instead; only headers are read.",
)
@click.option("--tp", type=_DEGREE, default=1, show_default=True, help="Tensor-parallel degree of the training layout.")
@click.option("--etp", type=_DEGREE, default=1, show_default=True, help="Expert-tensor-parallel degree.")
@click.option("--ep", type=_DEGREE, default=1, show_default=True, help="Expert-parallel degree: deals out whole experts.")
@click.option("--pp", type=_DEGREE, default=1, show_default=True, help="Pipeline-parallel degree: deals out whole layers.")
@click.option(
    "--classes",
    type=click.Choice(["pieces", "paper"]),
    default="pieces",
    show_default=True,
    help="What counts as direct: everything that is a list of strided pieces, or the paper's five mapping classes.",
)
@json_option
@guarded
def coverage(
    *,
    config: Path | None,
    checkpoint: Path | None,
    tp: int,
    etp: int,
    ep: int,
    pp: int,
    classes: Literal["pieces", "paper"],
    as_json: bool,
) -> None:
    """Show how much of a policy is sent directly, by weight type, and in how many items when everything changes.

    Metadata alone. Of a live source, Publisher.coverage() tells the same from what its ranks really own.
    Pipeline and expert parallelism deal out whole tensors, so they change which rank sends an item, not how many there are.
    """
    from deltarefit.source import ParallelDegrees, coverage_of

    del ep, pp  # validated; whole tensors move, no number changes
    if (config is None) == (checkpoint is None):
        raise click.UsageError("expected --config or --checkpoint, one of them")
    catalog = _catalog(config, checkpoint)
    degrees = ParallelDegrees(tp, etp, _num_key_value_heads(config if config is not None else checkpoint))
    report = coverage_of(catalog, degrees, classes=classes)
    emit(report, as_json=as_json, human=lambda: show(report, degrees, classes))


def _catalog(config: Path | None, checkpoint: Path | None) -> Catalog:
    from deltarefit.errors import RejectedError
    from deltarefit.offline import catalog_of_checkpoint

    if config is None:
        return catalog_of_checkpoint(checkpoint or Path())
    try:
        from deltarefit.runtime.adapters import catalog_of_config
    except ImportError as error:
        raise RejectedError(
            f"--config needs torch and transformers: pip install 'deltarefit[transformers]' ({error})"
        ) from error
    return catalog_of_config(config)


def _num_key_value_heads(path: Path | None) -> int | None:
    """As the configuration says; None where there is no configuration or it does not say."""
    if path is None:
        return None
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json" or not file.is_file() or file.stat().st_size > _MOST_CONFIG_NBYTES:
        return None
    values: Any = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(values, dict) and isinstance(values.get("text_config"), dict):
        values = values["text_config"]
    heads = values.get("num_key_value_heads") if isinstance(values, dict) else None
    return heads if isinstance(heads, int) and heads > 0 else None


def show(report: CoverageReport, degrees: ParallelDegrees, classes: str) -> None:
    """Print the table and its sum."""
    rows = [
        [row.weight_type, row.path, row.tensors, format_nbytes(row.nbytes), f"{row.share:.3%}", row.items, row.reason or "-"]
        for row in report.by_type
    ]
    print_table(["weight type", "path", "tensors", "bytes", "share", "items", "why"], rows)
    share = report.bytes_direct / report.bytes_total if report.bytes_total else 1.0
    click.echo(
        f"direct: {report.tensors_direct:,} of {report.tensors_total:,} tensors, {share:.2%} of "
        f"{format_nbytes(report.bytes_total)}, {report.items_direct:,} of {report.items_total:,} items at "
        f"TP {degrees.tensor}, expert TP {degrees.expert_tensor} ({classes})"
    )
