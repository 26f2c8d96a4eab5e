"""What all tests share: the fast ones come first, and no test is judged by how long an example took."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess

import pytest
from hypothesis import HealthCheck, settings

from deltarefit.control import EtcdRecordStore
from deltarefit.errors import TransportError
from deltarefit.runtime.clock import Deadline, SystemClock

# Machines are shared and noisy, so an example has no deadline; pytest's own timeout ends what hangs. In continuous integration
# the same examples run each time: a failure there is a failure everywhere.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what is fast first, so that a broken change shows early."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture(scope="module")
def etcd_endpoint(tmp_path_factory):
    """A real etcd of one member. Skips only where Debian's etcd-server is not installed."""
    etcd = shutil.which("etcd")
    if etcd is None:
        pytest.skip("etcd-server is not installed")
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        client, peer = (f"http://127.0.0.1:{one.getsockname()[1]}" for one in (first, second))
    folder = tmp_path_factory.mktemp("etcd")
    arguments = [
        etcd, "--name", "t", "--data-dir", str(folder / "data"), "--listen-client-urls", client, "--advertise-client-urls",
        client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"t={peer}",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, start_new_session=True)
    try:
        clock = SystemClock()
        deadline = Deadline(clock, 60.0)
        while True:
            try:
                EtcdRecordStore([client], "ready").read()
                break
            except TransportError as error:
                if process.poll() is not None or deadline.expired:
                    raise RuntimeError(f"etcd is not ready: {(folder / 'log').read_text()[-2000:]}") from error
                clock.sleep(0.1)
        yield client
    finally:
        process.kill()
        process.wait(20)
