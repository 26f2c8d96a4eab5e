"""The ``demo`` command."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from deltarefit.cli._output import EXIT_FAILED, emit, format_nbytes, guarded, json_option, print_table
from deltarefit.cli.demo.ending import Ending, workplace
from deltarefit.cli.demo.engines import engine_or_fallback, ensure_source
from deltarefit.cli.demo.run import DemoOptions, DemoResult, Refit, run_demo

__all__ = ["demo"]

_STAGES = ("scan", "encode", "send", "fetch", "apply", "verify", "commit")


@click.command()
@click.option(
    "--engine",
    type=click.Choice(["auto", "vllm", "sglang", "torch"]),
    default="auto",
    show_default=True,
    help="The rollout engines: real vLLM, real SGLang, or a transformers model behind a loader that fuses and slices as "
    "engines do; auto takes the first that is installed.",
)
@click.option(
    "--source",
    type=click.Choice(["torch", "fsdp", "megatron"]),
    default="torch",
    show_default=True,
    help="The trainers: whole models, FSDP2 shards of 32-bit weights, or Megatron (where installed), experts over the ranks.",
)
@click.option(
    "--steps", type=click.IntRange(1, 1000), default=6, show_default=True, help="Training steps, each followed by a refit."
)
@click.option("--learning-rate", type=float, default=2e-6, show_default=True, help="RL runs use about 1e-6.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Where to work, and keep everything afterwards; default: a temporary directory that is removed.",
)
@click.option("--kill", is_flag=True, help="Kill one engine with SIGKILL in the middle of every other refit, and restart it.")
@json_option
@guarded
def demo(
    *, engine: str, source: str, steps: int, learning_rate: float, directory: Path | None, kill: bool, as_json: bool
) -> None:
    """Train a tiny model with RL and refit real rollout engines after each step, checking every bit.

    Two trainer ranks (torch.distributed) hold a tiny Qwen3-MoE, whole or in shards. Two rollout engines generate completions,
    which are rewarded and trained on; after each optimizer step only the changed bits travel. Every engine is then compared,
    byte for byte, with a fresh load of the same weights. Once, a payload is damaged in transit, and the refit recovers. With
    --kill an engine dies in every other refit: that refit goes on with the others, and the restarted engine gets what it lacks
    in the next one.
    """
    ensure_source(source)
    chosen, note = engine_or_fallback(engine)
    if note:
        click.echo(note, err=True)
    with Ending() as ending, workplace(directory) as home:
        options = DemoOptions(
            engine=chosen,
            source=source,
            steps=steps,
            learning_rate=learning_rate,
            directory=home,
            corrupt_step=min(3, steps),
            kill=kill,
        )
        result = run_demo(options, chosen, note, lambda line: click.echo(line, err=True), ending)
    emit(msgspec.to_builtins(result), as_json=as_json, human=lambda: _show(result))
    if not result.bit_equal:
        sys.exit(EXIT_FAILED)


def _show(result: DemoResult) -> None:
    columns = [
        "refit",
        "reward",
        "changed",
        "payload",
        "x smaller",
        *(f"{stage} s" for stage in _STAGES),
        "total s",
        "attempts",
        "bit-equal",
        *(["killed", "rejoined"] if result.kills else []),
    ]
    click.echo()
    print_table(columns, [_row(refit, shows_kills=bool(result.kills)) for refit in result.refits])
    click.echo()
    click.echo(_conclusion(result))


def _row(refit: Refit, *, shows_kills: bool) -> list[object]:
    smaller = refit.checkpoint_nbytes / refit.payload_nbytes if refit.payload_nbytes else float("inf")
    return [
        refit.policy_version,
        f"{refit.reward:.3f}",
        f"{refit.changed_fraction:.2%}",
        format_nbytes(refit.payload_nbytes),
        f"{smaller:.1f}",
        *(f"{refit.stage_s.get(stage, 0.0):.3f}" for stage in _STAGES),
        f"{refit.refit_s:.2f}",
        refit.attempts,
        "yes" if refit.bit_equal else "NO",
        *([refit.killed or "-", ", ".join(refit.rejoined) or "-"] if shows_kills else []),
    ]


def _conclusion(result: DemoResult) -> str:
    count = len(result.refits)
    first = result.refits[0]
    if not result.bit_equal:
        wrong = [refit.policy_version for refit in result.refits if not refit.bit_equal]
        return f"FAILED: refits {wrong} did not leave the bits of a full reload."
    repaired = [refit.policy_version for refit in result.refits if refit.payload_damaged]
    recovery = f"; refit {repaired[0]}, whose payload was damaged in transit, was repaired by overwrites" if repaired else ""
    if result.kills:
        recovery += f"; {result.kills} engines were killed in the middle of a refit, and {result.rejoins} came back"
    return (
        f"All {count} refits left every engine with exactly the bits of a full reload ({first.compared_tensors} parameters and "
        f"buffers compared per engine), and generating as a freshly loaded one does{recovery}."
    )
