"""Every record store passes the one suite, and the control plane works on each."""

from __future__ import annotations

import itertools

import pytest
from obstore.store import MemoryStore, S3Store

from deltarefit.control import (
    EtcdRecordStore,
    MemoryRecordStore,
    ObjectRecordStore,
    SqliteRecordStore,
    probe_conditional_writes,
)
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
    """A real server. Losers of a race on one key wait there for seconds, hence fewer racers."""

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


@pytest.mark.process
class TestEtcd(RecordStoreTests, ControlPlaneTests, ProcessRaceTests):
    @pytest.fixture
    def recipe(self, etcd_endpoint):
        return {"kind": "etcd", "endpoints": [etcd_endpoint], "key": f"deltarefit/run-{next(RECORDS)}/control"}

    @pytest.fixture
    def open_handle(self, recipe):
        return lambda: EtcdRecordStore(recipe["endpoints"], recipe["key"])
