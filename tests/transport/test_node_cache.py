"""The node cache: one download per node, and never a worse result than without it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deltarefit.errors import PayloadInvalidError, PayloadMissingError, RejectedError
from deltarefit.ids import OwnerId, PayloadId, attempt_id
from deltarefit.runtime.clock import ManualClock, SystemClock
from deltarefit.testing.transport_suite import TransportEnds, TransportTests
from deltarefit.transport import MemoryTransport, PayloadEntry
from deltarefit.transport.node_cache import NodeCache, shared_directory

ATTEMPT = attempt_id(1, 1, "00000000")
NEXT = attempt_id(2, 1, "00000000")


def payload(sequence=0, attempt=ATTEMPT):
    return PayloadId(attempt, sequence, OwnerId(0))


def get(source, payload_id, data):
    entry = PayloadEntry.of(payload_id, data)
    return source.fetch(payload_id, nbytes=entry.nbytes, digest=entry.digest)


@pytest.fixture
def transport():
    return MemoryTransport()


class TestNodeCache(TransportTests):
    """A cache of its own per fetch would prove nothing: this one is asked through two engines in turn."""

    @pytest.fixture
    def ends(self, transport, tmp_path):
        class TwoEngines:
            def __init__(self):
                self.engines = [NodeCache(transport, tmp_path, clock=SystemClock()) for _ in range(2)]
                self.turn = 0

            def fetch(self, payload_id, *, nbytes, digest):
                self.turn += 1
                return self.engines[self.turn % 2].fetch(payload_id, nbytes=nbytes, digest=digest)

        class Sender:
            send = staticmethod(transport.send)
            stop_and_wait = staticmethod(transport.stop_and_wait)

            @staticmethod
            def cleanup(attempt):
                transport.cleanup(attempt)
                source.engines[0].forget(attempt)

        source = TwoEngines()

        def leftovers(attempt):
            return [p for p in transport.stored() if p.attempt == attempt] + list(tmp_path.glob(f"{attempt}/**/*"))

        return TransportEnds(Sender(), source, leftovers)


def test_engines_share_one_download(transport, tmp_path):
    engines = [NodeCache(transport, tmp_path, clock=SystemClock()) for _ in range(4)]
    data = [bytes([n]) * 10_000 for n in range(6)]
    for n, each in enumerate(data):
        transport.send(payload(n), each)
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda engine: [get(engine, payload(n), each) for n, each in enumerate(data)], engines))
    assert got == [data] * 4
    assert sum(engine.downloaded for engine in engines) == 6
    assert sum(engine.shared for engine in engines) == 18


def test_without_the_lock_each_would_download(transport, tmp_path, monkeypatch):
    """The test above can fail: this is what it would see."""
    monkeypatch.setattr(NodeCache, "_wait_for_lock", lambda *_: None)
    barrier = threading.Barrier(4, timeout=30)

    class Slow:
        def fetch(self, payload_id, *, nbytes, digest):
            barrier.wait()
            return transport.fetch(payload_id, nbytes=nbytes, digest=digest)

    engines = [NodeCache(Slow(), tmp_path, clock=SystemClock()) for _ in range(4)]
    transport.send(payload(), b"x")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda engine: get(engine, payload(), b"x"), engines))
    assert sum(engine.downloaded for engine in engines) == 4


def test_damaged_shared_file_is_downloaded_again(transport, tmp_path, caplog):
    cache = NodeCache(transport, tmp_path, clock=SystemClock())
    transport.send(payload(), b"right")
    get(cache, payload(), b"right")
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix == ""]
    for damaged in (b"wrong", b"wrong length", b""):
        file.write_bytes(damaged)
        assert get(cache, payload(), b"right") == b"right"
        assert file.read_bytes() == b"right"
    assert caplog.text.count("is not used") == 3


def test_no_room_in_shared_memory_means_no_sharing_and_no_failure(transport, tmp_path, monkeypatch, caplog):
    cache = NodeCache(transport, tmp_path, clock=SystemClock())
    transport.send(payload(), b"data")

    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert get(cache, payload(), b"data") == b"data"
    assert get(cache, payload(), b"data") == b"data"
    assert cache.downloaded == 2
    assert "No space left" in caplog.text
    assert not list(tmp_path.rglob("*.part"))


def test_directory_that_vanished_means_no_sharing_and_no_failure(transport, tmp_path, caplog):
    cache = NodeCache(transport, tmp_path / "gone", clock=SystemClock())
    transport.send(payload(), b"data")
    assert get(cache, payload(), b"data") == b"data"
    assert "not shared" in caplog.text


def test_oldest_payloads_make_room(transport, tmp_path):
    cache = NodeCache(transport, tmp_path, clock=SystemClock(), max_nbytes=250)
    for n in range(4):
        transport.send(payload(n), bytes(100))
        get(cache, payload(n), bytes(100))
    kept = sorted(path.name for path in tmp_path.rglob("*-*") if path.is_file() and path.suffix == "")
    assert kept == ["0000000002-000000", "0000000003-000000"]
    transport.send(payload(9), bytes(251))
    assert get(cache, payload(9), bytes(251)) == bytes(251)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 250


def test_next_attempt_removes_what_the_last_one_left(transport, tmp_path):
    cache = NodeCache(transport, tmp_path, clock=SystemClock())
    for attempt in (ATTEMPT, NEXT):
        transport.send(payload(0, attempt), b"x")
        get(cache, payload(0, attempt), b"x")
    assert [path.name for path in tmp_path.iterdir()] == [NEXT]
    cache.forget(NEXT)
    cache.forget(NEXT)
    assert list(tmp_path.iterdir()) == []


def test_errors_of_the_inner_source_pass(transport, tmp_path):
    cache = NodeCache(transport, tmp_path, clock=SystemClock())
    with pytest.raises(PayloadMissingError):
        get(cache, payload(), b"x")
    transport.send(payload(), b"other")
    with pytest.raises(PayloadInvalidError):
        get(cache, payload(), b"x")


def test_wait_for_another_engine_is_bounded(transport, tmp_path, caplog):
    started, release = threading.Event(), threading.Event()

    class Stuck:
        def fetch(self, payload_id, *, nbytes, digest):
            started.set()
            assert release.wait(30)
            return transport.fetch(payload_id, nbytes=nbytes, digest=digest)

    transport.send(payload(), b"x")
    clock = ManualClock()
    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(get, NodeCache(Stuck(), tmp_path, clock=SystemClock()), payload(), b"x")
        assert started.wait(30)
        assert get(NodeCache(transport, tmp_path, clock=clock, wait_s=5.0), payload(), b"x") == b"x"
        assert 5.0 <= clock.monotonic_s() < 6.0
        release.set()
        assert stuck.result(30) == b"x"
    assert "takes more than 5 s" in caplog.text


def _download_and_hang(directory, started):
    class Hangs:
        def fetch(self, payload_id, *, nbytes, digest):
            started.set()
            threading.Event().wait(60)

    get(NodeCache(Hangs(), directory, clock=SystemClock()), payload(), b"x")


@pytest.mark.process
def test_killed_engine_stops_nobody(transport, tmp_path):
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    engine = context.Process(target=_download_and_hang, args=(tmp_path, started))
    engine.start()
    try:
        assert started.wait(60)
        transport.send(payload(), b"x")
        cache = NodeCache(transport, tmp_path, clock=SystemClock(), wait_s=600)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(get, cache, payload(), b"x")
            with pytest.raises(TimeoutError):
                waiting.result(0.05)
            os.kill(engine.pid, signal.SIGKILL)
            assert waiting.result(30) == b"x"
    finally:
        engine.kill()
        engine.join(30)


def test_shared_directory_is_this_users_alone(tmp_path):
    path = shared_directory("s3://bucket/run", root=tmp_path)
    assert shared_directory("s3://bucket/run", root=tmp_path) == path
    assert shared_directory("s3://bucket/other", root=tmp_path) != path
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o777)
    with pytest.raises(RejectedError, match="nobody else may enter"):
        shared_directory("s3://bucket/run", root=tmp_path)
    path.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    path.symlink_to(elsewhere)
    with pytest.raises(RejectedError, match="expected a directory of user"):
        shared_directory("s3://bucket/run", root=tmp_path)
    with pytest.raises(RejectedError, match="choose another"):
        shared_directory("s3://bucket/run", root=tmp_path / "no" / "such")
