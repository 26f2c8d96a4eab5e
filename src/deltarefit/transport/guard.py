"""Which attempts are stopped, and which sends still run: the part of ``stop_and_wait`` that every sender shares."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from deltarefit.errors import DeadlineError, RejectedError, TransportError
from deltarefit.ids import AttemptId, PayloadId

__all__ = ["STOP_TIMEOUT_S", "SendGuard"]

STOP_TIMEOUT_S = 300.0
"""Longer than the slowest single send should take: one part's ``request_timeout_s`` with its repetitions."""


class SendGuard:
    """Lets sends in until their attempt is stopped, then waits for those inside. Attempt ids are never reused, so a stopped
    one is remembered for the life of the sender."""

    def __init__(self, stop_timeout_s: float = STOP_TIMEOUT_S) -> None:
        if stop_timeout_s <= 0:
            raise RejectedError(f"stop_timeout_s {stop_timeout_s}: expected more than 0")
        self._stop_timeout_s = stop_timeout_s
        self._changed = threading.Condition()
        self._stopped: set[AttemptId] = set()
        self._running: Counter[AttemptId] = Counter()

    @contextlib.contextmanager
    def sending(self, payload_id: PayloadId) -> Iterator[None]:
        """Hold this open while a send may still take effect.

        Raises:
            TransportError: the attempt was stopped.
        """
        attempt = payload_id.attempt
        with self._changed:
            self._refuse(payload_id)
            self._running[attempt] += 1
        try:
            yield
        finally:
            with self._changed:
                self._running[attempt] -= 1
                if not self._running[attempt]:
                    del self._running[attempt]
                self._changed.notify_all()

    def check(self, payload_id: PayloadId) -> None:
        """Raise ``TransportError`` if the attempt was stopped: for senders that wait in between."""
        with self._changed:
            self._refuse(payload_id)

    def is_stopped(self, attempt: AttemptId) -> bool:
        """Whether sends of this attempt are refused."""
        with self._changed:
            return attempt in self._stopped

    def stop_and_wait(self, attempt: AttemptId) -> None:
        """See ``PayloadSender.stop_and_wait``."""
        with self._changed:
            self._stopped.add(attempt)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._running[attempt], self._stop_timeout_s):
                raise DeadlineError(
                    f"attempt {attempt}: {self._running[attempt]} sends still ran {self._stop_timeout_s:g} s after they were "
                    "told to stop; nothing of the attempt may be cleaned up before they end"
                )
            del self._running[attempt]

    def _refuse(self, payload_id: PayloadId) -> None:
        if payload_id.attempt in self._stopped:
            raise TransportError(f"{payload_id}: not sent, because its attempt was stopped")
