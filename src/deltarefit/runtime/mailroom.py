"""A receiver's mailbox, looked into from a thread of its own: applying payloads never waits for the store's answer.

Over a long link a look takes a round trip, and so does removing a message. Here both happen beside the receiver's one thread,
which is woken when something came. Without a running thread it is the mailbox itself.

The next message of whoever wrote last is asked for by its name, which takes one round trip where a listing and a read take two;
between attempts now and then, during one, and shortly after a message, often. Then several threads ask, one shortly after the
other: a message that just missed one question meets the next one, instead of waiting for that round trip and then for its own.
Listings go on more rarely, for messages that cannot be named beforehand.
Messages that are done with are removed by another thread, so that no look waits behind a removal, and answers are posted by one
more, in their order, so that payloads are applied meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from deltarefit.errors import RefitError
from deltarefit.runtime.clock import Clock, Pace
from deltarefit.transport import Mail, Mailbox
from deltarefit.transport.keys import MailKey
from deltarefit.transport.mailbox import Sealed

__all__ = ["MailRoom"]

_LOG = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
_END_S = 5.0
_ASKING = 3
"""Questions for one message at the same time."""
_LIST_S = 1.0
"""How often all messages are listed once somebody has written."""


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
        self._remover = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"deltarefit-unmail-{mailbox.me}")
        self._poster = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"deltarefit-post-{mailbox.me}")
        self._asker = ThreadPoolExecutor(2 * _ASKING, thread_name_prefix=f"deltarefit-ask-{mailbox.me}")
        self._asked: list[tuple[MailKey, Future[Sealed]]] = []
        """Questions for the next message that have not been looked at."""
        self._listing = Pace(clock, first_s=_LIST_S, most_s=_LIST_S)
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
        """As ``Mailbox.post``; while the thread runs, it happens soon, and trouble is logged: who waits for it runs
        into its deadline.

        What is answered leads to the next message soon, so the thread looks more often again.
        """
        if self._thread is None:
            self._mailbox.post(to, data)
            return
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._poster.submit(self._post, to, data)

    def acknowledge(self, *taken: str) -> None:
        """As ``Mailbox.acknowledge``; while the thread runs, it happens soon."""
        if self._thread is None:
            self._mailbox.acknowledge(*taken)
            return
        with self._lock:
            self._done.extend(taken)
        self._begin(self._remover, self._remove)

    def close(self) -> None:
        """Stop looking, after removing what was acknowledged. May be called again."""
        self._is_closing = True
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_END_S)
        posted, removed = self._begin(self._poster, lambda: None), self._begin(self._remover, self._remove)
        for pool in (self._poster, self._remover, self._asker):
            pool.shutdown(wait=False)
        wait([future for future in (posted, removed) if future is not None], _END_S)

    @staticmethod
    def _begin(pool: ThreadPoolExecutor, work: Callable[[], ResultT]) -> Future[ResultT] | None:
        with contextlib.suppress(RuntimeError):  # closed meanwhile, or the process ends: what is left there is swept later
            return pool.submit(work)
        return None

    def _post(self, to: str, data: bytes) -> None:
        try:
            self._mailbox.post(to, data)
        except RefitError as error:
            _LOG.warning("%s: an answer to %s was perhaps not left: %s", self._mailbox.me, to, error)
        except Exception:
            _LOG.exception("%s: an answer to %s was not left", self._mailbox.me, to)
        self._busy.reset()
        self._wake.set()

    def _run(self) -> None:
        while not self._is_closing:
            try:
                found = self._look()
            except RefitError as error:
                with self._lock:
                    self._failure = error
                found = []
            except Exception:
                _LOG.exception("mailbox of %s: unexpected failure, goes on", self._mailbox.me)
                found = []
            if found:
                self._busy.reset()
                if not self.is_busy:
                    self._idle.reset()
                with self._lock:
                    self._came.extend(found)
            if found or self._failure is not None:
                self._news.set()
            if not found:
                self._wake.wait(self._pause_s())
                self._wake.clear()

    def _pause_s(self) -> float:
        following = self._mailbox.following
        if following is not None and self._num_asked(following) == _ASKING:
            return _LIST_S  # each answer wakes the thread
        return (self._busy if self.is_busy and following is not None else self._idle).remaining_s

    def _look(self) -> list[Mail]:
        following = self._mailbox.following
        if following is not None and (mail := self._take(following, self._busy if self.is_busy else self._idle)) is not None:
            return [mail]
        pace = self._idle if following is None else self._listing
        return self._mailbox.take(0.0) if pace.is_due else []

    def _take(self, following: MailKey, pace: Pace) -> Mail | None:
        """The message of this name if any question for it was answered with it; otherwise ask once more when it is time to.

        Messages often come in pairs, so the one after it is asked for, too, and kept until its turn.
        """
        names = (following, following._replace(sequence=following.sequence + 1))
        self._asked = [one for one in self._asked if one[0] in names]
        answered = [one for one in self._asked if one[1].done()]
        for one in sorted(answered, key=lambda one: one[0] != following):  # a failure of the other must not hide this one
            self._asked.remove(one)
            parts, sealed = one[0], one[1].result()
            if parts != following and sealed is not None:
                self._asked.append(one)
            elif parts == following and (mail := self._mailbox.take_read(following, sealed)) is not None:
                return mail
        if self._num_asked(following) < _ASKING and pace.is_due:
            for parts in names[: 2 if self.is_busy else 1]:
                if self._num_asked(parts) < _ASKING:
                    self._ask(parts)
        return None

    def _ask(self, parts: MailKey) -> None:
        answer = self._begin(self._asker, lambda: self._mailbox.read(parts))
        if answer is not None:
            self._asked.append((parts, answer))
            answer.add_done_callback(lambda _: self._wake.set())

    def _num_asked(self, parts: MailKey) -> int:
        return sum(one[0] == parts for one in self._asked)

    def _remove(self) -> None:
        """On the second thread. What cannot be removed now is tried again with what follows, and at the end."""
        with self._lock:
            done, self._done = self._done, []
        if not done:
            return
        try:
            self._mailbox.acknowledge(*done)
        except RefitError as error:
            _LOG.info("messages of %s stay in the store for now: %s", self._mailbox.me, error)
            with self._lock:
                self._done = [*done, *self._done]
