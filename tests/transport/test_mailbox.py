"""Mailboxes beyond the suite: listings that are no snapshots, stores in trouble, keys, pace."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltarefit.errors import PayloadInvalidError, RejectedError, TransportError
from deltarefit.runtime.clock import ManualClock
from deltarefit.transport import Mailbox, MailboxSettings, RetryPolicy, RunStore, StoreSettings, keys, open_run
from deltarefit.transport.keys import MailKey
from deltarefit.transport.mailbox import _seal, _unseal

RUN = itertools.count()


class TroubledStore(RunStore):
    """Hides keys from listings, or fails, as told."""

    hide = staticmethod(lambda key: False)
    fail_get = staticmethod(lambda key: False)
    fail_put = staticmethod(lambda key: False)

    def listing(self, prefix):
        return [info for info in super().listing(prefix) if not self.hide(info.key)]

    def get(self, key, *, max_nbytes):
        if self.fail_get(key):
            raise TransportError("get fails on purpose")
        return super().get(key, max_nbytes=max_nbytes)

    def put(self, key, data):
        if self.fail_put(key):
            raise TransportError("put fails on purpose")
        super().put(key, data)


@pytest.fixture
def store():
    plain = open_run(f"memory://unit-mail-{next(RUN)}", clock=ManualClock())
    return TroubledStore(plain.url, plain.backend, clock=ManualClock(), settings=StoreSettings(retry=RetryPolicy(attempts=1)))


def box(store, me, nonce="00000001", clock=None, **more):
    return Mailbox(store, me, clock=clock or ManualClock(), nonce=nonce, **more)


def hide_once(keys_to_hide):
    """The first listing lacks these keys, as when a directory is read while files are added."""
    hidden = set(keys_to_hide)

    def hide(key):
        if key in hidden:
            hidden.discard(key)
            return True
        return False

    return hide


@pytest.mark.parametrize("gap", range(5))
def test_message_missed_by_one_listing_is_not_overtaken(store, gap):
    sender = box(store, "a")
    for number in range(5):
        sender.post("me", b"%d" % number)
    listed = [info.key for info in store.listing(keys.mail_prefix("me"))]
    store.hide = hide_once([listed[gap]])
    reader = box(store, "me")
    taken = reader.take(0.0) + reader.take(0.0)
    assert [mail.data for mail in taken] == [b"0", b"1", b"2", b"3", b"4"]


def test_restart_of_the_sender_is_not_overtaken_either(store):
    reader = box(store, "me")
    first = box(store, "a", "000000ff")
    first.post("me", b"0")
    assert len(reader.take(0.0)) == 1
    first.post("me", b"1")
    missed = {info.key for info in store.listing(keys.mail_prefix("me"))} - reader._taken
    box(store, "a", "00000001").post("me", b"2")
    store.hide = hide_once(missed)
    assert [mail.data for mail in reader.take(0.0)] == [b"1", b"2"]


def test_failed_post_leaves_a_gap_that_nobody_waits_for(store):
    sender = box(store, "a")
    sender.post("me", b"0")
    store.fail_put = lambda key: True
    with pytest.raises(TransportError):
        sender.post("me", b"1")
    del store.fail_put
    sender.post("me", b"2")
    assert [mail.data for mail in box(store, "me").take(0.0)] == [b"0", b"2"]


def test_trouble_in_the_middle_loses_nothing(store):
    sender = box(store, "a")
    for number in range(3):
        sender.post("me", b"%d" % number)
    bad = store.listing(keys.mail_prefix("me"))[1].key
    store.fail_get = lambda key: key == bad
    reader = box(store, "me")
    assert [mail.data for mail in reader.take(0.0)] == [b"0"]
    with pytest.raises(TransportError):
        reader.take(0.0)
    del store.fail_get
    assert [mail.data for mail in reader.take(0.0)] == [b"1", b"2"]


def test_talkative_sender_does_not_starve_the_others(store):
    loud, quiet = box(store, "loud"), box(store, "quiet")
    for _ in range(50):
        loud.post("me", b"!")
    quiet.post("me", b"?")
    reader = box(store, "me", settings=MailboxSettings(max_taken=4))
    assert "quiet" in [mail.sender for mail in reader.take(0.0)]


def test_looks_grow_rarer_up_to_the_limit_and_end_at_the_timeout(store):
    clock = ManualClock()
    waits: list[float] = []
    sleep = clock.sleep
    clock.sleep = lambda seconds: (waits.append(seconds), sleep(seconds))
    reader = box(store, "me", clock=clock, settings=MailboxSettings(first_poll_s=1.0, max_poll_s=3.0))
    assert reader.take(60.0) == []
    assert waits[:9] == [1.0] * 8 + [1.0]
    assert waits[9] == pytest.approx(9 / 8), "a look is late by an eighth of the time waited at most"
    assert max(waits) == 3.0
    assert sorted(waits[:-1]) == waits[:-1]
    assert clock.monotonic_s() == 60.0


def test_message_without_the_runs_key_is_skipped(store, caplog):
    box(store, "a", key=b"secret").post("me", b"ours")
    box(store, "b").post("me", b"no key")
    box(store, "c", key=b"other").post("me", b"other key")
    reader = box(store, "me", key=b"secret")
    assert [mail.data for mail in reader.take(0.0)] == [b"ours"]
    assert caplog.text.count("sealed with another key") == 2


def test_bucket_is_looked_at_less_often_than_files(tmp_path):
    files = MailboxSettings.for_store(open_run(f"file://{tmp_path}", clock=ManualClock()))
    bucket = MailboxSettings.for_store(open_run("s3://bucket/x", clock=ManualClock(), options={"region": "r"}))
    assert files.max_poll_s <= 0.05
    assert bucket.first_poll_s > files.max_poll_s / 10
    assert bucket.max_poll_s > files.max_poll_s


@pytest.mark.parametrize("nonce", ["", "0000000", "0000000G", "000000001"])
def test_nonce_must_be_eight_hex_digits(store, nonce):
    with pytest.raises(RejectedError, match="8 hex digits"):
        box(store, "me", nonce)


PARTS = MailKey("a", 0, "00000001", 7)
SEALED = _seal("me", PARTS, b"the message", b"")


@given(st.integers(0, len(SEALED) - 1), st.integers(1, 255))
def test_any_changed_byte_is_noticed(place, change):
    damaged = bytearray(SEALED)
    damaged[place] ^= change
    with pytest.raises(PayloadInvalidError):
        _unseal("me", PARTS, bytes(damaged), b"")


@given(st.binary(max_size=80))
def test_random_bytes_are_no_message(data):
    with pytest.raises(PayloadInvalidError):
        _unseal("me", PARTS, data, b"")


@pytest.mark.parametrize("changed", [{"sender": "b"}, {"boot": 1}, {"nonce": "00000002"}, {"sequence": 8}])
def test_message_under_another_key_is_no_message(changed):
    assert _unseal("me", PARTS, SEALED, b"") == b"the message"
    with pytest.raises(PayloadInvalidError, match="it is a message from"):
        _unseal("me", PARTS._replace(**changed), SEALED, b"")


# --- the message that can be named beforehand ------------------------------------------------------------------------------


def take_next(reader):
    parts = reader.following
    return None if parts is None else reader.take_read(parts, reader.read(parts))


def test_next_message_of_the_latest_sender_is_had_without_a_listing(store):
    sender, reader = box(store, "a"), box(store, "me")
    assert take_next(reader) is None, "nobody wrote yet, so no key is known"
    sender.post("me", b"0")
    assert [mail.data for mail in reader.take(0.0)] == [b"0"]
    store.listing = None
    assert take_next(reader) is None
    for number in (1, 2):
        sender.post("me", b"%d" % number)
    assert [take_next(reader).data, take_next(reader).data] == [b"1", b"2"]
    assert take_next(reader) is None
    del store.listing
    assert reader.take(0.0) == [], "what was given out once is not given out again"


def test_next_message_never_overtakes_and_listings_go_on_behind_it(store):
    sender, reader = box(store, "a"), box(store, "me")
    for number in range(4):
        sender.post("me", b"%d" % number)
    first = take_next(reader)
    assert first is None
    found = box(store, "me", settings=MailboxSettings(max_taken=2))
    assert [mail.data for mail in found.take(0.0)] == [b"0", b"1"]
    assert take_next(found).data == b"2"
    box(store, "b").post("me", b"other")
    assert sorted(mail.data for mail in found.take(0.0)) == [b"3", b"other"]
    assert take_next(found) is None


def test_next_message_after_a_failed_post_is_found_by_listing(store):
    sender, reader = box(store, "a"), box(store, "me")
    sender.post("me", b"0")
    reader.take(0.0)
    store.fail_put = lambda key: True
    with pytest.raises(TransportError):
        sender.post("me", b"lost")
    del store.fail_put
    sender.post("me", b"2")
    assert take_next(reader) is None
    assert [mail.data for mail in reader.take(0.0)] == [b"2"]
    sender.post("me", b"3")
    assert take_next(reader).data == b"3"


def test_damaged_next_message_is_skipped_once_and_the_following_one_is_found(store, caplog):
    sender, reader = box(store, "a"), box(store, "me")
    sender.post("me", b"0")
    reader.take(0.0)
    sender.post("me", b"1")
    damaged = next(info.key for info in store.listing(keys.mail_prefix("me")) if info.key not in reader._taken)
    store.put(damaged, b"no message")
    sender.post("me", b"2")
    assert take_next(reader) is None
    assert take_next(reader) is None
    assert [mail.data for mail in reader.take(0.0)] == [b"2"]
    assert caplog.text.count("not a message of this format") == 1
