"""The ``doctor`` command."""

from __future__ import annotations

import click

from deltarefit.cli._output import emit, fail_check, guarded, json_option, print_table

__all__ = ["doctor"]


@click.command()
@click.option("--run", "run", required=True, help="The run's URL, as the trainer and the receivers name it.")
@click.option("--lease", "lease_s", type=float, default=10.0, show_default=True, help="The lease_s that the run uses.")
@click.option("--watch", "watch_s", type=click.FloatRange(0.1), default=3.0, show_default=True, help="Seconds to watch clocks.")
@json_option
@guarded
def doctor(*, run: str, lease_s: float, watch_s: float, as_json: bool) -> None:
    """Check, from this machine, all that a run's place must be able to do: permissions, conditional writes, clocks, room.

    Writes and removes scratch objects under the run's URL; a run in use is not disturbed. Exit code 1 if something is missing
    that refits need.
    """
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
