"""The ``relay`` command: one relay on a rollout node, until interrupted."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from types import FrameType

import click

from deltarefit.cli._output import NBYTES, format_nbytes, guarded, key_file_option

__all__ = ["relay"]

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command()
@click.option("--run", "run", required=True, help="The run's URL, as the trainer names it.")
@click.option(
    "--listen", default="127.0.0.1:0", show_default=True, help="HOST:PORT to listen on; port 0 lets the system choose."
)
@click.option("--advertise", default=None, help="HOST or HOST:PORT by which trainer and relays reach it, if that is another.")
@click.option("--shared-directory", default="/dev/shm", show_default=True, help="The same as that of the node's receivers.")
@click.option("--max-size", "max_nbytes", type=NBYTES, default=8 << 30, help="Most payload bytes kept; default: 8 GiB.")
@key_file_option
@click.option("--tls-authority", type=_FILE, default=None, help="PEM: who signed the certificates of trainer and relays.")
@click.option("--tls-certificate", type=_FILE, default=None, help="PEM: this relay's certificate, with its chain.")
@click.option("--tls-key", type=_FILE, default=None, help="PEM: its private key.")
@click.option("--lease", "lease_s", type=float, default=10.0, show_default=True, help="Seconds; the trainer's lease_s.")
@guarded
def relay(
    *,
    run: str,
    listen: str,
    advertise: str | None,
    shared_directory: str,
    max_nbytes: int,
    key_file: Path | None,
    tls_authority: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    lease_s: float,
) -> None:
    """Take payloads for the engines of this node, and pass them on to the run's other relays, until interrupted.

    With one relay on each rollout node, every payload crosses from the training to the rollout cluster once, however many nodes
    there are; the trainer finds relays under the run by itself. Give the run a key, or use TLS, unless the network is private.
    """
    from deltarefit.run_key import read_key
    from deltarefit.runtime.clock import SystemClock
    from deltarefit.runtime.relay_service import RelayService
    from deltarefit.runtime.settings import RelayServiceSettings

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    settings = RelayServiceSettings(
        shared_directory=shared_directory,
        max_nbytes=max_nbytes,
        lease_s=lease_s,
        relay_tls_authority=str(tls_authority or ""),
        relay_tls_certificate=str(tls_certificate or ""),
        relay_tls_key=str(tls_key or ""),
    )
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        del number, frame
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    key = read_key(key_file) if key_file is not None else None
    clock = SystemClock()
    with RelayService(run, listen=listen, advertise=advertise, key=key, settings=settings) as service:
        click.echo(f"{service.peer} for run {run}, node {service.node}", err=True)
        told = 0
        while not stopping:
            clock.sleep(0.2)
            if service.received_nbytes != told:
                told = service.received_nbytes
                logging.getLogger(__name__).debug("received %s so far", format_nbytes(told))
        click.echo(f"received {service.received_nbytes} payload bytes, passed on {service.forwarded_nbytes}", err=True)
