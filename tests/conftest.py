"""What all tests share: the fast ones come first, and no test is judged by how long an example took."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

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


@pytest.fixture(autouse=True)
def no_mode_of_torch_is_left():
    """A default device that a test leaves set goes between every later test and torch: calls then happen twice."""
    before = _torch_modes()
    yield
    assert _torch_modes() == before, "torch has another number of function modes than before: torch.set_default_device(None)?"


def _torch_modes() -> int:
    torch = sys.modules.get("torch")
    return torch._C._len_torch_function_stack() if torch is not None else 0


@pytest.fixture
def open_directory():
    """An empty directory that other users can reach; pytest's own they can't."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


@pytest.fixture
def other_user():
    """Within ``with other_user():`` files' permissions hold for this process, even if it is the superuser's."""

    @contextmanager
    def become():
        uid = os.geteuid()
        if not uid:
            os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(uid)

    return become


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


@pytest.fixture
def loop():
    """An event loop that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class CannedServer(ThreadingHTTPServer):
    """Answers a path, whatever is posted, with what ``answers`` has for it, else with ``otherwise``: a status and a body."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.otherwise = (200, b"{}")
        self.asked: list[tuple[str, object]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: CannedServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.path, json.loads(body or b"null")))
        status, answer = self.server.answers.get(self.path.partition("?")[0], self.server.otherwise)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST

    def log_message(self, *args) -> None:
        """Quiet."""


@pytest.fixture
def canned_server():
    with CannedServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
