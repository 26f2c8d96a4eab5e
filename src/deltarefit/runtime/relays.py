"""Relays as the training side sees them: who shows a beacon under the run, and whether they reach every required receiver."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from deltarefit.errors import RefitError, RejectedError, TransportError
from deltarefit.ids import AttemptId, PayloadId, ReceiverId
from deltarefit.run_key import key_print, key_trouble
from deltarefit.runtime.clock import Clock, IdSource
from deltarefit.runtime.events import EventLog, StageEvent
from deltarefit.runtime.members import Member
from deltarefit.runtime.messages import decode_message
from deltarefit.runtime.settings import PublisherSettings, RelayServiceSettings
from deltarefit.transport import BeaconWatch, RunStore, keys, read_beacons
from deltarefit.transport.relay import Peer, RelayContext, RelaySender, StreamKey, caller_tls, listener_tls

__all__ = ["RelayNotice", "Relays", "TimedRelaySender", "read_relays", "relay_context"]

_LOG = logging.getLogger(__name__)
_FORGET_LEASES = 4
"""A beacon that stood still for so many leases is garbage and is removed."""


class RelayNotice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a relay shows beside its beacon."""

    host: str
    """Where the trainer and other relays reach it."""
    port: int
    node: str
    """The rollout node whose engines it serves, as ``Membership.node`` names it."""
    key_print: str = ""
    """Fingerprint of its run key, as ``Membership.key_print``."""


def relay_context(
    run: str,
    name: str,
    *,
    key: bytes | None,
    tls: PublisherSettings | RelayServiceSettings,
    clock: Clock,
    ids: IdSource,
) -> RelayContext:
    """What every connection of one participant shares.

    Raises:
        RejectedError: TLS files are missing or do not belong together.
    """
    files = (tls.relay_tls_authority, tls.relay_tls_certificate, tls.relay_tls_key)
    if any(files) and not all(files):
        raise RejectedError("relay TLS: expected all of relay_tls_authority, relay_tls_certificate and relay_tls_key, or none")
    paths = {name: Path(file) for name, file in zip(("authority", "certificate", "key"), files, strict=True)}
    return RelayContext(
        run,
        name,
        lambda: b"".join(bytes.fromhex(ids.nonce()) for _ in range(4)),
        clock,
        key=key or b"",
        client_tls=caller_tls(**paths) if all(files) else None,
        server_tls=listener_tls(**paths) if all(files) else None,
    )


def read_relays(store: RunStore) -> list[Peer]:
    """All relays that show themselves, dead ones included, by name."""
    peers = []
    for reading in read_beacons(store, prefix=keys.RELAYS):
        notice = decode_message(reading.info, RelayNotice, sender=f"beacon of {reading.name}")
        peers.append(Peer(reading.name, notice.host, notice.port))
    return peers


class Relays:
    """The run's relays. Used by the coordinator's thread."""

    def __init__(
        self, store: RunStore, clock: Clock, lease_s: float, settings: PublisherSettings, context: RelayContext
    ) -> None:
        self._store = store
        self._lease_s = lease_s
        self._settings = settings
        self._context = context
        self._key_print = key_print(context.key)
        self._foreign: tuple[str, ...] = ()
        """Of relays that live and have another key, why they take no part."""
        self._watch = BeaconWatch(store, clock=clock, prefix=keys.RELAYS)
        if settings.transport != "object_store":
            self._alive()  # so that by the first refit it is known which of them still move

    def choose(self, required: Mapping[ReceiverId, Member], *, is_retry: bool) -> tuple[Peer, ...]:
        """Relays for one attempt, in the order that all owners use; empty: it goes over the object store.

        A relay serves the receivers of its node. ``auto`` takes the tree if it reaches every required receiver, and not for
        a retry: what failed once goes the way that needs nothing but the store.

        Raises:
            RejectedError: the setting says ``relay``, and some receiver's node has none.
        """
        if self._settings.transport == "object_store" or (self._settings.transport == "auto" and is_retry):
            return ()
        serving = self._alive()
        unserved = sorted(name for name, member in required.items() if member.membership.node not in serving)
        if not unserved and required:
            nodes = {member.membership.node for member in required.values()}
            return tuple(sorted((serving[node] for node in nodes), key=lambda peer: peer.name))
        if self._settings.transport == "relay":
            raise RejectedError(
                f"transport = relay, but no relay shows signs of life on the nodes of {', '.join(unserved)}; start one on each "
                f"rollout node with 'deltarefit relay --run {self._store.url} --listen HOST:PORT', as the engines' user and "
                "with their shared_directory, or set transport = auto" + "".join(f"; {text}" for text in self._foreign)
            )
        if serving:
            _LOG.warning("going over the object store: no relay on the nodes of %s", ", ".join(unserved))
        return ()

    def cleanup(self, attempt: AttemptId) -> None:
        """Have every relay forget an attempt that a former coordinator left."""
        peers = tuple(sorted(self._alive().values(), key=lambda peer: peer.name))
        if not peers:
            return
        with RelaySender(self._context, lambda: peers) as sender:
            sender.cleanup(attempt)

    def _alive(self) -> dict[str, Peer]:
        """By node, relays whose beacon moved within a lease, or that are seen for the first time."""
        found: dict[str, Peer] = {}
        dead, foreign = [], []
        for name, sighting in self._watch.look().items():
            if sighting.age_s > _FORGET_LEASES * self._lease_s:
                dead.append(keys.relay(name))
            if sighting.age_s > self._lease_s:
                continue
            try:
                notice = decode_message(sighting.reading.info, RelayNotice, sender=f"beacon of relay {name}")
                if trouble := key_trouble(self._key_print, notice.key_print, f"relay {name}"):
                    _LOG.warning("%s; it takes no part", trouble)
                    foreign.append(trouble)
                    continue
                found[notice.node] = msgspec.convert((name, notice.host, notice.port), Peer)
            except (TransportError, msgspec.ValidationError) as error:
                _LOG.warning("relay %s takes no part: %s", name, error)
        self._foreign = tuple(foreign)
        try:
            self._store.delete(dead)
        except RefitError as error:
            _LOG.info("beacons of dead relays stay for now: %s", error)
        return found


class TimedRelaySender(RelaySender):
    """Records for each payload the time from its submission until the tree has it (paper C: the transport interval)."""

    def __init__(
        self,
        context: RelayContext,
        peers: Callable[[], Sequence[Peer]],
        *,
        fan_out: int,
        max_retained_nbytes: int,
        log: EventLog,
        on_trouble: Callable[[AttemptId, str], None],
    ) -> None:
        """``on_trouble`` is called, from a thread of its own, when payloads of an attempt do not get through for good."""
        super().__init__(context, peers, fan_out=fan_out, max_retained_nbytes=max_retained_nbytes)
        self._log = log
        self._on_trouble = on_trouble
        self._told: set[AttemptId] = set()
        self._begun: dict[PayloadId, tuple[float, int]] = {}

    def send(self, payload_id: PayloadId, data: bytes | memoryview) -> None:
        """See ``RelaySender``."""
        self._begun[payload_id] = self._log.now_s(), memoryview(data).nbytes
        super().send(payload_id, data)

    def delivered(self, payload_id: PayloadId) -> None:
        """See ``ForwarderOwner``."""
        begun = self._begun.pop(payload_id, None)
        if begun is not None:
            t0_s, nbytes = begun
            where, now_s = self._log.where, self._log.now_s()
            self._log.add(StageEvent("send", where, payload_id.attempt, t0_s, now_s, nbytes, str(payload_id)))
        super().delivered(payload_id)

    def refused(self, payload_id: PayloadId, text: str) -> None:
        """See ``ForwarderOwner``."""
        super().refused(payload_id, text)
        self._tell(payload_id.attempt)

    def lost(self, stream: StreamKey, peer: Peer, why: str) -> None:
        """See ``ForwarderOwner``."""
        super().lost(stream, peer, why)
        self._tell(stream[0])

    def _tell(self, attempt: AttemptId) -> None:
        """With the sender's lock held, so the telling is done elsewhere."""
        text = self.trouble(attempt)
        if text and attempt not in self._told:
            self._told.add(attempt)
            threading.Thread(target=self._on_trouble, args=(attempt, text), name="deltarefit-trouble", daemon=True).start()

    def forget(self, attempts: Iterable[AttemptId]) -> None:
        """Payloads of these attempts are not waited for any more."""
        gone = set(attempts)
        self._begun = {name: begun for name, begun in self._begun.items() if name.attempt not in gone}
