"""The ``trace`` command: event files in, one refit on one time axis out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltarefit.cli._output import emit, format_nbytes, format_seconds, guarded, json_option, print_table

if TYPE_CHECKING:
    from deltarefit.runtime.trace_bounds import LowerBounds

__all__ = ["trace"]


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--version", "policy_version", type=click.IntRange(min=1), default=None, help="Which refit; default: the last.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), default=None, help="Write the trace here.")
@click.option(
    "--picture", type=click.Path(path_type=Path, dir_okay=False), default=None, help="Draw the timeline here, as SVG."
)
@json_option
@guarded
def trace(
    *, files: Sequence[Path], policy_version: int | None, output: Path | None, picture: Path | None, as_json: bool
) -> None:
    """Make a trace of one refit that opens in Perfetto (https://ui.perfetto.dev), and say what bounds its latency.

    FILES are what the event_directory setting made, or such directories. The file of the trainer's rank 0 alone holds the whole
    refit; files of receivers add what they did outside it.
    """
    from deltarefit.errors import RejectedError
    from deltarefit.runtime.jsonlines import merge_event_files, read_event_file
    from deltarefit.runtime.trace import chrome_trace
    from deltarefit.runtime.trace_bounds import lower_bounds
    from deltarefit.runtime.trace_picture import timeline_svg

    read = [read_event_file(path) for path in _expanded(files)]
    events, shifts = merge_event_files(read)
    versions = sorted({_version(event.attempt) for event in events} - {0})
    if not versions:
        raise RejectedError(f"{', '.join(map(str, files))}: no refit in these files")
    wanted = policy_version or versions[-1]
    chosen = [event for event in events if _version(event.attempt) == wanted]
    if not chosen:
        raise RejectedError(f"no refit to version {wanted} in these files: they hold versions {_ranges(versions)}")
    bounds = lower_bounds(chosen)
    title = f"refit to policy version {wanted}"
    if output is not None:
        used = {where: shift for where, shift in shifts.items() if any(event.where == where for event in chosen)}
        output.write_bytes(chrome_trace(chosen, title=title, shifts=used))
    if picture is not None:
        picture.write_text(timeline_svg(chosen, bounds=bounds, title=title), encoding="utf-8")
    result: dict[str, Any] = {
        "policy_version": wanted,
        "events": len(chosen),
        "bounds": bounds,
        "binding": bounds.binding,
        "latency_s": bounds.latency_s,
        "unexplained_s": bounds.unexplained_s,
        "clock_error_s": max((s.error_s for w, s in shifts.items() if any(e.where == w for e in chosen)), default=0.0),
    }
    emit(result, as_json=as_json, human=lambda: _show(result, bounds, sum(e.nbytes for e in chosen if e.stage == "send")))


def _expanded(files: Sequence[Path]) -> list[Path]:
    """Directories stand for the event files in them."""
    return [found for path in files for found in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]


def _version(attempt: str) -> int:
    """The policy version that an attempt leads to; 0 if the text names no attempt."""
    digits = attempt.partition("-")[0].removeprefix("v")
    return int(digits) if digits.isdecimal() else 0


def _ranges(versions: Sequence[int]) -> str:
    return f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else str(versions[0])


def _show(result: dict[str, Any], bounds: LowerBounds, sent_nbytes: int) -> None:
    click.echo(
        f"refit to policy version {result['policy_version']}: {format_seconds(bounds.latency_s)}, "
        f"{format_nbytes(sent_nbytes)} sent; bound by {bounds.binding or 'nothing'}"
    )
    rows: list[list[object]] = []
    for name in ("construction", "transport", "apply"):
        bound = getattr(bounds, name)
        rows.append([name, f"{bound.seconds:.4f}", _share(bound.seconds, bounds.latency_s), bound.where])
    rows.append(["finalization", f"{bounds.finalization_s:.4f}", _share(bounds.finalization_s, bounds.latency_s), ""])
    rows.append(
        ["start, drain, handing over", f"{bounds.unexplained_s:.4f}", _share(bounds.unexplained_s, bounds.latency_s), ""]
    )
    print_table(["lower bound", "seconds", "share", "in"], rows)


def _share(seconds: float, whole_s: float) -> str:
    return f"{seconds / whole_s:.0%}" if whole_s > 0 else "-"
