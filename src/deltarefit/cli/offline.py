"""``deltarefit diff``, ``apply``, ``fold``, ``inspect`` and ``verify``: exact deltas between checkpoints, without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from deltarefit import offline
from deltarefit.cli._output import (
    NBYTES,
    emit,
    fail_check,
    format_nbytes,
    format_seconds,
    guarded,
    json_option,
    now_s,
    print_table,
    progress,
)
from deltarefit.records import Encoding

__all__ = ["COMMANDS", "apply", "diff", "fold", "inspect", "verify"]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_CHECKPOINT = click.Path(exists=True, path_type=Path)
_DELTA = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUTPUT = click.Path(path_type=Path)
_CHECKPOINT_HELP = """A checkpoint is a safetensors file, a directory with one or with a sharded index, or an index file."""


def _machine_options(command: CommandT) -> CommandT:
    """``--memory``, ``--threads`` and ``--json``."""
    for option in (
        json_option,
        click.option("--threads", "num_threads", type=click.IntRange(0, 1024), default=0, help="0: one per core. [0]"),
        click.option("--memory", "memory_nbytes", type=NBYTES, default="1GiB", help="Bound on buffers. [1GiB]"),
    ):
        command = option(command)
    return command


def _force_option(command: CommandT) -> CommandT:
    return click.option("--force", is_flag=True, help="Replace the output file if it exists.")(command)


def _settings(memory_nbytes: int, num_threads: int) -> offline.Settings:
    if memory_nbytes < offline.MIN_MEMORY_NBYTES:
        raise click.UsageError(f"--memory: expected at least {format_nbytes(offline.MIN_MEMORY_NBYTES)}")
    return offline.Settings(memory_nbytes=memory_nbytes, num_threads=num_threads)


def _run(as_json: bool, work: Callable[[offline.Meter], Any]) -> tuple[Any, float]:
    """Do the work under a progress display; gives its result and the seconds that it took."""
    began_s = now_s()
    with progress(quiet=as_json) as meter:
        result = work(meter)
    return result, now_s() - began_s


def _kinds(report: offline.DiffReport) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in report.kinds.items() if count) or "none"


def _print_delta(report: offline.DiffReport, seconds: float | None) -> None:
    share = report.num_sent / report.num_words if report.num_words else 0.0
    ratio = report.nbytes / report.target_nbytes if report.target_nbytes else 0.0
    click.echo(f"delta    {report.delta}  {format_nbytes(report.nbytes)}, {ratio:.2%} of {format_nbytes(report.target_nbytes)}")
    click.echo(f"id       {report.id}")
    click.echo(f"base     {report.base}")
    click.echo(f"target   {report.target}")
    click.echo(f"tensors  {_kinds(report)}")
    click.echo(f"elements {report.num_sent:,} of {report.num_words:,} sent ({share:.3%})")
    if seconds is not None:
        click.echo(f"time     {format_seconds(seconds)}")


@click.command(epilog=_CHECKPOINT_HELP)
@click.argument("old", type=_CHECKPOINT)
@click.argument("new", type=_CHECKPOINT)
@click.option("-o", "--output", type=_OUTPUT, required=True, help="The delta to write.")
@click.option(
    "--encoding",
    type=click.Choice([encoding.name.lower() for encoding in (Encoding.DIFFERENCE, Encoding.XOR, Encoding.OVERWRITE)]),
    default="difference",
    help="What is sent for a changed element. [difference]",
)
@click.option("--tensors-only", is_flag=True, help="Leave out configuration, tokenizer and other files.")
@_force_option
@_machine_options
@guarded
def diff(
    old: Path,
    new: Path,
    output: Path,
    encoding: str,
    tensors_only: bool,
    force: bool,
    memory_nbytes: int,
    num_threads: int,
    as_json: bool,
) -> None:
    """Write the delta that turns checkpoint OLD into NEW, bit for bit."""
    report, seconds = _run(
        as_json,
        lambda meter: offline.diff_checkpoints(
            old,
            new,
            output,
            encoding=Encoding[encoding.upper()],
            settings=_settings(memory_nbytes, num_threads),
            meter=meter,
            tensors_only=tensors_only,
            replace=force,
        ),
    )
    emit({**_plain(report), "seconds": seconds}, as_json=as_json, human=lambda: _print_delta(report, seconds))


@click.command(epilog=_CHECKPOINT_HELP)
@click.argument("base", type=_CHECKPOINT)
@click.argument("deltas", type=_DELTA, nargs=-1)
@click.option("-o", "--output", type=_OUTPUT, help="The checkpoint to write: a directory, or a file if NEW was one.")
@click.option("--in-place", is_flag=True, help="Change BASE itself; survives a crash at any moment.")
@click.option("--resume", is_flag=True, help="With --in-place: finish what was interrupted.")
@_force_option
@_machine_options
@guarded
def apply(
    base: Path,
    deltas: Sequence[Path],
    output: Path | None,
    in_place: bool,
    resume: bool,
    force: bool,
    memory_nbytes: int,
    num_threads: int,
    as_json: bool,
) -> None:
    """Apply DELTAS, oldest first, to checkpoint BASE.

    Everything is checked before the first byte is written, and the result is compared with the digests that the last delta
    states.
    """
    settings = _settings(memory_nbytes, num_threads)
    _check_apply_usage(deltas, output, in_place=in_place, resume=resume, force=force)

    def work(meter: offline.Meter) -> offline.ApplyReport | None:
        if resume:
            return offline.resume_in_place(base, settings=settings, meter=meter)
        if output is None:
            return offline.apply_in_place(base, deltas, settings=settings, meter=meter)
        return offline.apply_deltas(base, deltas, output, settings=settings, meter=meter, replace=force)

    report, seconds = _run(as_json, work)
    if report is None:
        emit({"resumed": False}, as_json=as_json, human=lambda: click.echo(f"{base}: nothing to finish"))
        return
    emit({**_plain(report), "seconds": seconds}, as_json=as_json, human=lambda: _print_applied(report, seconds))


def _check_apply_usage(deltas: Sequence[Path], output: Path | None, *, in_place: bool, resume: bool, force: bool) -> None:
    if resume and (not in_place or deltas):
        raise click.UsageError("--resume goes with --in-place and without deltas: the journal knows them")
    if not resume and not deltas:
        raise click.UsageError("expected at least one delta")
    if (output is None) != in_place:
        raise click.UsageError("expected either -o OUTPUT or --in-place")
    if in_place and force:
        raise click.UsageError("--force goes with -o OUTPUT")


def _print_applied(report: offline.ApplyReport, seconds: float) -> None:
    click.echo(f"output   {report.output}  {format_nbytes(report.target_nbytes)}")
    click.echo(f"base     {report.base}")
    click.echo(f"target   {report.target}")
    click.echo(f"policy   {report.policy_digest}")
    click.echo(f"deltas   {report.num_deltas}, {format_nbytes(report.delta_nbytes)}")
    click.echo(f"time     {format_seconds(seconds)}")


@click.command()
@click.argument("deltas", type=_DELTA, nargs=-1, required=True)
@click.option("-o", "--output", type=_OUTPUT, required=True, help="The delta to write.")
@_force_option
@_machine_options
@guarded
def fold(deltas: Sequence[Path], output: Path, force: bool, memory_nbytes: int, num_threads: int, as_json: bool) -> None:
    """Merge a chain of DELTAS, oldest first, into one. No checkpoint is needed."""
    report, seconds = _run(
        as_json,
        lambda meter: offline.fold_deltas(
            deltas, output, settings=_settings(memory_nbytes, num_threads), meter=meter, replace=force
        ),
    )
    emit({**_plain(report), "seconds": seconds}, as_json=as_json, human=lambda: _print_delta(report, seconds))


@click.command()
@click.argument("delta", type=_DELTA)
@click.option("--all", "show_all", is_flag=True, help="List every changed tensor, not only the first 20.")
@_machine_options
@guarded
def inspect(delta: Path, show_all: bool, memory_nbytes: int, num_threads: int, as_json: bool) -> None:
    """Say what DELTA holds, and compare every byte of it with its digests."""
    report, _ = _run(
        as_json, lambda meter: offline.inspect_delta(delta, settings=_settings(memory_nbytes, num_threads), meter=meter)
    )
    emit(_inspected(report), as_json=as_json, human=lambda: _print_inspected(report, show_all))


def _inspected(report: offline.InspectReport) -> dict[str, Any]:
    tensors = [
        {
            "name": row.name,
            "kind": row.kind,
            "base": str(row.base or ""),
            "target": str(row.target or ""),
            "num_sent": row.num_sent,
            "digest": row.target.digest if row.target else "",
        }
        for row in report.tensors
    ]
    files = [
        {"name": row.name, "nbytes": row.nbytes, "holds_tensors": row.holds_tensors, "carried": row.blob is not None}
        for row in report.files
    ]
    return {**_plain(report), "summary": _plain(report.summary), "tensors": tensors, "files": files}


def _print_inspected(report: offline.InspectReport, show_all: bool) -> None:
    _print_delta(report.summary, None)
    click.echo(f"policy   {report.policy_digest}")
    click.echo(
        f"encoding {report.encoding}, {report.num_payloads:,} payloads of {format_nbytes(report.payload_nbytes)} together"
    )
    click.echo()
    files = [
        (row.name, row.nbytes, "tensors" if row.holds_tensors else "carried" if row.blob is not None else "from base")
        for row in report.files
    ]
    print_table(("file", "bytes", "content"), files, title=f"gives a {report.layout}")
    rows = report.tensors if show_all else report.tensors[:20]
    if rows:
        click.echo()
        print_table(
            ("tensor", "kind", "dtype and shape", "sent"),
            [(row.name, row.kind, _shapes(row), row.num_sent) for row in rows],
        )
    if len(rows) < len(report.tensors):
        click.echo(f"and {len(report.tensors) - len(rows):,} more; --all lists them")


def _shapes(row: Any) -> str:
    sides = dict.fromkeys(str(state) for state in (row.base, row.target) if state is not None)
    return " to ".join(sides)


@click.command(epilog=_CHECKPOINT_HELP)
@click.argument("base", type=_CHECKPOINT)
@click.argument("deltas", type=_DELTA, nargs=-1, required=True)
@click.argument("new", type=_CHECKPOINT)
@_machine_options
@guarded
def verify(base: Path, deltas: Sequence[Path], new: Path, memory_nbytes: int, num_threads: int, as_json: bool) -> None:
    """Prove that DELTAS, oldest first, turn checkpoint BASE into NEW: every bit and every file. Writes nothing."""
    report, seconds = _run(
        as_json,
        lambda meter: offline.verify_deltas(base, deltas, new, settings=_settings(memory_nbytes, num_threads), meter=meter),
    )
    verdict = f"equal: {format_nbytes(report.nbytes)} compared in {format_seconds(seconds)}"
    emit(
        {**_plain(report), "seconds": seconds},
        as_json=as_json,
        human=lambda: click.echo(verdict if report.ok else f"not equal: {report.problem}"),
    )
    if not report.ok:
        fail_check()


def _plain(report: Any) -> dict[str, Any]:
    return {field: getattr(report, field) for field in report.__struct_fields__}


COMMANDS: tuple[click.Command, ...] = (diff, apply, fold, inspect, verify)
"""What the program adds to itself."""
