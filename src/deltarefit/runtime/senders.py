"""One owner's way out: each attempt's payloads go to the store or to the relay tree, as the coordinator chose for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deltarefit.errors import RejectedError, TransportError
from deltarefit.ids import AttemptId, PayloadId
from deltarefit.runtime.clock import Clock, Deadline, IdSource
from deltarefit.runtime.events import EventLog
from deltarefit.runtime.relays import TimedRelaySender, relay_context
from deltarefit.runtime.settings import PublisherSettings
from deltarefit.transport import ObjectStoreSender, PayloadSender, RetryingSender, RunStore
from deltarefit.transport.relay import Peer

__all__ = ["AttemptSender", "attempt_sender"]

_LOOK_S = 0.25
_STALL_S = 30.0
"""A tree that takes no byte for so long has failed; dead relays are passed over within 10 s (``RelaySettings``)."""

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
        clock: Clock,
    ) -> None:
        """``wrap`` adds retries and, in tests, faults, on either way."""
        self._to_store = wrap(to_store)
        self._open_relay = open_relay
        self._wrap = wrap
        self._log = log
        self._clock = clock
        self._peers: tuple[Peer, ...] = ()
        self._relay: TimedRelaySender | None = None
        self._to_relay: PayloadSender | None = None
        self._relayed: set[AttemptId] = set()
        self._crossed_before = 0

    def begin(self, attempt: AttemptId, relays: Sequence[Peer]) -> None:
        """Payloads of this attempt go over these relays; without any, over the store."""
        self._peers = tuple(relays)
        if not relays:
            return
        if self._relay is None:
            self._relay = self._open_relay(lambda: self._peers)
            self._to_relay = self._wrap(self._relay)
        self._relayed.add(attempt)
        self._crossed_before = self._relay.sent_nbytes

    def is_relayed(self, attempt: AttemptId) -> bool:
        """Whether it goes over relays."""
        return attempt in self._relayed

    @property
    def crossed_nbytes(self) -> int:
        """Payload bytes that went to relays since the last ``begin``, repeated ones included."""
        return 0 if self._relay is None else self._relay.sent_nbytes - self._crossed_before

    def send(self, payload_id: PayloadId, data: bytes | memoryview) -> None:
        """See ``PayloadSender``."""
        if payload_id.attempt in self._relayed:
            if self._to_relay is None:
                raise RejectedError(f"{payload_id}: sent by relay before any attempt began")
            self._to_relay.send(payload_id, data)
            return
        with self._log.stage("send", payload_id.attempt, nbytes=memoryview(data).nbytes, payload=str(payload_id)):
            self._to_store.send(payload_id, data)

    def settle(self, attempt: AttemptId, poll: Callable[[], None]) -> None:
        """Return once the tree has all of the attempt's payloads. The store has them when ``send`` returns.

        Args:
            attempt: which.
            poll: called now and then; what it raises ends the wait.

        Raises:
            TransportError: the tree takes nothing any more, or a relay refused a payload.
        """
        relay = self._relay
        if attempt not in self._relayed or relay is None:
            return
        moved, stall = relay.sent_nbytes, Deadline(self._clock, _STALL_S)
        while not relay.wait_until_delivered(attempt, _LOOK_S):
            poll()
            if relay.sent_nbytes != moved:
                moved, stall = relay.sent_nbytes, Deadline(self._clock, _STALL_S)
            elif stall.expired:
                raise TransportError(f"{attempt}: the relays took no byte for {_STALL_S:.0f} s: {self._named()}")
        if trouble := relay.trouble(attempt):
            raise TransportError(f"{attempt}: not everything was delivered by relay: {trouble}")

    def stop_and_wait(self, attempt: AttemptId) -> None:
        """See ``PayloadSender``."""
        if self._relay is not None and attempt in self._relayed:
            self._relay.stop_and_wait(attempt)
            self._relay.forget([attempt])
        self._to_store.stop_and_wait(attempt)

    def cleanup(self, attempt: AttemptId) -> None:
        """See ``PayloadSender``."""
        if self._relay is not None and attempt in self._relayed:
            self._relay.cleanup(attempt)
            self._relay.forget([attempt])
            self._relayed.discard(attempt)
        self._to_store.cleanup(attempt)

    def close(self) -> None:
        """End all connections."""
        if self._relay is not None:
            self._relay.close()

    def _named(self) -> str:
        return ", ".join(map(str, self._peers))


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
        )

    def wrapped(inner: PayloadSender) -> PayloadSender:
        return RetryingSender(inner if wrap is None else wrap(inner), clock=clock)

    return AttemptSender(ObjectStoreSender(store), open_relay, wrap=wrapped, log=log, clock=clock)
