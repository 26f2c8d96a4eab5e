"""Every record store passes the one suite, and the control plane works on each."""

from __future__ import annotations

import itertools
import shutil
import socket
import subprocess

import pytest
from obstore.store import MemoryStore, S3Store

from deltarefit.control import (
    EtcdRecordStore,
    MemoryRecordStore,
    ObjectRecordStore,
    SqliteRecordStore,
    probe_conditional_writes,
)
from deltarefit.errors import TransportError
from deltarefit.runtime.clock import Deadline, SystemClock
from deltarefit.testing.control_suite import ControlPlaneTests, ProcessRaceTests, RecordStoreTests

RECORDS = itertools.count()


class TestMemory(RecordStoreTests, ControlPlaneTests):
    @pytest.fixture
    def open_handle(self):
        store = MemoryRecordStore()
        return lambda: store


class TestSqlite(RecordStoreTests, ControlPlaneTests):
    @pytest.fixture
    def open_handle(self, tmp_path):
        return lambda: SqliteRecordStore(tmp_path / "run" / "control.db", busy_timeout_s=30.0)


@pytest.mark.process
class TestSqliteProcesses(ProcessRaceTests):
    @pytest.fixture
    def open_handle(self, tmp_path):
        return lambda: SqliteRecordStore(tmp_path / "control.db", busy_timeout_s=30.0)

    @pytest.fixture
    def recipe(self, tmp_path):
        return {"kind": "sqlite", "path": str(tmp_path / "control.db")}


class TestObjectInMemory(RecordStoreTests, ControlPlaneTests):
    @pytest.fixture
    def open_handle(self):
        store = MemoryStore()
        return lambda: ObjectRecordStore(store, "run/control.json")


@pytest.mark.process
class TestS3(RecordStoreTests, ControlPlaneTests, ProcessRaceTests):
    """A real server. Losers of a race on one key wait there for seconds (research/infra.md section 2), hence fewer racers."""

    num_processes = 6

    @pytest.fixture
    def recipe(self, s3_server):
        return {
            "kind": "s3",
            "bucket": s3_server.bucket,
            "options": s3_server.options,
            "key": f"control-{next(RECORDS)}/control.json",
        }

    @pytest.fixture
    def open_handle(self, s3_server, recipe):
        store = S3Store(s3_server.bucket, config=s3_server.options, client_options={"allow_http": True})
        return lambda: ObjectRecordStore(store, recipe["key"])

    def test_the_server_honours_conditions(self, s3_server):
        store = S3Store(s3_server.bucket, config=s3_server.options, client_options={"allow_http": True})
        probe_conditional_writes(store, f"probe-{next(RECORDS)}")


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


@pytest.mark.process
class TestEtcd(RecordStoreTests, ControlPlaneTests, ProcessRaceTests):
    @pytest.fixture
    def recipe(self, etcd_endpoint):
        return {"kind": "etcd", "endpoints": [etcd_endpoint], "key": f"deltarefit/run-{next(RECORDS)}/control"}

    @pytest.fixture
    def open_handle(self, recipe):
        return lambda: EtcdRecordStore(recipe["endpoints"], recipe["key"])
