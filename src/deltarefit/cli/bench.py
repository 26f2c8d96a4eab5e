"""``deltarefit bench``: the measurements behind the claims, as tables or JSON."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import click

from deltarefit.cli._output import emit, guarded, json_option, print_table
from deltarefit.cli.bench_refit import refit

__all__ = ["bench"]


@click.group()
def bench() -> None:
    """Measure the codec and the kernels here. Ratios within one run are what counts; machines differ."""


def _show(result: Mapping[str, Any]) -> None:
    for title, rows in result.items():
        if isinstance(rows, list) and rows:
            columns = list(rows[0])
            print_table(columns, [[_cell(row.get(column)) for column in columns] for row in rows], title=title)
            click.echo()
        elif isinstance(rows, dict):
            print_table([title, ""], [[name, _cell(value)] for name, value in rows.items()])
        elif not isinstance(rows, list):
            click.echo(f"{title}: {rows}")


def _cell(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


def _bench_command(name: str, summary: str, module: str) -> click.Command:
    @click.command(name, help=summary)
    @json_option
    @guarded
    def command(*, as_json: bool) -> None:
        result = importlib.import_module(f"deltarefit.testing.{module}").run()
        emit(result, as_json=as_json, human=lambda: _show(result))

    return command


_BENCHES: Sequence[tuple[str, str, str]] = (
    (
        "codec",
        "Payload bytes: the paper's codec table, and our layout against the paper's and against the entropy floor.",
        "bench_codec",
    ),
    (
        "kernels",
        "Seconds of scan, owner side, receiver side, digest: against memcpy and against reading the input.",
        "bench_kernels",
    ),
    ("construct", "Seconds and bytes of building deltas: the paper's modes X, P and F, and ours.", "bench_construct"),
    ("offline", "Deltas between checkpoints beside zstd and xdelta3: bytes and seconds.", "bench_offline"),
    ("relay", "What a relay passes on per second of processor time, beside bare sockets and memcpy.", "bench_relay"),
    ("apply", "Compiled apply against the scratch-and-loader path, and its cost as the model grows.", "bench_apply"),
    ("peers", "The same refit by vLLM's own sparse weight patches: which parameters each leaves wrong.", "bench_vllm_sparse"),
)
for _name, _summary, _module in _BENCHES:
    bench.add_command(_bench_command(_name, _summary, _module))
bench.add_command(refit)
