"""The request gate: no request ever sees partly applied weights (paper 7.2)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from deltarefit.errors import DeadlineError, RejectedError

__all__ = ["LocalGate", "RequestGate", "close_gate"]


class RequestGate(Protocol):
    """What a receiver needs of whatever admits requests to its engine. Both calls may be repeated."""

    def close(self, timeout_s: float) -> object:
        """Admit no new request, then return once none is running. Closing a closed gate returns at once.

        Any answer but None and True counts as if requests were still running: so locks and conditions say it.

        Raises:
            DeadlineError: requests were still running after ``timeout_s``; the gate stays closed.
        """

    def reopen(self) -> None:
        """Admit requests again."""


def close_gate(gate: RequestGate, timeout_s: float) -> None:
    """Close a gate that may be somebody else's. Raises DeadlineError also where it only answers that it could not."""
    answer = gate.close(timeout_s)
    if answer is not None and answer is not True:
        raise DeadlineError(
            f"closing the request gate: it answered {answer!r:.200} after at most {timeout_s} s, expected None or True once no "
            "request is running; raise request_timeout_s, or have the engine abort them"
        )


class LocalGate:
    """A gate inside one process: callers wrap each request in ``with gate.serving():``."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = True
        self._running = 0
        self._refusal = ""

    @property
    def is_open(self) -> bool:
        with self._changed:
            return self._is_open

    @contextmanager
    def serving(self, timeout_s: float | None = None) -> Iterator[None]:
        """Hold one request open; waits while the gate is closed.

        Raises:
            DeadlineError: the gate was still closed after ``timeout_s``.
            RejectedError: it was said that it will not open again, and why.
        """
        with self._changed:
            is_known = self._changed.wait_for(lambda: self._is_open or bool(self._refusal), timeout_s)
            if self._refusal:
                raise RejectedError(self._refusal)
            if not is_known:
                raise DeadlineError(f"a request waited {timeout_s} s for the request gate to reopen; a refit is still running")
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        with self._changed:
            self._is_open = False
            if not self._changed.wait_for(lambda: self._running == 0, timeout_s):
                raise DeadlineError(
                    f"closing the request gate: {self._running} requests still running after {timeout_s} s; "
                    "raise request_timeout_s, or have the engine abort them"
                )

    def reopen(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def refuse(self, why: str) -> None:
        """Admit nothing any more; requests that wait get the reason."""
        with self._changed:
            self._is_open = False
            self._refusal = why
            self._changed.notify_all()
