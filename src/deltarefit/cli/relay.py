"""The ``relay`` command: one relay on a rollout node, until interrupted."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from types import FrameType

import click

from deltarefit.cli._output import NBYTES, format_nbytes, guarded, key_file_option
from deltarefit.cli._settings import gathered, settings_option

__all__ = ["relay"]

_FILE = click.Path(exists=True, dir_okay=False)


@click.command()
@click.option("--run", "run", required=True, help="The run's URL, as the trainer names it.")
@click.option(
    "--listen", default="127.0.0.1:0", show_default=True, help="HOST:PORT to listen on; port 0 lets the system choose."
)
@click.option("--advertise", default=None, help="HOST or HOST:PORT by which trainer and relays reach it, if that is another.")
@click.option("--shared-directory", default=None, help="The same as that of the node's receivers; default: /dev/shm.")
@click.option("--max-size", "max_nbytes", type=NBYTES, default=None, help="Most payload bytes kept; default: 8 GiB.")
@key_file_option
@click.option("--tls-authority", type=_FILE, default=None, help="PEM: who signed the certificates of trainer and relays.")
@click.option("--tls-certificate", type=_FILE, default=None, help="PEM: this relay's certificate, with its chain.")
@click.option("--tls-key", type=_FILE, default=None, help="PEM: its private key.")
@click.option("--lease", "lease_s", type=float, default=None, help="Seconds; the trainer's lease_s; default: 10.")
@settings_option("relay")
@guarded
def relay(
    *,
    run: str,
    listen: str,
    advertise: str | None,
    shared_directory: str | None,
    max_nbytes: int | None,
    key_file: Path | None,
    tls_authority: str | None,
    tls_certificate: str | None,
    tls_key: str | None,
    lease_s: float | None,
    settings_file: Path | None,
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
    options = {
        "shared_directory": shared_directory,
        "max_nbytes": max_nbytes,
        "lease_s": lease_s,
        "relay_tls_authority": tls_authority,
        "relay_tls_certificate": tls_certificate,
        "relay_tls_key": tls_key,
    }
    settings = gathered(RelayServiceSettings, "relay", settings_file, options)
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
