"""Relays as processes of their own, and one of them killed in the middle of an attempt."""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
import threading

import pytest

from deltarefit.ids import OwnerId, PayloadId, attempt_id
from deltarefit.runtime.clock import Deadline, SystemClock
from deltarefit.transport import PayloadEntry
from deltarefit.transport.relay import RelayContext, RelayNode, RelaySender, RelaySettings, RelaySource

pytestmark = pytest.mark.process

ATTEMPT = attempt_id(1, 1, "00000000")
SETTINGS = RelaySettings(alive_s=0.2, silence_s=2.0, dead_after_s=2.0)
KIB = 1 << 10


def context(name):
    return RelayContext("file:///run", name, lambda: secrets.token_bytes(16), SystemClock(), settings=SETTINGS)


def serve(name, directory, reports):
    with contextlib.ExitStack() as stack:
        node = RelayNode(context(name), directory)
        reports.put((name, node.start()))
        stack.callback(node.close)
        threading.Event().wait(120)


@pytest.fixture
def relays(tmp_path):
    processes = multiprocessing.get_context("spawn")
    reports = processes.Queue()
    started = {
        f"n{number}": processes.Process(target=serve, args=(f"n{number}", tmp_path / f"n{number}", reports))
        for number in range(4)
    }
    for process in started.values():
        process.start()
    try:
        peers = dict(reports.get(timeout=60) for _ in started)
        yield started, [peers[name] for name in sorted(peers)]
    finally:
        for process in started.values():
            process.kill()
            process.join(30)


def test_inner_relay_killed_in_the_middle_takes_nothing_with_it(relays, tmp_path):
    processes, peers = relays
    data = secrets.token_bytes(200 * KIB)
    count = 40
    with RelaySender(context("owner"), lambda: peers, fan_out=1) as sender:  # a chain: n1 is between n0 and n2
        for sequence in range(count):
            sender.send(PayloadId(ATTEMPT, sequence, OwnerId(0)), data)
            if sequence == count // 2:
                deadline = Deadline(SystemClock(), 30)
                while not list((tmp_path / "n2").glob("*/payloads/*")):
                    assert not deadline.expired
                    SystemClock().sleep(0.01)
                processes["n1"].kill()
        assert sender.wait_until_delivered(ATTEMPT, 60)
    for name in ("n0", "n2", "n3"):
        with RelaySource(tmp_path / name, "engine", clock=SystemClock(), wait_s=0.1) as engine:
            for sequence in range(count):
                payload_id = PayloadId(ATTEMPT, sequence, OwnerId(0))
                entry = PayloadEntry.of(payload_id, data)
                assert engine.fetch(payload_id, nbytes=entry.nbytes, digest=entry.digest) == data
    assert not processes["n1"].is_alive()
