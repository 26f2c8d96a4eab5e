"""A receiver's mailbox, looked into from a thread of its own: applying payloads never waits for the store's answer.

Over a long link a look takes a round trip, and so does removing a message. Here both happen beside the receiver's one thread,
which is woken when something came. Without a running thread it is the mailbox itself.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

from deltarefit.errors import RefitError
from deltarefit.runtime.clock import Clock, Pace
from deltarefit.transport import Mail, Mailbox

__all__ = ["MailRoom"]

_LOG = logging.getLogger(__name__)
_END_S = 5.0


class MailRoom:
    """Used by one thread, beside its own."""

    def __init__(self, mailbox: Mailbox, clock: Clock, *, busy: Pace, idle: Pace, news: threading.Event) -> None:
        """Look as often as ``busy`` says during an attempt, as ``idle`` says otherwise; ``news`` is set when mail came."""
        self.is_busy = False
        self._mailbox = mailbox
        self._clock = clock
        self._busy = busy
        self._idle = idle
        self._news = news
        self._lock = threading.Lock()
        self._came: deque[Mail] = deque()
        self._done: list[str] = []
        """Keys of messages to remove."""
        self._failure: RefitError | None = None
        self._wake = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """From now on look by oneself."""
        self._thread = threading.Thread(target=self._run, name=f"deltarefit-mail-{self._mailbox.me}", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def take(self, timeout_s: float) -> list[Mail]:
        """As ``Mailbox.take``; while the thread runs, what it has found, without waiting."""
        if self._thread is None:
            return self._mailbox.take(timeout_s)
        with self._lock:
            failure, self._failure = self._failure, None
            came = list(self._came)
            self._came.clear()
        if failure is not None and not came:
            raise failure
        return came

    def post(self, to: str, data: bytes) -> None:
        """As ``Mailbox.post``."""
        self._mailbox.post(to, data)

    def acknowledge(self, *taken: str) -> None:
        """As ``Mailbox.acknowledge``; while the thread runs, it happens soon."""
        if self._thread is None:
            self._mailbox.acknowledge(*taken)
            return
        with self._lock:
            self._done.extend(taken)
        self._wake.set()

    def close(self) -> None:
        """Stop looking, after removing what was acknowledged."""
        self._is_closing = True
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_END_S)

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._remove()
                found = self._mailbox.take(0.0)
            except RefitError as error:
                with self._lock:
                    self._failure = error
                found = []
            except Exception:
                _LOG.exception("mailbox of %s: unexpected failure, goes on", self._mailbox.me)
                found = []
            if found:
                self._idle.reset()
                self._busy.reset()
                with self._lock:
                    self._came.extend(found)
            if found or self._failure is not None:
                self._news.set()
            pace = self._busy if self.is_busy else self._idle
            if not pace.is_due:
                self._wake.wait(pace.remaining_s)
                self._wake.clear()
        self._remove_quietly()

    def _remove(self) -> None:
        with self._lock:
            done, self._done = self._done, []
        if not done:
            return
        try:
            self._mailbox.acknowledge(*done)
        except RefitError:
            with self._lock:
                self._done = [*done, *self._done]
            raise

    def _remove_quietly(self) -> None:
        try:
            self._remove()
        except RefitError as error:
            _LOG.info("messages of %s stay in the store for now: %s", self._mailbox.me, error)
