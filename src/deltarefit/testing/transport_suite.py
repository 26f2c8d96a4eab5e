"""The suite that every transport and every mailbox store passes. Subclass, override one hook, and pytest runs it.

::

    class TestMyTransport(TransportTests):
        @pytest.fixture
        def ends(self):
            with my_transport() as transport:
                yield TransportEnds(transport.sender, transport.source, transport.leftovers)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from deltarefit.errors import PayloadInvalidError, PayloadMissingError, RejectedError, TransportError
from deltarefit.ids import AttemptId, OwnerId, PayloadId, attempt_id
from deltarefit.transport import Mail, Mailbox, PayloadEntry, PayloadSender, PayloadSource, RunStore, keys

__all__ = ["MailboxTests", "TransportEnds", "TransportTests"]

FIRST = attempt_id(1, 1, "aaaaaaaa")
SECOND = attempt_id(1, 2, "bbbbbbbb")
_MIB = 1 << 20


def _payload_id(sequence: int = 0, owner: int = 0, attempt: AttemptId = FIRST) -> PayloadId:
    return PayloadId(attempt, sequence, OwnerId(owner))


def _bytes(nbytes: int, seed: int = 1) -> bytes:
    """Bytes that differ from place to place, so that swapped or shifted parts show."""
    block = b"".join((seed * 1_000_003 + word).to_bytes(4, "little") for word in range(4096))
    return b"".join((number.to_bytes(4, "little") + block) for number in range(nbytes // len(block) + 1))[:nbytes]


@dataclass(frozen=True, slots=True)
class TransportEnds:
    """Both ends of one transport, and a look beneath it."""

    sender: PayloadSender
    source: PayloadSource
    leftovers: Callable[[AttemptId], Sequence[object]]
    """What the transport still keeps for an attempt, read past the adapter; empty after ``cleanup``."""

    def send(self, payload_id: PayloadId, data: bytes) -> PayloadEntry:
        """Send and describe."""
        self.sender.send(payload_id, data)
        return PayloadEntry.of(payload_id, data)

    def fetch(self, payload_id: PayloadId, entry: PayloadEntry) -> bytes:
        """Fetch what the entry announces."""
        return self.source.fetch(payload_id, nbytes=entry.nbytes, digest=entry.digest)


class TransportTests:
    """What ``PayloadSender`` and ``PayloadSource`` promise."""

    @pytest.fixture
    def ends(self) -> Iterator[TransportEnds]:
        """Override: a fresh transport that holds nothing."""
        raise NotImplementedError

    @pytest.mark.parametrize("nbytes", [0, 1, 1000, 3 * _MIB + 7], ids=str)
    def test_payload_arrives_as_it_was_sent(self, ends: TransportEnds, nbytes: int) -> None:
        data = _bytes(nbytes)
        entry = ends.send(_payload_id(), data)
        assert ends.fetch(_payload_id(), entry) == data
        assert ends.fetch(_payload_id(), entry) == data, "a second fetch gives the same"

    def test_payload_of_many_parts_arrives_as_it_was_sent(self, ends: TransportEnds) -> None:
        data = _bytes(21 * _MIB + 3)
        entry = ends.send(_payload_id(), data)
        assert ends.fetch(_payload_id(), entry) == data

    def test_caller_may_change_its_buffer_after_send(self, ends: TransportEnds) -> None:
        data = _bytes(70_000)
        buffer = bytearray(data)
        ends.sender.send(_payload_id(), memoryview(buffer))
        buffer[:] = bytes(len(buffer))
        assert ends.fetch(_payload_id(), PayloadEntry.of(_payload_id(), data)) == data

    def test_payloads_are_told_apart_by_attempt_owner_and_sequence(self, ends: TransportEnds) -> None:
        ids = [_payload_id(s, o, a) for s in (0, 1, 10) for o in (0, 1, 10) for a in (FIRST, SECOND)]
        entries = [ends.send(payload_id, _bytes(100, seed)) for seed, payload_id in enumerate(ids)]
        for seed, (payload_id, entry) in enumerate(zip(ids, entries, strict=True)):
            assert ends.fetch(payload_id, entry) == _bytes(100, seed)

    def test_sending_the_same_again_is_harmless(self, ends: TransportEnds) -> None:
        data = _bytes(5000)
        ends.send(_payload_id(), data)
        entry = ends.send(_payload_id(), data)
        assert ends.fetch(_payload_id(), entry) == data

    def test_missing_payload_is_reported_as_missing(self, ends: TransportEnds) -> None:
        ends.send(_payload_id(0), b"here")
        with pytest.raises(PayloadMissingError, match=r"payload 1|0000000001"):
            ends.fetch(_payload_id(1), PayloadEntry.of(_payload_id(1), b"not here"))

    @pytest.mark.parametrize(
        "announced", [b"", b"shor", b"other", b"longer than it is"], ids=["empty", "short", "same", "long"]
    )
    def test_other_bytes_than_announced_are_refused(self, ends: TransportEnds, announced: bytes) -> None:
        ends.send(_payload_id(), b"sent!")
        with pytest.raises(PayloadInvalidError):
            ends.fetch(_payload_id(), PayloadEntry.of(_payload_id(), announced))

    def test_concurrent_sends_and_fetches_do_not_mix(self, ends: TransportEnds) -> None:
        def both(number: int) -> bool:
            data = _bytes(50_000 + number, number)
            entry = ends.send(_payload_id(number), data)
            return ends.fetch(_payload_id(number), entry) == data

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(both, range(16)))

    def test_stopped_attempt_refuses_sends_and_others_go_on(self, ends: TransportEnds) -> None:
        entry = ends.send(_payload_id(0), b"before")
        assert ends.fetch(_payload_id(0), entry) == b"before"
        ends.sender.stop_and_wait(FIRST)
        ends.sender.stop_and_wait(FIRST)
        with pytest.raises(TransportError, match="stopped"):
            ends.sender.send(_payload_id(1), b"after")
        assert ends.fetch(_payload_id(0), entry) == b"before", "stopping removes nothing that has arrived"
        other = ends.send(_payload_id(0, attempt=SECOND), b"other attempt")
        assert ends.fetch(_payload_id(0, attempt=SECOND), other) == b"other attempt"

    def test_nothing_takes_effect_after_stop_and_wait(self, ends: TransportEnds) -> None:
        started = threading.Semaphore(0)

        def send_until_refused(owner: int) -> int:
            sequence = 0
            while True:
                try:
                    ends.sender.send(_payload_id(sequence, owner), _bytes(20_000))
                except TransportError:
                    return sequence
                sequence += 1
                started.release()

        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(send_until_refused, owner) for owner in range(3)]
            for _ in running:
                assert started.acquire(timeout=60)
            ends.sender.stop_and_wait(FIRST)
            ends.sender.cleanup(FIRST)
            assert all(future.result() >= 0 for future in running)
        assert not ends.leftovers(FIRST)

    def test_attempt_without_payloads_can_be_stopped_and_cleaned_up(self, ends: TransportEnds) -> None:
        ends.sender.stop_and_wait(FIRST)
        ends.sender.cleanup(FIRST)
        ends.sender.cleanup(SECOND)

    def test_cleanup_leaves_nothing_of_its_attempt_and_all_of_others(self, ends: TransportEnds) -> None:
        entries = [ends.send(_payload_id(n), _bytes(1000 * n, n)) for n in range(5)]
        kept = ends.send(_payload_id(0, attempt=SECOND), b"kept")
        assert [ends.fetch(_payload_id(n), entry) for n, entry in enumerate(entries)][1] == _bytes(1000, 1)
        assert ends.leftovers(FIRST), "the look beneath sees payloads; else this test proves nothing"
        ends.sender.cleanup(FIRST)
        ends.sender.cleanup(FIRST)
        assert not ends.leftovers(FIRST)
        for n, entry in enumerate(entries):
            with pytest.raises(PayloadMissingError):
                ends.fetch(_payload_id(n), entry)
        with pytest.raises(TransportError, match="stopped"):
            ends.sender.send(_payload_id(9), b"after cleanup")
        assert ends.fetch(_payload_id(0, attempt=SECOND), kept) == b"kept"


class MailboxTests:
    """What ``Mailbox`` promises, on any store."""

    timeout_s = 30.0
    """Longest wait for a message that is there; a store in trouble may need its retries."""

    @pytest.fixture
    def store(self) -> Iterator[RunStore]:
        """Override: an empty run."""
        raise NotImplementedError

    def open_mailbox(self, store: RunStore, me: str, nonce: str = "00000001") -> Mailbox:
        """Override: a mailbox on that store."""
        raise NotImplementedError

    def take_all(self, box: Mailbox, count: int) -> list[Mail]:
        """Take until ``count`` messages came; fail if they do not."""
        taken: list[Mail] = []
        while len(taken) < count:
            more = box.take(self.timeout_s)
            assert more, f"expected {count} messages, got {len(taken)} within {self.timeout_s} s"
            taken += more
        return taken

    def test_messages_come_in_order_per_sender(self, store: RunStore) -> None:
        senders = [self.open_mailbox(store, name) for name in ("a", "b.c", "d-0")]
        box = self.open_mailbox(store, "me")
        for number in range(12):
            for sender in senders:
                sender.post("me", b"%d" % number)
        taken = self.take_all(box, 36)
        assert len(taken) == 36
        for sender in senders:
            assert [mail.data for mail in taken if mail.sender == sender.me] == [b"%d" % n for n in range(12)]

    def test_order_holds_while_messages_keep_coming(self, store: RunStore) -> None:
        count = 60
        box = self.open_mailbox(store, "me")

        def post(sender: Mailbox) -> None:
            for number in range(count):
                sender.post("me", b"%d" % number)

        with ThreadPoolExecutor(2) as pool:
            posting = [pool.submit(post, self.open_mailbox(store, name)) for name in ("a", "b")]
            taken: list[Mail] = []
            while len(taken) < 2 * count:
                more = box.take(self.timeout_s)
                assert more
                taken += more
                box.acknowledge(*(mail.key for mail in more))
            for future in posting:
                future.result()
        for name in ("a", "b"):
            assert [int(mail.data) for mail in taken if mail.sender == name] == list(range(count))
        assert store.listing(keys.MAIL) == []

    def test_mail_is_for_its_recipient_only(self, store: RunStore) -> None:
        self.open_mailbox(store, "a").post("you", b"not mine")
        assert self.open_mailbox(store, "me").take(0.0) == []
        assert [mail.data for mail in self.open_mailbox(store, "you").take(self.timeout_s)] == [b"not mine"]

    def test_taken_message_is_not_given_again_but_stays_until_acknowledged(self, store: RunStore) -> None:
        self.open_mailbox(store, "a").post("me", b"one")
        box = self.open_mailbox(store, "me")
        (mail,) = box.take(self.timeout_s)
        assert box.take(0.0) == []
        again = self.open_mailbox(store, "me", "00000002")
        assert [m.data for m in again.take(self.timeout_s)] == [b"one"], "a restarted process gets it again"
        box.acknowledge(mail.key)
        box.acknowledge(mail.key)
        assert self.open_mailbox(store, "me", "00000003").take(0.0) == []
        assert store.listing(keys.MAIL) == []

    def test_restarted_sender_goes_on_after_its_earlier_messages(self, store: RunStore) -> None:
        # The nonces fall from start to start: the order must not come from them.
        for start in range(3):
            sender = self.open_mailbox(store, "a", f"{0xFF - start:08x}")
            for number in range(2):
                sender.post("me", b"%d.%d" % (start, number))
        box = self.open_mailbox(store, "me")
        assert [mail.data for mail in self.take_all(box, 6)] == [b"0.0", b"0.1", b"1.0", b"1.1", b"2.0", b"2.1"]

    def test_restarted_sender_is_heard_after_all_its_messages_were_acknowledged(self, store: RunStore) -> None:
        box = self.open_mailbox(store, "me")
        for nonce in ("000000ff", "0000000f", "00000000"):
            sender = self.open_mailbox(store, "a", nonce)
            for number in range(3):
                sender.post("me", nonce.encode() + b"%d" % number)
            taken = self.take_all(box, 3)
            assert [mail.data for mail in taken] == [nonce.encode() + b"%d" % n for n in range(3)]
            box.acknowledge(*(mail.key for mail in taken))

    def test_acknowledged_message_that_comes_back_is_ignored(self, store: RunStore) -> None:
        sender = self.open_mailbox(store, "a")
        sender.post("me", b"one")
        box = self.open_mailbox(store, "me")
        (mail,) = box.take(self.timeout_s)
        stored = store.get(mail.key, max_nbytes=_MIB)
        box.acknowledge(mail.key)
        store.put(mail.key, stored)  # what a repeated write does whose first reply was lost
        assert box.take(0.0) == []
        sender.post("me", b"two")
        assert [m.data for m in box.take(self.timeout_s)] == [b"two"]

    def test_foreign_and_damaged_objects_are_skipped(self, store: RunStore) -> None:
        sender = self.open_mailbox(store, "a")
        for number in range(3):
            sender.post("me", b"%d" % number)
        first, second, _ = store.listing(keys.mail_prefix("me"))
        damaged = bytearray(store.get(second.key, max_nbytes=_MIB))
        damaged[-1] ^= 1
        store.put(second.key, bytes(damaged))
        store.put(f"{keys.mail_prefix('me')}/README", b"someone put this here")
        moved = first.key.replace("/me/", "/you/")
        store.put(moved, store.get(first.key, max_nbytes=_MIB))
        box = self.open_mailbox(store, "me")
        assert [mail.data for mail in box.take(self.timeout_s)] == [b"0", b"2"]
        assert box.take(0.0) == []
        assert self.open_mailbox(store, "you").take(0.0) == [], "a message moved to another mailbox is no message"

    def test_empty_and_longest_messages_pass_and_longer_ones_are_refused(self, store: RunStore) -> None:
        sender = self.open_mailbox(store, "a")
        longest = _bytes(4 * _MIB)
        sender.post("me", b"")
        sender.post("me", longest)
        with pytest.raises(RejectedError, match="at most"):
            sender.post("me", longest + b"!")
        assert [mail.data for mail in self.take_all(self.open_mailbox(store, "me"), 2)] == [b"", longest]

    @pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "x" * 65])
    def test_names_that_are_no_names_are_refused(self, store: RunStore, name: str) -> None:
        with pytest.raises(RejectedError):
            self.open_mailbox(store, "a").post(name, b"")
        with pytest.raises(RejectedError):
            self.open_mailbox(store, name)
