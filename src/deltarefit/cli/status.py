"""The ``status`` command."""

from __future__ import annotations

import click

from deltarefit.cli._output import emit, format_seconds, guarded, json_option, print_table

__all__ = ["status"]


@click.command()
@click.option("--run", "run", required=True, help="The run's URL, as the trainer and the receivers name it.")
@click.option("--look", "look_s", type=float, default=None, help="Seconds to look for signs of life; default: half a lease.")
@click.option("--watch", "is_watching", is_flag=True, help="Follow the refit under way until interrupted.")
@click.option("--for", "for_s", type=click.FloatRange(0), default=None, help="With --watch: stop after so many seconds.")
@json_option
@guarded
def status(*, run: str, look_s: float | None, is_watching: bool, for_s: float | None, as_json: bool) -> None:
    """Show who takes part in a run, which policy version is committed, and which attempt is under way."""
    from deltarefit.runtime.clock import RandomIds, SystemClock
    from deltarefit.runtime.status import RunStatus, read_status

    if is_watching:
        from deltarefit.cli.watching import watch
        from deltarefit.runtime.progress_view import RunView

        watch(RunView(run, clock=SystemClock(), ids=RandomIds()), SystemClock(), as_json=as_json, for_s=for_s)
        return
    found = read_status(run, clock=SystemClock(), ids=RandomIds(), watch_s=look_s)

    def human(shown: RunStatus = found) -> None:
        click.echo(f"policy version {shown.policy_version} is committed (digest {shown.policy_digest or 'unknown'})")
        alive = "alive" if shown.coordinator_is_alive else "no sign of life"
        click.echo(
            f"coordinator: {shown.coordinator or 'none'}" + (f", epoch {shown.epoch}, {alive}" if shown.coordinator else "")
        )
        if shown.activity:
            click.echo(f"it is at: {shown.activity} (for {format_seconds(shown.activity_s)})")
        if shown.attempt:
            click.echo(f"attempt: {shown.attempt} ({shown.attempt_mode}), required: {', '.join(shown.required) or 'none'}")
        elif shown.num_attempts:
            click.echo(f"a refit is unfinished after {shown.num_attempts} attempts; none is bound now")
        if shown.retained_from is not None:
            click.echo(f"receivers can catch up by themselves from version {shown.retained_from}")
        if shown.repair:
            click.echo(f"the next refit sends every element: {shown.repair}")
        if shown.abort:
            click.echo(f"an abort was asked for: {shown.abort}")
        if not shown.receivers:
            click.echo("no receivers")
            return
        columns = ["receiver", "engine", "alive", "ready", "serving", "holds version", "doing"]
        rows = [
            [
                r.receiver,
                r.engine,
                "yes" if r.is_alive else "NO",
                "yes" if r.is_ready else "no",
                "yes" if r.is_serving else "no",
                "-" if r.policy_version is None else str(r.policy_version),
                f"refuses: {r.refusal}" if r.refusal else r.activity,
            ]
            for r in shown.receivers
        ]
        print_table(columns, rows)

    emit(found, as_json=as_json, human=human)
