"""Where a receiver's payloads come from and what bounds them: its settings, as what its parts take."""

from __future__ import annotations

import os
from collections.abc import Sequence

from deltarefit.errors import RejectedError
from deltarefit.ids import AttemptId, OwnerId, PayloadId, ReceiverId
from deltarefit.protocol import ReceptionSettings
from deltarefit.runtime.clock import Clock, IdSource, Pace
from deltarefit.runtime.delivery import DeliveryLimits
from deltarefit.runtime.events import EventLog
from deltarefit.runtime.feeds import Feed, ManifestFeed, RelayFeed
from deltarefit.runtime.node_share import NodeShare, open_node_share
from deltarefit.runtime.settings import ReceiverAgentSettings
from deltarefit.transport import BoundedSource, MailboxSettings, NodeCache, ObjectStoreSource, PayloadSource, RunStore
from deltarefit.transport.relay import RelaySource

__all__ = [
    "ReceiverFeeds",
    "busy_pace",
    "delivery_limits",
    "idle_pace",
    "receiver_feeds",
    "reception_settings",
    "relay_pace",
]


class _Downloads:
    """Records each download; what another engine of the node downloaded passes by."""

    def __init__(self, inner: PayloadSource, log: EventLog) -> None:
        self._inner = inner
        self._log = log

    def fetch(self, payload_id: PayloadId, *, nbytes: int, digest: str) -> bytes:
        with self._log.stage("fetch", payload_id.attempt, nbytes=nbytes, payload=str(payload_id)):
            return self._inner.fetch(payload_id, nbytes=nbytes, digest=digest)


class ReceiverFeeds:
    """Where one receiver gets its payloads from, attempt by attempt. Used by one thread."""

    def __init__(
        self,
        receiver: ReceiverId,
        *,
        store: RunStore,
        share: NodeShare | None,
        log: EventLog,
        clock: Clock,
        max_shared_nbytes: int,
        max_payload_nbytes: int,
    ) -> None:
        self._receiver = receiver
        self._store = store
        self._share = share
        self._clock = clock
        self._source: PayloadSource = _Downloads(ObjectStoreSource(store), log)
        self._cache: NodeCache | None = None
        # Files of a run on a local disk are in this node's memory already.
        if share is not None and max_shared_nbytes and store.directory is None and not store.url.startswith("memory:"):
            self._cache = NodeCache(self._source, share.payloads, clock=clock, max_nbytes=max_shared_nbytes)
            self._source = self._cache
        self._source = BoundedSource(self._source, max_payload_nbytes)
        self._max_payload_nbytes = max_payload_nbytes
        self._relay: RelaySource | None = None

    @property
    def node(self) -> str:
        """Names the node; empty if nothing is shared on it."""
        return "" if self._share is None else self._share.node

    @property
    def source(self) -> PayloadSource:
        """Fetches payloads from the run's store, once for all engines of a node."""
        return self._source

    def feed(self, attempt: AttemptId, owners: Sequence[OwnerId], transport: str) -> Feed:
        """Follow an attempt whose payloads travel that way.

        Raises:
            RejectedError: they come by relay, and this node shares no directory with one.
        """
        if transport != "relay":
            return ManifestFeed(self._store, self._source, attempt)
        if self._share is None:
            raise RejectedError(
                f"receiver {self._receiver}: {attempt} comes by relay, but this receiver shares no directory with its node's "
                "relay; set shared_directory, the same for both"
            )
        if self._relay is None:
            self._relay = RelaySource(
                self._share.relay, str(self._receiver), clock=self._clock, max_nbytes=self._max_payload_nbytes
            )
        return RelayFeed(self._relay, attempt, owners)

    def forget(self, attempt: AttemptId) -> None:
        """The attempt has ended: free what this node keeps of it."""
        if self._cache is not None:
            self._cache.forget(attempt)

    def close(self) -> None:
        """Let the node's relay forget this engine, and leave what the node shares."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None
        if self._share is not None:
            self._share.close()


def receiver_feeds(
    receiver: ReceiverId, store: RunStore, settings: ReceiverAgentSettings, *, log: EventLog, clock: Clock, ids: IdSource
) -> ReceiverFeeds:
    """What a receiver's settings say about where payloads come from."""
    share = open_node_share(settings.shared_directory, store.url, ids)
    return ReceiverFeeds(
        receiver,
        store=store,
        share=share,
        log=log,
        clock=clock,
        max_shared_nbytes=settings.shared_nbytes,
        max_payload_nbytes=settings.max_payload_nbytes,
    )


def reception_settings(settings: ReceiverAgentSettings) -> ReceptionSettings:
    return ReceptionSettings(queue_slots=settings.queue_slots, staging_limit_nbytes=settings.staging_nbytes)


def delivery_limits(settings: ReceiverAgentSettings) -> DeliveryLimits:
    return DeliveryLimits(
        ahead_nbytes=settings.ahead_nbytes,
        fetch_threads=settings.fetch_threads,
        decode_threads=settings.decode_threads or min(4, len(os.sched_getaffinity(0))),
        decode_ahead=settings.decode_ahead,
        decoded_nbytes=settings.decoded_nbytes,
        spill_directory=settings.spill_directory,
    )


def busy_pace(store: RunStore, clock: Clock) -> Pace:
    """How often to look into the store while an attempt is under way: ten times as often as between attempts."""
    polling = MailboxSettings.for_store(store)
    return Pace(clock, first_s=polling.first_poll_s, most_s=polling.max_poll_s / 10)


def relay_pace(clock: Clock) -> Pace:
    """How often to look into the directory that is shared with the node's relay."""
    polling = MailboxSettings()
    return Pace(clock, first_s=polling.first_poll_s, most_s=polling.max_poll_s / 5)


def idle_pace(store: RunStore, clock: Clock) -> Pace:
    """How often to look for mail between attempts: soon after some came, ever more rarely without."""
    polling = MailboxSettings.for_store(store)
    return Pace(clock, first_s=polling.first_poll_s, most_s=polling.max_poll_s)
