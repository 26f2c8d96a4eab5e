"""The wrappers and the shared guard: order, room, stopping in the middle."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltarefit.errors import DeadlineError, RejectedError, TransportError
from deltarefit.ids import OwnerId, PayloadId, attempt_id
from deltarefit.runtime.clock import ManualClock
from deltarefit.testing.faults import DroppingSender, FailingSender, FaultPlan, HoldingSender
from deltarefit.transport import (
    LimitedSender,
    LoggingSender,
    MemoryTransport,
    PayloadEntry,
    RetryingSender,
    RetryPolicy,
)

ATTEMPT = attempt_id(1, 1, "00000000")
OTHER = attempt_id(1, 2, "00000000")


def payload(sequence: int, attempt=ATTEMPT) -> PayloadId:
    return PayloadId(attempt, sequence, OwnerId(0))


@pytest.mark.parametrize("after_sending", [False, True])
def test_failed_send_is_repeated_until_it_passes(after_sending):
    transport, clock = MemoryTransport(), ManualClock()
    failing = FailingSender(transport, FaultPlan(times=3), after_sending=after_sending)
    RetryingSender(failing, clock=clock, policy=RetryPolicy(attempts=4, first_delay_s=1, max_delay_s=9)).send(payload(0), b"x")
    assert failing.fired == 3
    assert clock.monotonic_s() == 7.0
    assert transport.stored() == (payload(0),)


def test_repeated_send_gives_up_as_the_policy_says():
    failing = FailingSender(MemoryTransport(), FaultPlan(times=None))
    with pytest.raises(TransportError, match="on purpose"):
        RetryingSender(failing, clock=ManualClock(), policy=RetryPolicy(attempts=3)).send(payload(0), b"x")
    assert failing.fired == 3


def test_stop_ends_the_repeating():
    transport = MemoryTransport()
    failing = FailingSender(transport, FaultPlan(times=None))

    class StoppingClock(ManualClock):
        def sleep(self, seconds: float) -> None:
            sender.stop_and_wait(ATTEMPT)  # must not wait for the send that sleeps here

    sender = RetryingSender(failing, clock=StoppingClock(), policy=RetryPolicy(attempts=100))
    with pytest.raises(TransportError, match="stopped"):
        sender.send(payload(0), b"x")
    assert failing.fired == 1


def test_stop_waits_for_the_send_that_runs():
    transport = MemoryTransport()
    holding = HoldingSender(transport, lambda _: True)
    sender = RetryingSender(holding, clock=ManualClock())
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(sender.send, payload(0), b"x")
        assert holding.holding.wait(30)
        stopping = pool.submit(sender.stop_and_wait, ATTEMPT)
        with pytest.raises(TimeoutError):
            stopping.result(0.05)
        holding.release()
        stopping.result(30)
        sending.result(30)
    assert transport.stored() == (payload(0),)


def test_stop_that_waits_too_long_says_so_and_still_refuses():
    holding = HoldingSender(MemoryTransport(), FaultPlan())
    sender = RetryingSender(holding, clock=ManualClock(), stop_timeout_s=0.05)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, payload(0), b"x")
        assert holding.holding.wait(30)
        with pytest.raises(DeadlineError, match="1 sends still ran"):
            sender.stop_and_wait(ATTEMPT)
        with pytest.raises(TransportError, match="stopped"):
            sender.send(payload(1), b"x")
        holding.release()
        sending.result(30)
    sender.stop_and_wait(ATTEMPT)


class Meter:
    """A sender that records how many bytes are inside it at once, and lets go when told."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.most = 0
        self.order: list[int] = []

    def send(self, payload_id, data):
        with self.lock:
            self.order.append(payload_id.sequence)
            self.inside += len(data)
            self.most = max(self.most, self.inside)
        threading.Event().wait(0.002)
        with self.lock:
            self.inside -= len(data)

    def stop_and_wait(self, attempt): ...

    def cleanup(self, attempt): ...


def test_bytes_on_the_way_stay_within_the_limit():
    meter = Meter()
    sender = LimitedSender(meter, max_inflight_nbytes=250)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: sender.send(payload(n), bytes(100)), range(24)))
    assert meter.most == 200, "two fit, three do not"
    assert sender.inflight_nbytes == 0
    assert len(meter.order) == 24


def test_payload_larger_than_the_limit_goes_alone():
    meter = Meter()
    sender = LimitedSender(meter, max_inflight_nbytes=250)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: sender.send(payload(n), bytes(1000 if n == 3 else 100)), range(8)))
    assert meter.most == 1000
    assert len(meter.order) == 8


def test_number_on_the_way_is_limited_for_empty_payloads_too():
    holding = HoldingSender(MemoryTransport(), FaultPlan(times=None))
    sender = LimitedSender(holding, max_inflight_nbytes=100, max_inflight=2)
    with ThreadPoolExecutor(4) as pool:
        sends = [pool.submit(sender.send, payload(n), b"") for n in range(4)]
        assert holding.holding.wait(30)
        threading.Event().wait(0.05)
        assert holding.fired <= 2
        holding.release()
        for send in sends:
            send.result(30)
    assert holding.fired == 4


def test_stop_wakes_the_sends_that_wait_for_room():
    holding = HoldingSender(MemoryTransport(), FaultPlan(lambda p: p.sequence == 0))
    sender = LimitedSender(RetryingSender(holding, clock=ManualClock()), max_inflight_nbytes=10)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(sender.send, payload(0), bytes(10))
        assert holding.holding.wait(30)
        waiting = pool.submit(sender.send, payload(1), bytes(10))
        other = pool.submit(sender.send, payload(0, OTHER), bytes(10))
        stopping = pool.submit(sender.stop_and_wait, ATTEMPT)
        with pytest.raises(TransportError, match="stopped"):
            waiting.result(30)
        holding.release()
        for call in (first, other, stopping):
            call.result(30)


@pytest.mark.parametrize("limits", [(0, 1), (1, 0)])
def test_limits_that_let_nothing_through_are_rejected(limits):
    with pytest.raises(RejectedError):
        LimitedSender(MemoryTransport(), max_inflight_nbytes=limits[0], max_inflight=limits[1])


def test_log_names_payload_bytes_and_failure(caplog):
    caplog.set_level(logging.DEBUG)
    failing = FailingSender(MemoryTransport(), FaultPlan(lambda p: p.sequence == 1))
    sender = LoggingSender(failing, clock=ManualClock())
    sender.send(payload(0), b"12345")
    with pytest.raises(TransportError):
        sender.send(payload(1), b"x")
    sender.cleanup(ATTEMPT)
    texts = [record.getMessage() for record in caplog.records]
    assert f"{payload(0)}: sent 5 bytes in 0.000 s" in texts
    assert any(str(payload(1)) in text and "failed" in text for text in texts)
    assert any("cleaned up" in text for text in texts)


def test_dropped_payload_is_counted_and_missing():
    transport = MemoryTransport()
    dropping = DroppingSender(transport, FaultPlan(lambda p: p.sequence == 1))
    for sequence in range(3):
        dropping.send(payload(sequence), b"x")
    assert dropping.plan.struck == (payload(1),)
    assert transport.stored() == (payload(0), payload(2))
    assert PayloadEntry.of(payload(0), b"x").payload_id(ATTEMPT) == payload(0)
