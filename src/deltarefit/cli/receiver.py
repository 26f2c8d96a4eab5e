"""The ``receiver`` command: stands beside a serving engine on its node and keeps it at the run's committed version."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import click

from deltarefit.cli._output import guarded

__all__ = ["receiver"]


@click.command()
@click.option("--run", "run", required=True, help="The run's URL, as the trainer names it.")
@click.option("--engine", "engine", required=True, help="The server's address on this node, such as http://127.0.0.1:8000.")
@click.option("--name", default=None, help="The receiver's name in reports; default: a fresh one.")
@click.option(
    "--in-flight",
    type=click.Choice(["wait", "keep", "abort"]),
    default="wait",
    show_default=True,
    help="What becomes of running requests when a refit begins.",
)
@click.option(
    "--key-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=None,
    help="A file with the run's secret, if it has one.",
)
@click.option("--verify-writes", is_flag=True, help="Check every write after it was made.")
@click.option("--lease", "lease_s", type=float, default=10.0, show_default=True, help="Seconds; the trainer's lease_s.")
@guarded
def receiver(
    *, run: str, engine: str, name: str | None, in_flight: str, key_file: Path | None, verify_writes: bool, lease_s: float
) -> None:
    """Keep a running vLLM server at a run's committed policy version, until interrupted.

    Start the server with --weight-transfer-config '{"backend": "deltarefit"}' and VLLM_SERVER_DEV_MODE=1, from the checkpoint
    that the trainer started from.
    """
    import importlib

    from deltarefit.runtime.clock import SystemClock
    from deltarefit.runtime.receiver_agent import Receiver
    from deltarefit.runtime.settings import ReceiverAgentSettings

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    driver: Any = importlib.import_module("deltarefit.integrations.vllm").VllmEngine(
        engine, in_flight=in_flight, key_file=key_file, verify_writes=verify_writes
    )
    agent = Receiver(driver, run=run, name=name, settings=ReceiverAgentSettings(lease_s=lease_s))
    click.echo(f"receiver {agent.name} for {engine}, run {run}", err=True)
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        del number, frame
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    clock = SystemClock()
    version: int | None = None
    try:
        agent.start()
        while not stopping:
            clock.sleep(0.2)
            if agent.failure is not None:
                raise agent.failure
            if agent.policy_version != version:
                version = agent.policy_version
                click.echo(f"holds policy version {version}", err=True)
    finally:
        agent.close()
