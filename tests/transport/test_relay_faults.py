"""The relay tree on bad days: cut and silent links, dead and restarted relays, full shelves, strangers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import secrets
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltarefit.errors import PayloadMissingError, RejectedError, TransportError
from deltarefit.ids import OwnerId, PayloadId, attempt_id
from deltarefit.runtime.clock import Deadline, SystemClock
from deltarefit.testing.tcp_faults import CuttingProxy
from deltarefit.transport import PayloadEntry
from deltarefit.transport.relay import Peer, RelayContext, RelayNode, RelaySender, RelaySettings, RelaySource
from deltarefit.transport.relay.channel import connect

ATTEMPT = attempt_id(1, 1, "00000000")
SETTINGS = RelaySettings(alive_s=0.1, silence_s=0.6, dead_after_s=1.0, call_s=5.0)
KIB = 1 << 10
MIB = 1 << 20
CLOCK = SystemClock()


def payload(sequence, owner=0, attempt=ATTEMPT):
    return PayloadId(attempt, sequence, OwnerId(owner))


def content(nbytes, seed=0):
    return random.Random(seed).randbytes(nbytes)


def context(name, **more):
    more = {"settings": SETTINGS, **more}
    return RelayContext(more.pop("run", "memory://run"), name, lambda: secrets.token_bytes(16), CLOCK, **more)


def eventually(condition, timeout_s=30.0):
    deadline = Deadline(CLOCK, timeout_s)
    while not condition():
        assert not deadline.expired, "it never came true"
        CLOCK.sleep(0.01)


class Cluster:
    """Relays in this process, each with an engine that reads from it."""

    def __init__(self, folder, stack):
        self.folder = folder
        self.stack = stack
        self.nodes = {}
        self.peers = []

    def add(self, name, *, max_nbytes=1 << 30, port=0, **more):
        node = RelayNode(context(name, **more), self.folder / name, max_nbytes=max_nbytes, port=port)
        peer = node.start()
        self.stack.callback(node.close)
        self.nodes[name] = node
        return peer

    def grow(self, count, **more):
        self.peers = [self.add(f"n{number}", **more) for number in range(count)]

    def proxy(self, number, **more):
        """Put a proxy before a relay; others reach it through that only."""
        peer = self.peers[number]
        proxy = CuttingProxy(peer.host, peer.port, **more)
        self.stack.enter_context(proxy.running())
        self.peers[number] = Peer(peer.name, peer.host, proxy.port)
        return proxy

    def sender(self, name="owner", **more):
        limits = {key: more.pop(key) for key in ("fan_out", "max_retained_nbytes") if key in more}
        return self.stack.enter_context(RelaySender(context(name, **more), lambda: self.peers, **limits))

    def engine(self, name, reader="engine", wait_s=10.0):
        return self.stack.enter_context(RelaySource(self.folder / name, reader, clock=CLOCK, wait_s=wait_s))

    def check(self, sent, names=None):
        for name in names or [peer.name for peer in self.peers]:
            engine = self.engine(name, reader=f"check-{secrets.token_hex(2)}")
            for payload_id, data in sent.items():
                entry = PayloadEntry.of(payload_id, data)
                assert engine.fetch(payload_id, nbytes=entry.nbytes, digest=entry.digest) == data, (name, payload_id)
            engine.close()


@pytest.fixture
def cluster(tmp_path):
    with contextlib.ExitStack() as stack:
        yield Cluster(tmp_path, stack)


def send_all(sender, count, nbytes, owners=1):
    sent = {}
    for sequence in range(count):
        for owner in range(owners):
            sent[payload(sequence, owner)] = content(nbytes, seed=(sequence, owner).__hash__())
            sender.send(payload(sequence, owner), sent[payload(sequence, owner)])
    return sent


def send_until_refused(sender, owner):
    """The refusal comes back a moment later; with room for one payload, one of the next sends meets it."""
    for sequence in range(1, 1000):
        sender.send(payload(sequence, owner), b"data")


def test_each_payload_crosses_the_boundary_once(cluster):
    cluster.grow(7)
    proxy = cluster.proxy(0)
    sender = cluster.sender()
    sent = send_all(sender, 10, 300 * KIB)
    assert sender.wait_until_delivered(ATTEMPT, 30)
    cluster.check(sent)
    total = sum(map(len, sent.values()))
    assert sender.sent_nbytes == total
    assert proxy.crossed_nbytes < 1.01 * total, "framing, greeting and all"
    assert [cluster.nodes[f"n{n}"].received_nbytes for n in range(7)] == [total] * 7
    assert sum(node.forwarded_nbytes for node in cluster.nodes.values()) == 6 * total
    assert cluster.nodes["n0"].forwarded_nbytes == 2 * total


def test_owners_begin_at_roots_of_their_own(cluster):
    cluster.grow(3)
    sender = cluster.sender()
    sent = send_all(sender, 2, 50 * KIB, owners=3)
    assert sender.wait_until_delivered(ATTEMPT, 30)
    cluster.check(sent)
    assert [node.forwarded_nbytes for node in cluster.nodes.values()] == [4 * 50 * KIB] * 3, "the load is the same everywhere"


@pytest.mark.parametrize("seed", range(2))
def test_link_cut_at_random_bytes_loses_and_repeats_nothing_that_arrived(cluster, seed):
    cluster.grow(2)
    dice = random.Random(seed)
    count, nbytes = 40, 40 * KIB
    proxy = cluster.proxy(0, cut_at=tuple(dice.randrange(count * nbytes) for _ in range(8)))
    inner = cluster.proxy(1, cut_at=tuple(dice.randrange(count * nbytes) for _ in range(8)))
    sender = cluster.sender()
    sent = send_all(sender, count, nbytes)
    assert sender.wait_until_delivered(ATTEMPT, 60)
    assert proxy.cuts >= 4
    assert inner.cuts >= 4
    cluster.check(sent)
    total = count * nbytes
    assert cluster.nodes["n0"].received_nbytes == total, "after a cut it goes on at the byte where it stopped"


def test_silent_link_is_noticed_and_made_anew(cluster):
    cluster.grow(1)
    proxy = cluster.proxy(0)
    sender = cluster.sender()
    sent = send_all(sender, 3, 100 * KIB)
    assert sender.wait_until_delivered(ATTEMPT, 30)
    proxy.be_silent()
    late = payload(9)
    sent[late] = content(100 * KIB, 9)
    sender.send(late, sent[late])
    assert not sender.wait_until_delivered(ATTEMPT, 0.3)
    proxy.cut()
    proxy.speak()
    assert sender.wait_until_delivered(ATTEMPT, 30)
    cluster.check(sent)


@pytest.mark.parametrize("victim", [0, 1, 6], ids=["root", "inner", "leaf"])
def test_relay_that_dies_is_passed_over_and_all_others_get_everything(cluster, victim):
    cluster.grow(7)
    sender = cluster.sender()
    half = 30
    sent = send_all(sender, half, 60 * KIB)
    cluster.nodes[f"n{victim}"].close()
    for sequence in range(half, 2 * half):
        sent[payload(sequence)] = content(60 * KIB, sequence)
        sender.send(payload(sequence), sent[payload(sequence)])
    assert sender.wait_until_delivered(ATTEMPT, 60)
    cluster.check(sent, [f"n{number}" for number in range(7) if number != victim])
    sender.cleanup(ATTEMPT)
    for number in range(7):
        if number != victim:
            assert not (cluster.folder / f"n{number}" / ATTEMPT).exists()


def test_two_relays_in_a_row_may_die(cluster):
    cluster.grow(5)
    sender = cluster.sender(fan_out=1)  # a chain, so that n2 is below n1
    cluster.nodes["n1"].close()
    cluster.nodes["n2"].close()
    sent = send_all(sender, 5, 100 * KIB)
    assert sender.wait_until_delivered(ATTEMPT, 60)
    cluster.check(sent, ["n0", "n3", "n4"])


def test_restarted_relay_goes_on_with_what_it_kept(cluster):
    cluster.grow(2)
    sender = cluster.sender(settings=RelaySettings(alive_s=0.1, silence_s=0.6, dead_after_s=30.0))
    sent = send_all(sender, 20, 100 * KIB)
    eventually(lambda: cluster.nodes["n0"].received_nbytes > 500 * KIB)
    before = cluster.nodes["n0"]
    before.close()
    cluster.add("n0", port=cluster.peers[0].port)
    assert sender.wait_until_delivered(ATTEMPT, 60)
    cluster.check(sent)
    after = cluster.nodes["n0"]
    assert before.received_nbytes + after.received_nbytes <= 2000 * KIB + frame_slack()


def frame_slack():
    """What was written to the old socket but not yet taken from it."""
    return MIB


def test_no_relay_at_all_is_a_clear_error_and_not_a_hang(cluster):
    cluster.grow(2)
    for node in cluster.nodes.values():
        node.close()
    sender = cluster.sender(max_retained_nbytes=100 * KIB)
    sender.send(payload(0), bytes(100 * KIB))
    with pytest.raises(TransportError, match="no relay of the run can be reached"):
        sender.send(payload(1), bytes(100 * KIB))
    cluster.peers = []
    with pytest.raises(TransportError, match="start one per rollout node"):
        sender.send(payload(0, attempt=attempt_id(1, 2, "00000000")), b"x")
    sender.stop_and_wait(ATTEMPT)


def test_slow_engine_slows_the_owner_down_and_memory_stays_bounded(cluster):
    limit = 300 * KIB
    cluster.grow(2, max_nbytes=limit)
    sender = cluster.sender(max_retained_nbytes=200 * KIB)
    engines = [cluster.engine(f"n{number}") for number in range(2)]
    count, nbytes = 30, 100 * KIB
    sent = {payload(n): content(nbytes, n) for n in range(count)}
    sending = threading.Event()
    most = 0

    def send():
        for payload_id, data in sent.items():
            sender.send(payload_id, data)
        sending.set()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(send)
        eventually(lambda: sender.sent_nbytes >= limit)
        CLOCK.sleep(0.3)
        assert not sending.is_set(), "with no engine reading, the owner must wait"
        for payload_id, data in sent.items():
            entry = PayloadEntry.of(payload_id, data)
            for number, engine in enumerate(engines):
                assert engine.fetch(payload_id, nbytes=entry.nbytes, digest=entry.digest) == data
                most = max(most, cluster.nodes[f"n{number}"].held_nbytes)
        future.result(30)
    assert most <= limit + nbytes, "the limit, and one payload that an engine waits for"
    assert sender.retained_nbytes <= 200 * KIB


def test_payload_that_must_come_first_gets_in_although_the_shelf_is_full(cluster):
    cluster.grow(1, max_nbytes=200 * KIB)
    fast, slow = cluster.sender("fast"), cluster.sender("slow")
    data = content(100 * KIB)
    for sequence in range(1, 5):
        fast.send(payload(sequence, 0), data)  # fills the shelf
    eventually(lambda: cluster.nodes["n0"].held_nbytes >= 200 * KIB)
    engine = cluster.engine("n0", wait_s=30)
    entry = PayloadEntry.of(payload(0, 1), data)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.fetch, payload(0, 1), nbytes=entry.nbytes, digest=entry.digest)
        slow.send(payload(0, 1), data)
        assert waiting.result(30) == data
    for sequence in range(1, 5):
        assert engine.fetch(payload(sequence, 0), nbytes=entry.nbytes, digest=entry.digest) == data


def test_engine_that_died_holds_no_room(cluster):
    cluster.grow(1, max_nbytes=100 * KIB)
    sender = cluster.sender()
    dead, alive = cluster.engine("n0", "dead"), cluster.engine("n0", "alive")
    dead.close()  # the kernel does the same when a process dies
    data = content(100 * KIB)
    for sequence in range(3):
        sender.send(payload(sequence), data)
    for sequence in range(3):
        entry = PayloadEntry.of(payload(sequence), data)
        assert alive.fetch(payload(sequence), nbytes=entry.nbytes, digest=entry.digest) == data
    assert sender.wait_until_delivered(ATTEMPT, 30)


def test_two_engines_of_one_name_are_refused(cluster):
    cluster.grow(1)
    cluster.engine("n0", "twin")
    with pytest.raises(RejectedError, match="reads there already"):
        cluster.engine("n0", "twin")


def test_no_room_on_the_device_fails_the_attempt_with_its_reason(cluster, monkeypatch):
    cluster.grow(2)
    sender = cluster.sender(max_retained_nbytes=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    sender.send(payload(0), b"data")
    with pytest.raises(TransportError, match="No space left on device"):
        send_until_refused(sender, 0)


def test_stop_drops_what_is_on_its_way_everywhere(cluster):
    cluster.grow(3, max_nbytes=100 * KIB)
    sender = cluster.sender()
    data = content(100 * KIB)
    for sequence in range(5):
        sender.send(payload(sequence), data)  # all but the first wait for room
    eventually(lambda: all(node.held_nbytes for node in cluster.nodes.values()))
    sender.stop_and_wait(ATTEMPT)
    assert sender.retained_nbytes == 0
    other = attempt_id(1, 2, "00000000")
    sender.cleanup(ATTEMPT)
    sender.send(payload(0, attempt=other), data)
    assert sender.wait_until_delivered(other, 30)
    engine = cluster.engine("n2", wait_s=0.1)
    entry = PayloadEntry.of(payload(1), data)
    with pytest.raises(PayloadMissingError, match="did not arrive"):
        engine.fetch(payload(1), nbytes=entry.nbytes, digest=entry.digest)


def test_owner_of_another_process_cannot_revive_a_cleaned_attempt(cluster):
    cluster.grow(2)
    one, two = cluster.sender("one"), cluster.sender("two", max_retained_nbytes=1)
    one.send(payload(0, 0), b"data")
    assert one.wait_until_delivered(ATTEMPT, 30)
    one.cleanup(ATTEMPT)
    two.send(payload(0, 1), b"late")
    with pytest.raises(TransportError, match="stopped"):
        send_until_refused(two, 1)
    assert not (cluster.folder / "n0" / ATTEMPT).exists()


# Strangers.


def refusal(peer, **more):
    with pytest.raises(RejectedError) as caught:
        connect(peer, context("stranger", **more)).close()
    return str(caught.value)


def test_relay_of_another_run_or_key_is_refused(cluster):
    peer = cluster.add("n0", key=b"secret")
    assert "does not know this run's key" in refusal(peer, key=b"other")
    assert "does not know this run's key" in refusal(peer)
    assert "serves run memory://run" in refusal(peer, key=b"secret", run="memory://elsewhere")
    connect(peer, context("friend", key=b"secret")).close()


def test_sender_with_the_wrong_key_fails_at_once_with_the_reason(cluster):
    cluster.grow(1, key=b"secret")
    sender = cluster.sender(key=b"wrong", max_retained_nbytes=1)
    sender.send(payload(0), b"x")
    with pytest.raises(TransportError, match="does not know this run's key"):
        sender.send(payload(1), b"x")


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\nHost: relay\r\n\r\n", b"dr\x02\x01\xff\xff\xff\xff", b"dr\x01\x01\x01\x00\x00\x00\xff", b""],
    ids=["http", "huge", "no message", "nothing"],
)
def test_stranger_on_the_port_harms_nobody(cluster, said):
    cluster.grow(1)
    with socket.create_connection((cluster.peers[0].host, cluster.peers[0].port), 5) as stranger:
        stranger.sendall(said)
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b"", "hung up"
        sender = cluster.sender()
        sent = send_all(sender, 2, 10 * KIB)
        assert sender.wait_until_delivered(ATTEMPT, 30)
    cluster.check(sent)


def test_certificate_of_a_stranger_is_named_as_the_reason(cluster):
    """The listener speaks no TLS: the caller must not fall back to plain text."""
    peer = cluster.add("n0")
    tls = ssl.create_default_context()
    with pytest.raises((OSError, RejectedError)):
        connect(peer, context("owner", client_tls=tls))


@pytest.mark.parametrize("change", [{"alive_s": 9.0}, {"connect_s": 0.0}, {"dead_after_s": -1.0}])
def test_impossible_times_are_rejected(change):
    with pytest.raises(RejectedError):
        dataclasses.replace(RelaySettings(), **change)


def test_port_in_use_is_named(cluster):
    peer = cluster.add("n0")
    with pytest.raises(RejectedError, match="cannot listen"):
        cluster.add("n1", port=peer.port)
