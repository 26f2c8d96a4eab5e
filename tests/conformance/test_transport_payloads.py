"""Every transport passes the shipped suite."""

from __future__ import annotations

import itertools

import pytest

from deltarefit.runtime.clock import SystemClock
from deltarefit.testing.transport_suite import TransportEnds, TransportTests
from deltarefit.transport import (
    LimitedSender,
    LoggingSender,
    MemoryTransport,
    ObjectStoreSender,
    ObjectStoreSource,
    RetryingSender,
    RunStore,
    StoreSettings,
    keys,
    open_run,
)

SETTINGS = StoreSettings(part_nbytes=5 << 20)
RUN = itertools.count()


def object_store_ends(store: RunStore) -> TransportEnds:
    def leftovers(attempt):
        found = [info.key for info in store.listing(keys.attempt_prefix(attempt))]
        if store.directory is not None:
            folder = store.directory / keys.attempt_prefix(attempt)
            found += [str(path) for path in folder.rglob("*")] + ([str(folder)] if folder.exists() else [])
        return found

    return TransportEnds(ObjectStoreSender(store), ObjectStoreSource(store), leftovers)


class TestMemoryTransport(TransportTests):
    @pytest.fixture
    def ends(self):
        transport = MemoryTransport()
        return TransportEnds(transport, transport, lambda attempt: [p for p in transport.stored() if p.attempt == attempt])


class TestWrappedMemoryTransport(TransportTests):
    """The wrappers keep the contract."""

    @pytest.fixture
    def ends(self):
        transport = MemoryTransport()
        sender = RetryingSender(transport, clock=SystemClock())
        sender = LoggingSender(LimitedSender(sender, max_inflight_nbytes=100_000), clock=SystemClock())
        return TransportEnds(sender, transport, lambda attempt: [p for p in transport.stored() if p.attempt == attempt])


class TestFiles(TransportTests):
    @pytest.fixture
    def ends(self, tmp_path):
        return object_store_ends(open_run(f"file://{tmp_path}/run", clock=SystemClock(), settings=SETTINGS))


class TestMemoryStore(TransportTests):
    @pytest.fixture
    def ends(self):
        return object_store_ends(open_run(f"memory://payloads-{next(RUN)}", clock=SystemClock(), settings=SETTINGS))


@pytest.mark.process
class TestS3(TransportTests):
    @pytest.fixture
    def ends(self, s3_server):
        url = s3_server.run_url(f"payloads-{next(RUN)}")
        return object_store_ends(open_run(url, clock=SystemClock(), settings=SETTINGS, options=s3_server.options))
