"""One owner's way out: each attempt's payloads go to the store or to the relay tree, as the coordinator chose for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from deltarefit.errors import RefitError, RejectedError
from deltarefit.ids import AttemptId, PayloadId
from deltarefit.runtime.clock import Clock, IdSource
from deltarefit.runtime.events import EventLog
from deltarefit.runtime.relays import TimedRelaySender, relay_context
from deltarefit.runtime.settings import PublisherSettings
from deltarefit.transport import ObjectStoreSender, PayloadSender, RetryingSender, RunStore, keys
from deltarefit.transport.relay import Peer

__all__ = ["AttemptSender", "attempt_sender"]

_LOG = logging.getLogger(__name__)
_MAX_TEXT = 2000
OpenRelaySender = Callable[[Callable[[], Sequence[Peer]]], TimedRelaySender]


class AttemptSender:
    """A ``PayloadSender`` that is told beforehand which way an attempt goes. Calls but ``send`` come from one thread."""

    def __init__(
        self,
        to_store: PayloadSender,
        open_relay: OpenRelaySender,
        *,
        wrap: Callable[[PayloadSender], PayloadSender],
        log: EventLog,
    ) -> None:
        """``wrap`` adds retries and, in tests, faults, on either way."""
        self._to_store = wrap(to_store)
        self._open_relay = open_relay
        self._wrap = wrap
        self._log = log
        self._peers: tuple[Peer, ...] = ()
        self._relay: TimedRelaySender | None = None
        self._to_relay: PayloadSender | None = None
        self._relayed: set[AttemptId] = set()
        self._crossed = 0
        self._cleaning: threading.Thread | None = None

    def begin(self, attempt: AttemptId, relays: Sequence[Peer]) -> None:
        """Payloads of this attempt go over these relays; without any, over the store."""
        self._join_cleaning()
        self._peers = tuple(relays)
        if not relays:
            return
        if self._relay is None:
            self._relay = self._open_relay(lambda: self._peers)
            self._to_relay = self._wrap(self._relay)
        self._relayed.add(attempt)

    def is_relayed(self, attempt: AttemptId) -> bool:
        """Whether it goes over relays."""
        return attempt in self._relayed

    def crossed_nbytes(self) -> int:
        """Payload bytes that went to relays since the last call, repeated ones included."""
        if self._relay is None:
            return 0
        before, self._crossed = self._crossed, self._relay.sent_nbytes
        return self._crossed - before

    def send(self, payload_id: PayloadId, data: bytes | memoryview) -> None:
        """See ``PayloadSender``."""
        if payload_id.attempt in self._relayed:
            if self._to_relay is None:
                raise RejectedError(f"{payload_id}: sent by relay before any attempt began")
            self._to_relay.send(payload_id, data)
            return
        with self._log.stage("send", payload_id.attempt, nbytes=memoryview(data).nbytes, payload=str(payload_id)):
            self._to_store.send(payload_id, data)

    def stop_and_wait(self, attempt: AttemptId) -> None:
        """See ``PayloadSender``."""
        if self._relay is not None and attempt in self._relayed:
            self._relay.stop_and_wait(attempt)
            self._relay.forget([attempt])
        self._to_store.stop_and_wait(attempt)

    def cleanup(self, attempt: AttemptId) -> None:
        """See ``PayloadSender``."""
        relay = self._relay
        if relay is not None and attempt in self._relayed:
            self._relayed.discard(attempt)
            self._join_cleaning()
            # Relays are told over connections of their own, which takes several round trips; nobody has to wait for it.
            self._cleaning = threading.Thread(target=self._clean, args=(relay, attempt), name="deltarefit-clean", daemon=True)
            self._cleaning.start()
        self._to_store.cleanup(attempt)

    def close(self) -> None:
        """End all connections."""
        self._join_cleaning()
        if self._relay is not None:
            self._relay.close()

    def _clean(self, relay: TimedRelaySender, attempt: AttemptId) -> None:
        try:
            relay.cleanup(attempt)
            relay.forget([attempt])
        except RefitError as error:
            _LOG.warning("payloads of %s stay on relays for now: %s", attempt, error)

    def _join_cleaning(self) -> None:
        thread, self._cleaning = self._cleaning, None
        if thread is not None:
            thread.join()


def attempt_sender(
    store: RunStore,
    rank: int,
    settings: PublisherSettings,
    *,
    key: bytes | None,
    wrap: Callable[[PayloadSender], PayloadSender] | None,
    log: EventLog,
    clock: Clock,
    ids: IdSource,
) -> AttemptSender:
    """The way out of the owner on this training rank; ``wrap`` is the user's.

    Raises:
        RejectedError: TLS files are missing or do not belong together.
    """
    context = relay_context(store.url, f"owner-{rank}", key=key, tls=settings, clock=clock, ids=ids)

    def open_relay(peers: Callable[[], Sequence[Peer]]) -> TimedRelaySender:
        return TimedRelaySender(
            context,
            peers,
            fan_out=settings.relay_fan_out,
            max_retained_nbytes=settings.relay_retained_nbytes,
            log=log,
            on_trouble=tell,
        )

    def tell(attempt: AttemptId, text: str) -> None:
        try:
            store.put(keys.broken(attempt, rank), text.encode()[:_MAX_TEXT])
        except RefitError as error:
            _LOG.warning("%s: not everything gets through by relay (%s), and nobody could be told: %s", attempt, text, error)

    def wrapped(inner: PayloadSender) -> PayloadSender:
        return RetryingSender(inner if wrap is None else wrap(inner), clock=clock)

    return AttemptSender(ObjectStoreSender(store), open_relay, wrap=wrapped, log=log)
