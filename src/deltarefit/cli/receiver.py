"""The ``receiver`` command: stands beside a serving engine on its node and keeps it at the run's committed version.

``receiver restore`` has one that runs already place its engine anew.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from deltarefit.cli._output import emit, fail_check, guarded, json_option, key_file_option
from deltarefit.cli._settings import gathered, settings_option

if TYPE_CHECKING:
    from deltarefit.runtime.settings import ReceiverAgentSettings

__all__ = ["receiver"]

_IN_FLIGHT: Mapping[str, tuple[str, ...]] = {"vllm": ("wait", "keep", "abort"), "sglang": ("retract", "abort", "in_place")}
"""What each engine can do with running requests, its default first."""
_ASK_S = 30.0


@click.group(invoke_without_command=True)
@click.option("--run", "run", help="The run's URL, as the trainer names it.")
@click.option("--engine", "engine", help="The server's address on this node, such as http://127.0.0.1:8000.")
@click.option("--name", default=None, help="The receiver's name in reports; default: a fresh one.")
@click.option(
    "--kind",
    type=click.Choice(["auto", *_IN_FLIGHT]),
    default="auto",
    show_default=True,
    help="Which server it is; auto asks it.",
)
@click.option(
    "--in-flight",
    type=click.Choice(sorted({mode for modes in _IN_FLIGHT.values() for mode in modes})),
    default=None,
    help="What becomes of running requests when a refit begins. vLLM: wait (default), keep, abort. SGLang: retract (default), "
    "abort, in_place.",
)
@key_file_option
@click.option("--verify-writes", is_flag=True, help="Check every write after it was made.")
@click.option("--keep-drafts", is_flag=True, help="Leave speculative drafts as they were loaded.")
@click.option("--lease", "lease_s", type=float, default=None, help="Seconds; the trainer's lease_s; default: 10.")
@click.option("--shared-directory", default=None, help="The same as that of the node's relay; default: /dev/shm.")
@click.option("--request-timeout", "request_timeout_s", type=float, default=None, help="Seconds to wait for running requests.")
@click.option("--event-directory", default=None, help="Where to append every stage that ran as a JSON line.")
@click.option("--metrics-address", default=None, help="HOST:PORT on which to answer GET /metrics for Prometheus.")
@settings_option("receiver")
@click.pass_context
@guarded
def receiver(
    context: click.Context,
    /,
    *,
    run: str | None,
    engine: str | None,
    name: str | None,
    kind: str,
    in_flight: str | None,
    key_file: Path | None,
    verify_writes: bool,
    keep_drafts: bool,
    settings_file: Path | None,
    **options: Any,
) -> None:
    """Keep a running vLLM or SGLang server at a run's committed policy version, until interrupted.

    Start the server from the checkpoint that the trainer started from, or from a later one. vLLM: with --weight-transfer-config
    '{"backend": "deltarefit"}' and VLLM_SERVER_DEV_MODE=1. SGLang: with --custom-weight-loader
    deltarefit.integrations.sglang.receive.
    """
    if context.invoked_subcommand is not None:
        return
    if run is None or engine is None:
        raise click.UsageError("--run and --engine are needed")
    from deltarefit.runtime.settings import ReceiverAgentSettings

    settings = gathered(ReceiverAgentSettings, "receiver", settings_file, options)
    drivers = {"key_file": key_file, "verify_writes": verify_writes}
    _keep(run, _driver(engine, kind, in_flight, drivers, keep_drafts=keep_drafts), engine, name, settings)


def _driver(engine: str, kind: str, in_flight: str | None, options: Mapping[str, Any], *, keep_drafts: bool) -> Any:
    import importlib

    from deltarefit.errors import RejectedError

    found = _kind_of(engine) if kind == "auto" else kind
    modes = _IN_FLIGHT[found]
    chosen = in_flight if in_flight is not None else modes[0]
    if chosen not in modes:
        raise RejectedError(f"--in-flight {chosen} with a {found} server: expected one of {', '.join(modes)}")
    room: Any = importlib.import_module(f"deltarefit.integrations.{found}")
    driver: Any = room.SglangEngine if found == "sglang" else room.VllmEngine
    return driver(engine, in_flight=chosen, refit_drafts=not keep_drafts, **options)


def _kind_of(engine: str) -> str:
    """Only SGLang's servers have this route."""
    import importlib

    from deltarefit.errors import RejectedError

    server: Any = importlib.import_module("deltarefit.integrations.exchange").JsonServer(
        engine, timeout_s=_ASK_S, if_missing="it is no SGLang server"
    )
    try:
        server.ask("GET", "/model_info")
    except RejectedError:
        return "vllm"
    return "sglang"


def _keep(run: str, driver: Any, engine: str, name: str | None, settings: ReceiverAgentSettings) -> None:
    from deltarefit.runtime.clock import SystemClock
    from deltarefit.runtime.receiver_agent import Receiver

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    agent = Receiver(driver, run=run, name=name, settings=settings)
    click.echo(f"receiver {agent.name} for {engine}, run {run}", err=True)
    if agent.observers.metrics_address:
        click.echo(f"metrics at http://{agent.observers.metrics_address}/metrics", err=True)
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


@receiver.command()
@click.option("--run", "run", required=True, help="The run's URL, as the trainer names it.")
@click.option("--name", required=True, help="The receiver's name, as 'deltarefit status' shows it.")
@click.option(
    "--wait", "wait_s", type=click.FloatRange(0), default=600.0, show_default=True, help="Seconds to wait for the receiver."
)
@key_file_option
@json_option
@guarded
def restore(*, run: str, name: str, wait_s: float, key_file: Path | None, as_json: bool) -> None:
    """Have a running receiver take nothing for granted that its engine holds, and bring it to the committed version.

    For engines whose weights may be damaged. It shuts its request gate, computes the digest of every tensor, catches up over
    retained payloads if that leads to the committed version, and serves once it has proved it. Otherwise the next refit() sends
    it what it lacks; exit code 1 says so. May be run from any machine that reaches the run.
    """
    from deltarefit.run_key import read_key
    from deltarefit.runtime.clock import RandomIds, SystemClock
    from deltarefit.runtime.restoring import Restoration, restore_receiver

    key = None if key_file is None else read_key(key_file)
    done = restore_receiver(run, name, clock=SystemClock(), ids=RandomIds(), wait_s=wait_s, key=key)

    def human(shown: Restoration = done) -> None:
        if shown.is_restored:
            click.echo(f"receiver {name} proved that it holds policy version {shown.policy_version}, and serves")
            return
        where = f" (it is at: {shown.activity})" if shown.activity else ""
        click.echo(
            f"receiver {name} did not reach policy version {shown.committed_version} from what it holds and what is retained"
            f"{where}; its request gate stays shut. The trainer's next refit() sends it what it lacks"
        )

    emit(done, as_json=as_json, human=human)
    if not done.is_restored:
        fail_check()
