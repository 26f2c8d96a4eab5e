"""Transports that misbehave on purpose, and count how often they did, so that a test can assert that its fault fired."""

from __future__ import annotations

import threading
from collections.abc import Callable

from deltarefit.errors import TransportError
from deltarefit.ids import AttemptId, PayloadId
from deltarefit.transport import Clock, PayloadSender, PayloadSource

__all__ = [
    "CorruptingSender",
    "DelayingSender",
    "DroppingSender",
    "FailingSender",
    "FaultPlan",
    "HoldingSender",
    "TruncatingSource",
]

When = Callable[[PayloadId], bool]


class FaultPlan:
    """Which payloads a fault strikes, and how often. Safe for several threads."""

    def __init__(self, when: When = lambda _: True, *, times: int | None = 1) -> None:
        """``when``: candidates; ``times``: the first so many of them are struck, None for all."""
        self._when = when
        self._times = times
        self._lock = threading.Lock()
        self._struck: list[PayloadId] = []

    def strikes(self, payload_id: PayloadId) -> bool:
        """Whether to strike now; counts it if so."""
        with self._lock:
            if (self._times is not None and len(self._struck) >= self._times) or not self._when(payload_id):
                return False
            self._struck.append(payload_id)
            return True

    @property
    def fired(self) -> int:
        """How often the fault struck."""
        with self._lock:
            return len(self._struck)

    @property
    def struck(self) -> tuple[PayloadId, ...]:
        """Which payloads it struck, in the order of striking."""
        with self._lock:
            return tuple(self._struck)


class _FaultySender:
    """A sender around a sender, with a plan."""

    def __init__(self, inner: PayloadSender, when: When | FaultPlan) -> None:
        self.inner = inner
        self.plan = when if isinstance(when, FaultPlan) else FaultPlan(when)

    @property
    def fired(self) -> int:
        """How often the fault struck."""
        return self.plan.fired

    def stop_and_wait(self, attempt: AttemptId) -> None:
        """Passed on."""
        self.inner.stop_and_wait(attempt)

    def cleanup(self, attempt: AttemptId) -> None:
        """Passed on."""
        self.inner.cleanup(attempt)


class CorruptingSender(_FaultySender):
    """Flips one bit of the middle byte on the way; an empty payload gains a byte."""

    def send(self, payload_id: PayloadId, data: bytes | memoryview) -> None:
        """Send, damaged if the plan says so."""
        if self.plan.strikes(payload_id):
            damaged = bytearray(data) or bytearray(1)
            damaged[len(damaged) // 2] ^= 0x10
            data = bytes(damaged)
        self.inner.send(payload_id, data)


class DroppingSender(_FaultySender):
    """Says that it sent, and did not."""

    def send(self, payload_id: PayloadId, data: bytes | memoryview) -> None:
        """Send, unless the plan says to lose it."""
        if not self.plan.strikes(payload_id):
            self.inner.send(payload_id, data)


class DelayingSender(_FaultySender):
    """Waits before it sends."""

    def __init__(self, inner: PayloadSender, when: When | FaultPlan, *, delay_s: float, clock: Clock) -> None:
        super().__init__(inner, when)
        self._delay_s = delay_s
        self._clock = clock

    def send(self, payload_id: PayloadId, data: bytes | memoryview) -> None:
        """Send, late if the plan says so."""
        if self.plan.strikes(payload_id):
            self._clock.sleep(self._delay_s)
        self.inner.send(payload_id, data)


class FailingSender(_FaultySender):
    """Raises ``TransportError``: before anything was sent, or after it (a lost reply)."""

    def __init__(self, inner: PayloadSender, when: When | FaultPlan, *, after_sending: bool = False) -> None:
        super().__init__(inner, when)
        self._after_sending = after_sending

    def send(self, payload_id: PayloadId, data: bytes | memoryview) -> None:
        """Send, or fail if the plan says so."""
        fails = self.plan.strikes(payload_id)
        if self._after_sending or not fails:
            self.inner.send(payload_id, data)
        if fails:
            raise TransportError(f"{payload_id}: failed on purpose {'after' if self._after_sending else 'before'} sending")


class HoldingSender(_FaultySender):
    """Holds a send in the middle until ``release``: for payloads that arrive late."""

    def __init__(self, inner: PayloadSender, when: When | FaultPlan, *, timeout_s: float = 60.0) -> None:
        super().__init__(inner, when)
        self._timeout_s = timeout_s
        self.holding = threading.Event()
        """Set once a send is held."""
        self._released = threading.Event()

    def release(self) -> None:
        """Let the held sends, and all later ones, go on."""
        self._released.set()

    def send(self, payload_id: PayloadId, data: bytes | memoryview) -> None:
        """Send, after ``release`` if the plan says so."""
        if self.plan.strikes(payload_id):
            self.holding.set()
            if not self._released.wait(self._timeout_s):
                raise TransportError(f"{payload_id}: held for {self._timeout_s:g} s and never released")
        self.inner.send(payload_id, data)


class TruncatingSource:
    """Returns a payload without its last byte, as a source that checks nothing would: receivers must notice by themselves."""

    def __init__(self, inner: PayloadSource, when: When | FaultPlan) -> None:
        self.inner = inner
        self.plan = when if isinstance(when, FaultPlan) else FaultPlan(when)

    @property
    def fired(self) -> int:
        """How often the fault struck."""
        return self.plan.fired

    def fetch(self, payload_id: PayloadId, *, nbytes: int, digest: str) -> bytes:
        """Fetch, cut short if the plan says so."""
        data = self.inner.fetch(payload_id, nbytes=nbytes, digest=digest)
        return data[:-1] if self.plan.strikes(payload_id) else data
