"""Payloads within one process: for tests, and for a trainer and an engine that share one."""

from __future__ import annotations

import threading

from deltarefit.errors import PayloadMissingError
from deltarefit.ids import AttemptId, PayloadId
from deltarefit.transport.base import check_payload
from deltarefit.transport.guard import STOP_TIMEOUT_S, SendGuard

__all__ = ["MemoryTransport"]


class MemoryTransport:
    """``PayloadSender`` and ``PayloadSource`` in one object, shared by both sides."""

    def __init__(self, *, stop_timeout_s: float = STOP_TIMEOUT_S) -> None:
        self._guard = SendGuard(stop_timeout_s)
        self._lock = threading.Lock()
        self._payloads: dict[PayloadId, bytes] = {}

    def send(self, payload_id: PayloadId, data: bytes | memoryview) -> None:
        """Keep a copy."""
        with self._guard.sending(payload_id):
            copy = bytes(data)
            with self._lock:
                self._payloads[payload_id] = copy

    def fetch(self, payload_id: PayloadId, *, nbytes: int, digest: str) -> bytes:
        """See ``PayloadSource``."""
        with self._lock:
            data = self._payloads.get(payload_id)
        if data is None:
            raise PayloadMissingError(f"{payload_id}: there is no such payload in this process")
        check_payload(payload_id, data, nbytes=nbytes, digest=digest)
        return data

    def stop_and_wait(self, attempt: AttemptId) -> None:
        """See ``PayloadSender``."""
        self._guard.stop_and_wait(attempt)

    def cleanup(self, attempt: AttemptId) -> None:
        """Forget the attempt's payloads."""
        self._guard.stop_and_wait(attempt)
        with self._lock:
            self._payloads = {key: data for key, data in self._payloads.items() if key.attempt != attempt}

    def stored(self) -> tuple[PayloadId, ...]:
        """What is held now, in the declared order."""
        with self._lock:
            return tuple(sorted(self._payloads))
