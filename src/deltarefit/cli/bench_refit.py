"""``deltarefit bench refit``: whole refits over a shaped link, against the full checkpoint over the same link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from deltarefit.cli._output import NBYTES, emit, guarded, json_option, print_table

__all__ = ["refit"]

_SHOWN = (
    "transport", "mode", "nodes", "change_rate", "refit_s", "reference_s", "speedup", "payload_nbytes", "cross_nbytes",
    "transport_share", "construction_s", "apply_s", "finalization_s", "pause_s",
)  # fmt: skip


def _numbers(kind: type) -> Any:
    def parse(ctx: click.Context, param: click.Parameter, value: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in value.split(","))
        except ValueError as error:
            raise click.BadParameter(f"{value!r}: {error}") from error

    return parse


@click.command()
@click.option("--model-size", "model_nbytes", type=NBYTES, default=512 << 20, help="Of the bf16 checkpoint; default: 512 MiB.")
@click.option("--link-mbit", type=float, default=200.0, show_default=True, help="Rate of the link; 0: loopback, no namespaces.")
@click.option("--round-trip-ms", type=float, default=60.0, show_default=True, help="Of the link.")
@click.option("--rates", callback=_numbers(float), default="0.01,0.03,0.05", show_default=True, help="Fractions that change.")
@click.option("--nodes", callback=_numbers(int), default="1", show_default=True, help="Numbers of rollout nodes.")
@click.option("--transports", callback=_numbers(str), default="relay,object_store", show_default=True)
@click.option("--modes", callback=_numbers(str), default="synchronous", show_default=True, help="synchronous, asynchronous.")
@click.option("--refits", type=click.IntRange(1), default=3, show_default=True, help="Timed refits per row.")
@click.option("--warmups", type=click.IntRange(0), default=1, show_default=True, help="Refits before them.")
@click.option("--events", type=click.Path(path_type=Path, file_okay=False), default=None, help="Keep the event files here.")
@json_option
@guarded
def refit(
    *,
    model_nbytes: int,
    link_mbit: float,
    round_trip_ms: float,
    rates: tuple[float, ...],
    nodes: tuple[int, ...],
    transports: tuple[str, ...],
    modes: tuple[str, ...],
    refits: int,
    warmups: int,
    events: Path | None,
    as_json: bool,
) -> None:
    """Refit engines across a long, thin link and compare with sending the full checkpoint. Needs root, or --link-mbit 0."""
    from deltarefit.testing.bench_refit import RefitBench, run

    bench = RefitBench(
        model_nbytes=model_nbytes,
        link_mbit=link_mbit,
        round_trip_ms=round_trip_ms,
        rates=rates,
        nodes=nodes,
        transports=transports,
        modes=modes,
        warmups=warmups,
        refits=refits,
        event_directory=str(events.resolve()) if events is not None else "",
    )
    result = run(bench, progress=lambda text: click.echo(text, err=True))
    emit(result, as_json=as_json, human=lambda: _show(result))


def _show(result: dict[str, Any]) -> None:
    rows = [[_cell(row[column]) for column in _SHOWN] for row in result["rows"]]
    print_table(list(_SHOWN), rows, title=f"checkpoint of {result['checkpoint_nbytes'] / 2**20:.0f} MiB")


def _cell(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value
