"""The ``abort`` command."""

from __future__ import annotations

import click

from deltarefit.cli._output import emit, guarded, json_option

__all__ = ["abort"]


@click.command()
@click.option("--run", "run", required=True, help="The run's URL, as the trainer and the receivers name it.")
@click.option("--reason", required=True, help="Shown to whoever finds the refit stopped.")
@click.option(
    "--wait", "wait_s", type=click.FloatRange(0), default=60.0, show_default=True, help="Seconds to wait for the trainer."
)
@json_option
@guarded
def abort(*, run: str, reason: str, wait_s: float, as_json: bool) -> None:
    """Give up the refit that is under way in a run: it cannot be committed any more, from this moment on.

    The trainer's refit() then raises. Receivers that were already asked to close their request gate keep it closed until the
    next refit(), which sends every element.
    """
    from deltarefit.runtime.aborting import Aborted, abort_refit
    from deltarefit.runtime.clock import RandomIds, SystemClock

    done = abort_refit(run, reason, clock=SystemClock(), ids=RandomIds(), wait_s=wait_s)

    def human(shown: Aborted = done) -> None:
        click.echo(f"policy version {shown.policy_version} stays committed; {shown.attempt or 'no attempt'} cannot be any more")
        if not shown.is_ended:
            click.echo("no trainer has taken note yet: the next refit() will, or the next trainer that opens the run")
        if shown.repair:
            click.echo(f"the next refit() sends every element: {shown.repair}")

    emit(done, as_json=as_json, human=human)
