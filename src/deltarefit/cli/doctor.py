"""The ``doctor`` command."""

from __future__ import annotations

import click

from deltarefit.cli._output import emit, fail_check, guarded, json_option, print_table

__all__ = ["doctor"]


@click.command()
@click.option("--run", "run", help="The run's URL, as the trainer and the receivers name it.")
@click.option(
    "--engine",
    "engine",
    type=click.Choice(["auto", "vllm", "sglang", "torch"]),
    help="Try tiny models of an engine that is installed here instead; auto: the first of vLLM, SGLang and plain torch.",
)
@click.option("--lease", "lease_s", type=float, default=10.0, show_default=True, help="The lease_s that the run uses.")
@click.option("--watch", "watch_s", type=click.FloatRange(0.1), default=3.0, show_default=True, help="Seconds to watch clocks.")
@json_option
@guarded
def doctor(*, run: str | None, engine: str | None, lease_s: float, watch_s: float, as_json: bool) -> None:
    """Check, from this machine, all that a run's place must be able to do: permissions, conditional writes, clocks, room.

    Writes and removes scratch objects under the run's URL; a run in use is not disturbed. With --engine: what of an engine's
    models and quantisations can be refitted in place, by refitting tiny ones and comparing them with fresh loads; takes a
    minute or two. Exit code 1 if something is missing that refits need, or a refit was not exact.
    """
    if (run is None) == (engine is None):
        raise click.UsageError("either --run or --engine is needed")
    if engine is not None:
        _try_engine(engine, as_json=as_json)
    if run is not None:
        _examine(run, lease_s, watch_s, as_json=as_json)


def _examine(run: str, lease_s: float, watch_s: float, *, as_json: bool) -> None:
    from deltarefit.runtime.clock import RandomIds, SystemClock
    from deltarefit.runtime.doctor import Diagnosis, examine

    found = examine(run, clock=SystemClock(), ids=RandomIds(), watch_s=watch_s, lease_s=lease_s)

    def human(shown: Diagnosis = found) -> None:
        rows = [
            [check.name, check.status if check.status == "ok" else check.status.upper(), check.found] for check in shown.checks
        ]
        print_table(["check", "status", "found"], rows)
        for check in shown.checks:
            if check.advice:
                click.echo(f"{check.name}: {check.advice}")

    emit(found, as_json=as_json, human=human)
    if not found.ok:
        fail_check()


def _try_engine(engine: str, *, as_json: bool) -> None:
    from deltarefit.cli.conformance.rows import HEADINGS, Row, columns_of
    from deltarefit.cli.conformance.run import installed_engine, run_engine

    found = installed_engine() if engine == "auto" else engine

    def say(row: Row) -> None:
        click.echo(f"{row.engine}, {row.model}, {row.quantisation}: {columns_of(row)[-1]}", err=True)

    measured = run_engine(found, say)

    def human() -> None:
        print_table(HEADINGS, [columns_of(row) for row in measured.rows])
        for missing in measured.left_out:
            click.echo(str(missing))

    emit({"rows": measured.rows, "left_out": measured.left_out}, as_json=as_json, human=human)
    if not measured.is_sound:
        fail_check()
