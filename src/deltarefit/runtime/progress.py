"""How far an attempt is, shown under the run for anyone who looks: ``deltarefit status --watch`` from another terminal.

Every participant of an attempt rewrites one small object while it works, about twice a second and from a thread of its own. A
refit that is over before the first of them is due writes none. It is for eyes only: nothing is decided by it, and a store that
does not take it harms nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from deltarefit.errors import RefitError, TransportError
from deltarefit.ids import AttemptId
from deltarefit.runtime.messages import decode_message, encode_message
from deltarefit.transport import RunStore, keys

__all__ = ["Progress", "ProgressBoard", "read_progress"]

_LOG = logging.getLogger(__name__)
_EVERY_S = 0.5
_LAST_S = 5.0
"""Longest wait for a write that is under way when the work ends."""
_MAX_NBYTES = 64 << 10
_MAX_SHOWN = 4096


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One participant of an attempt."""

    who: str
    """``owner <n>`` or ``receiver <name>``."""
    done_nbytes: int = 0
    """Input bytes that an owner compared."""
    total_nbytes: int = 0
    """Of all that it owns; 0 where nothing is compared."""
    payloads: int = 0
    """Sent by an owner, or applied by a receiver."""
    payload_nbytes: int = 0
    elapsed_s: float = 0.0
    """Since this participant began."""

    @property
    def left_s(self) -> float | None:
        """Seconds that the rest of the comparison takes at the pace so far; None if nobody knows."""
        if not 0 < self.done_nbytes <= self.total_nbytes:
            return None
        return self.elapsed_s * (self.total_nbytes - self.done_nbytes) / self.done_nbytes


class ProgressBoard:
    """Where one participant shows how far it is. Used by one thread."""

    def __init__(self, store: RunStore, *, every_s: float = _EVERY_S) -> None:
        self._store = store
        self._every_s = every_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def showing(self, attempt: AttemptId, read: Callable[[], Progress]) -> Iterator[None]:
        """Show what ``read`` gives, while the body runs. ``read`` is called from another thread."""
        self.begin(attempt, read)
        try:
            yield
        finally:
            self.end()

    def begin(self, attempt: AttemptId, read: Callable[[], Progress]) -> None:
        """Show what ``read`` gives until ``end``, or until the next beginning."""
        self.end()
        self._over = threading.Event()
        arguments = (self._over, keys.progress(attempt, keys.slug(read().who)), read)
        self._thread = threading.Thread(target=self._run, args=arguments, name="deltarefit-progress", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Write nothing more: after return the attempt's objects may be removed. May be called again."""
        self._over.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_LAST_S)

    def _run(self, over: threading.Event, key: str, read: Callable[[], Progress]) -> None:
        shown = None
        while not over.wait(self._every_s):
            progress = read()
            if progress == shown:
                continue
            try:
                self._store.put(key, encode_message(progress))
            except RefitError as error:
                _LOG.debug("progress is not shown: %s", error)
            shown = progress


def read_progress(store: RunStore, attempt: AttemptId) -> list[Progress]:
    """What the participants of an attempt show, by name; those that show nothing are not among them."""
    found = []
    for info in store.listing(keys.progress_prefix(attempt))[:_MAX_SHOWN]:
        data = store.find(info.key, max_nbytes=_MAX_NBYTES)
        if data is None:
            continue
        try:
            found.append(decode_message(data, Progress, sender=info.key))
        except TransportError as error:
            _LOG.debug("%s; not shown", error)
    return sorted(found, key=lambda progress: progress.who)
