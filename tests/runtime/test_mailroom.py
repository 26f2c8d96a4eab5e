"""The receiver's mail thread: the next message by its name during an attempt, removals beside it, a quiet end."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from deltarefit.errors import PayloadMissingError, TransportError
from deltarefit.runtime.clock import Pace, RandomIds, SystemClock
from deltarefit.runtime.mailroom import MailRoom
from deltarefit.transport import Mailbox, keys, open_run

from .pair import wait_until

CLOCK = SystemClock()


@pytest.fixture
def room():
    store = open_run(f"memory://{RandomIds().nonce()}", clock=CLOCK)
    box = Mailbox(store, "me", clock=CLOCK, nonce="00000002")
    paces = {"busy": Pace(CLOCK, first_s=0.005, most_s=0.005), "idle": Pace(CLOCK, first_s=0.01, most_s=3600.0)}
    room = MailRoom(box, CLOCK, **paces, news=threading.Event())
    room.start()
    yield room, store, Mailbox(store, "coordinator", clock=CLOCK, nonce="00000001")
    room.close()
    room.close()


def taken(room, count):
    found = []

    def came():
        found.extend(room.take(0.0))
        return len(found) >= count

    wait_until(came)
    return [mail.data for mail in found]


def test_during_an_attempt_the_next_message_needs_no_listing(room):
    room, store, coordinator = room
    coordinator.post("me", b"prepare")
    assert taken(room, 1) == [b"prepare"]
    room.is_busy = True
    store.listing = None  # would raise
    for number in range(5):
        coordinator.post("me", b"%d" % number)
    assert taken(room, 5) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_message_that_missed_one_question_meets_the_next_although_the_first_is_not_answered_yet(room):
    room, store, coordinator = room
    coordinator.post("me", b"prepare")
    assert taken(room, 1) == [b"prepare"]
    get, answered, asked = store.get, threading.Event(), []

    def first_slowly(key, max_nbytes):
        asked.append(key)
        if len(asked) == 1:
            assert answered.wait(10.0)
            raise PayloadMissingError("it was not there when it was looked for")
        return get(key, max_nbytes=max_nbytes)

    store.get = first_slowly
    room.is_busy = True
    wait_until(lambda: asked)
    coordinator.post("me", b"next")
    assert taken(room, 1) == [b"next"]
    answered.set()
    coordinator.post("me", b"last")
    assert taken(room, 1) == [b"last"]
    assert len(set(asked)) < len(asked)


def test_two_messages_that_are_left_together_cost_one_round_trip_and_keep_their_order(room):
    room, store, coordinator = room
    coordinator.post("me", b"prepare")
    assert taken(room, 1) == [b"prepare"]
    get, is_held, released = store.get, threading.Event(), threading.Event()
    seen = []

    def hold_the_first(key, max_nbytes):
        found = get(key, max_nbytes=max_nbytes)
        seen.append(found)
        if b"open" in found:
            is_held.set()
            assert released.wait(10.0)
        return found

    coordinator.post("me", b"open")
    coordinator.post("me", b"finish")
    store.get, store.listing = hold_the_first, lambda prefix: []
    room.is_busy = True
    assert is_held.wait(10.0)
    wait_until(lambda: len(set(seen)) == 2)
    assert room.take(0.0) == []
    released.set()
    assert taken(room, 2) == [b"open", b"finish"]


def test_a_question_that_failed_is_told_once_and_asked_again(room):
    room, store, coordinator = room
    coordinator.post("me", b"prepare")
    assert taken(room, 1) == [b"prepare"]
    get, failed = store.get, []

    def fail_four_times(key, max_nbytes):
        if len(failed) < 4:
            failed.append(key)
            raise TransportError("on purpose")
        return get(key, max_nbytes=max_nbytes)

    store.get, store.listing = fail_four_times, lambda prefix: []
    coordinator.post("me", b"next")
    room.is_busy = True
    told, found = [], []

    def came():
        try:
            found.extend(room.take(0.0))
        except TransportError as error:
            told.append(error)
        return found

    wait_until(came)
    assert [mail.data for mail in found] == [b"next"]
    assert 1 <= len(told) <= 4
    assert room.take(0.0) == []


def test_a_question_for_the_message_after_the_next_that_failed_does_not_hide_the_next(room):
    room, _, coordinator = room
    coordinator.post("me", b"prepare")
    assert taken(room, 1) == [b"prepare"]
    room.close()  # from here on it is looked step by step
    coordinator.post("me", b"next")
    following = room._mailbox.following
    failed, answered = Future(), Future()
    failed.set_exception(TransportError("on purpose"))
    answered.set_result(room._mailbox.read(following))
    room._asked = [(following._replace(sequence=following.sequence + 1), failed), (following, answered)]
    assert [mail.data for mail in room._look()] == [b"next"]


def test_questions_are_bounded_while_none_is_answered(room):
    room, store, coordinator = room
    coordinator.post("me", b"prepare")
    assert taken(room, 1) == [b"prepare"]
    asked, answered = [], threading.Event()

    def never(key, max_nbytes):
        asked.append(key)
        assert answered.wait(10.0)
        raise TransportError("on purpose")

    store.get, store.listing = never, lambda prefix: []
    room.is_busy = True
    wait_until(lambda: len(asked) == 6)
    CLOCK.sleep(0.1)  # twenty times the pace
    assert (len(asked), len(set(asked))) == (6, 2), "three questions for each of the next two messages"
    answered.set()


def test_messages_that_are_done_with_go_although_the_store_failed_once(room):
    room, store, coordinator = room
    coordinator.post("me", b"0")
    coordinator.post("me", b"1")
    mails = []
    wait_until(lambda: mails.extend(room.take(0.0)) or len(mails) == 2)
    delete, failed = store.delete, threading.Event()

    def fail_once(listed):
        if not failed.is_set():
            failed.set()
            raise TransportError("on purpose")
        delete(listed)

    store.delete = fail_once
    room.acknowledge(mails[0].key)
    wait_until(failed.is_set)
    room.acknowledge(mails[1].key)
    wait_until(lambda: not store.listing(keys.mail_prefix("me")))


def test_what_is_acknowledged_before_the_end_is_removed_by_it(room):
    room, store, coordinator = room
    coordinator.post("me", b"0")
    mails = []
    wait_until(lambda: mails.extend(room.take(0.0)) or len(mails) == 1)
    room.acknowledge(mails[0].key)
    room.close()
    assert store.listing(keys.mail_prefix("me")) == []
    room.acknowledge(mails[0].key)


def test_answers_are_posted_in_order_without_waiting_for_the_store(room):
    room, store, _ = room
    released, put = threading.Event(), store.put

    def slowly(key, data):
        assert released.wait(10.0)
        put(key, data)

    store.put = slowly
    for number in range(3):
        room.post("coordinator", b"%d" % number)
    assert store.listing(keys.mail_prefix("coordinator")) == []
    released.set()
    room.close()
    assert [mail.data for mail in Mailbox(store, "coordinator", clock=CLOCK, nonce="00000003").take(0.0)] == [b"0", b"1", b"2"]


def test_an_answer_that_cannot_be_posted_is_logged_and_the_next_one_goes_out(room, caplog):
    room, store, _ = room
    put, failed = store.put, threading.Event()

    def fail_once(key, data):
        if not failed.is_set():
            failed.set()
            raise TransportError("on purpose")
        put(key, data)

    store.put = fail_once
    room.post("coordinator", b"lost")
    room.post("coordinator", b"kept")
    room.close()
    assert [mail.data for mail in Mailbox(store, "coordinator", clock=CLOCK, nonce="00000003").take(0.0)] == [b"kept"]
    assert "perhaps not left: on purpose" in caplog.text
