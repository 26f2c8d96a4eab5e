"""Matters that cut across transports, each a sender around a sender: repeating, limiting, logging.

Order them ``LoggingSender(LimitedSender(RetryingSender(inner)))``: a repeated send keeps its room, and the log shows what it
took in all.
"""

from __future__ import annotations

import logging
import threading

from deltarefit.errors import RefitError, RejectedError, TransportError
from deltarefit.ids import AttemptId, PayloadId
from deltarefit.transport.base import Clock, PayloadSender
from deltarefit.transport.guard import STOP_TIMEOUT_S, SendGuard
from deltarefit.transport.retry import RetryPolicy, retry

__all__ = ["LimitedSender", "LoggingSender", "RetryingSender"]


class RetryingSender:
    """Repeats a send that failed with ``TransportError``, unless its attempt has been stopped meanwhile."""

    def __init__(
        self, inner: PayloadSender, *, clock: Clock, policy: RetryPolicy | None = None, stop_timeout_s: float = STOP_TIMEOUT_S
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._policy = policy if policy is not None else RetryPolicy()
        self._guard = SendGuard(stop_timeout_s)

    def send(self, payload_id: PayloadId, data: bytes | memoryview) -> None:
        """See ``PayloadSender``."""
        failures = 0
        while True:
            try:
                # The guard is left while waiting, so a stop does not wait for the delays.
                with self._guard.sending(payload_id):
                    self._inner.send(payload_id, data)
            except TransportError as error:
                failures += 1
                if failures >= self._policy.attempts or self._guard.is_stopped(payload_id.attempt):
                    raise
                logging.getLogger(__name__).warning("%s: send failed, trying again: %s", payload_id, error)
                self._clock.sleep(self._policy.delay_s(failures))
            else:
                return

    def stop_and_wait(self, attempt: AttemptId) -> None:
        """See ``PayloadSender``."""
        self._guard.stop_and_wait(attempt)
        self._inner.stop_and_wait(attempt)

    def cleanup(self, attempt: AttemptId) -> None:
        """See ``PayloadSender``."""
        self._guard.stop_and_wait(attempt)
        retry(f"cleanup of attempt {attempt}", lambda: self._inner.cleanup(attempt), policy=self._policy, clock=self._clock)


class LimitedSender:
    """Holds a send back until the bytes on the way leave room for it.

    Senders are let in as they ask, first come first served. A payload larger than the limit goes alone.
    """

    def __init__(self, inner: PayloadSender, *, max_inflight_nbytes: int, max_inflight: int = 64) -> None:
        if max_inflight_nbytes < 1 or max_inflight < 1:
            raise RejectedError(f"limits {max_inflight_nbytes} bytes, {max_inflight} payloads: expected at least 1 each")
        self._inner = inner
        self._max_nbytes = max_inflight_nbytes
        self._max_count = max_inflight
        self._changed = threading.Condition()
        self._stopped: set[AttemptId] = set()
        self._queue: list[object] = []
        self._nbytes = 0
        self._count = 0

    @property
    def inflight_nbytes(self) -> int:
        """Bytes that are inside the inner sender now."""
        with self._changed:
            return self._nbytes

    def send(self, payload_id: PayloadId, data: bytes | memoryview) -> None:
        """Wait for room, then send.

        Raises:
            TransportError: as the inner sender, or because the attempt was stopped while this waited.
        """
        nbytes = memoryview(data).nbytes
        self._enter(payload_id, nbytes)
        try:
            self._inner.send(payload_id, data)
        finally:
            with self._changed:
                self._nbytes -= nbytes
                self._count -= 1
                self._changed.notify_all()

    def _enter(self, payload_id: PayloadId, nbytes: int) -> None:
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                self._changed.wait_for(lambda: payload_id.attempt in self._stopped or self._may_enter(ticket, nbytes))
                if payload_id.attempt in self._stopped:
                    raise TransportError(f"{payload_id}: not sent, because its attempt was stopped")
                self._nbytes += nbytes
                self._count += 1
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def _may_enter(self, ticket: object, nbytes: int) -> bool:
        if self._queue[0] is not ticket:
            return False
        return self._count == 0 or (self._count < self._max_count and self._nbytes + nbytes <= self._max_nbytes)

    def stop_and_wait(self, attempt: AttemptId) -> None:
        """Also wakes and refuses the sends of the attempt that wait for room."""
        with self._changed:
            self._stopped.add(attempt)
            self._changed.notify_all()
        self._inner.stop_and_wait(attempt)

    def cleanup(self, attempt: AttemptId) -> None:
        """See ``PayloadSender``."""
        with self._changed:
            self._stopped.add(attempt)
            self._changed.notify_all()
        self._inner.cleanup(attempt)


class LoggingSender:
    """Logs every call: which payload, how many bytes, how long, how it ended."""

    def __init__(self, inner: PayloadSender, *, clock: Clock, logger: logging.Logger | None = None) -> None:
        self._inner = inner
        self._clock = clock
        self._log = logger if logger is not None else logging.getLogger(__name__)

    def send(self, payload_id: PayloadId, data: bytes | memoryview) -> None:
        """See ``PayloadSender``."""
        started_s = self._clock.monotonic_s()
        nbytes = memoryview(data).nbytes
        try:
            self._inner.send(payload_id, data)
        except RefitError as error:
            self._log.warning("%s: send of %d bytes failed after %.3f s: %s", payload_id, nbytes, self._since(started_s), error)
            raise
        self._log.debug("%s: sent %d bytes in %.3f s", payload_id, nbytes, self._since(started_s))

    def stop_and_wait(self, attempt: AttemptId) -> None:
        """See ``PayloadSender``."""
        started_s = self._clock.monotonic_s()
        self._inner.stop_and_wait(attempt)
        self._log.info("attempt %s: sends stopped in %.3f s", attempt, self._since(started_s))

    def cleanup(self, attempt: AttemptId) -> None:
        """See ``PayloadSender``."""
        started_s = self._clock.monotonic_s()
        self._inner.cleanup(attempt)
        self._log.info("attempt %s: cleaned up in %.3f s", attempt, self._since(started_s))

    def _since(self, started_s: float) -> float:
        return self._clock.monotonic_s() - started_s
