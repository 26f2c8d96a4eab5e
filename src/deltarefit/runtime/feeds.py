"""Where payloads come from: the store, by the attempt's manifest, or the node's relay, which brings them by itself.

A feed is asked from the intake's threads. It knows which payloads there are, never what to do with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from deltarefit.errors import PayloadInvalidError
from deltarefit.ids import AttemptId, OwnerId, PayloadId
from deltarefit.protocol import EndMarker, end_digest
from deltarefit.transport import Manifest, PayloadEntry, PayloadSource, RunStore, keys, payload_digest
from deltarefit.transport.manifest import MAX_MANIFEST_NBYTES
from deltarefit.transport.relay import RelaySource

__all__ = ["Brought", "Feed", "Look", "ManifestFeed", "Offer", "RelayFeed"]


@dataclass(frozen=True, slots=True, order=True)
class Offer:
    """A payload that can be had now. Offers sort in the declared order."""

    name: PayloadId
    nbytes: int


@dataclass(frozen=True, slots=True)
class Brought:
    """A payload that is here."""

    name: PayloadId
    data: bytes
    digest: str
    """``payload_digest`` of the bytes."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was new at one look. Nothing is named twice."""

    offers: tuple[Offer, ...] = ()
    ended: tuple[EndMarker, ...] = ()
    is_moving: bool = False
    """Part of a payload came since the last look."""


class Feed(Protocol):
    """One attempt's payloads. ``look`` is called by one thread, ``bring`` by several."""

    patience_s: float
    """Once all owners have ended, what was sent shows up unless nothing at all was new for so long."""

    def look(self, wanted: PayloadId | None) -> Look:
        """What is new. ``wanted`` is the next one to apply, if it is not here yet.

        Raises:
            PayloadInvalidError: what is announced contradicts itself.
            TransportError: nothing can be seen now.
        """

    def bring(self, offer: Offer) -> Brought:
        """The bytes. Raises what ``PayloadSource.fetch`` raises."""


class ManifestFeed:
    """Follows the manifest in the run's store, part by part: one that did not grow is not read again."""

    patience_s = 5.0
    """Then the manifest is durable and complete; a listing that lags gets this long to show it."""

    def __init__(self, store: RunStore, source: PayloadSource, attempt: AttemptId) -> None:
        self._store = store
        self._source = source
        self._attempt = attempt
        self._read: dict[str, int] = {}
        """Length of each part when it was last read. A part only ever grows."""
        self._entries: dict[PayloadId, PayloadEntry] = {}
        self._ended: set[int] = set()

    def look(self, wanted: PayloadId | None) -> Look:
        """See ``Feed``."""
        del wanted
        offers: list[Offer] = []
        ended: list[EndMarker] = []
        for info in self._store.listing(keys.manifest_prefix(self._attempt)):
            if self._read.get(info.key) == info.nbytes:
                continue
            nbytes, part = self._store.get_as(info.key, self._decoded, max_nbytes=MAX_MANIFEST_NBYTES)
            self._check_owner(info.key, part)
            offers.extend(self._new(part))
            ended.extend(self._newly_ended(part))
            self._read[info.key] = nbytes  # what was read may be longer than what was listed
        return Look(tuple(sorted(offers)), tuple(ended))

    def bring(self, offer: Offer) -> Brought:
        """See ``Feed``."""
        entry = self._entries[offer.name]
        data = self._source.fetch(offer.name, nbytes=entry.nbytes, digest=entry.digest)
        return Brought(offer.name, data, entry.digest)

    def _decoded(self, data: bytes) -> tuple[int, Manifest]:
        return len(data), Manifest.decode(data, attempt=self._attempt)

    def _check_owner(self, key: str, part: Manifest) -> None:
        owners = {entry.owner for entry in part.entries} | {end.owner for end in part.ended}
        if any(keys.manifest_part(self._attempt, owner) != key for owner in owners):
            raise PayloadInvalidError(f"{key}: it lists payloads of owners {sorted(owners)}, not only its own")

    def _new(self, part: Manifest) -> list[Offer]:
        new = []
        for entry in part.entries:
            name = entry.payload_id(self._attempt)
            before = self._entries.setdefault(name, entry)
            if before is entry:
                new.append(Offer(name, entry.nbytes))
            elif before != entry:
                raise PayloadInvalidError(
                    f"{name}: listed with digest {entry.digest}, before with {before.digest}; ids are never reused"
                )
        return new

    def _newly_ended(self, part: Manifest) -> list[EndMarker]:
        new = []
        for end in part.ended:
            if end.owner not in self._ended:
                digests = [entry.digest for entry in part.entries if entry.owner == end.owner]
                marker = EndMarker(attempt=self._attempt, owner=OwnerId(end.owner), count=end.count, digest=end_digest(digests))
                self._ended.add(end.owner)
                new.append(marker)
        return new


class RelayFeed:
    """Watches the node's relay directory: each owner's payloads arrive in their order, and who ended comes with the flush."""

    patience_s = 30.0
    """Relays pass over dead ones within 10 s (``RelaySettings.dead_after_s``), and new connections start slowly."""

    def __init__(self, source: RelaySource, attempt: AttemptId, owners: Sequence[OwnerId]) -> None:
        self._source = source
        self._attempt = attempt
        self._next = dict.fromkeys(owners, 0)
        self._received_nbytes = 0

    def look(self, wanted: PayloadId | None) -> Look:
        """See ``Feed``."""
        offers = []
        for owner, first in self._next.items():
            name = PayloadId(self._attempt, first, owner)
            while (nbytes := self._source.arrived(name, is_wanted=name == wanted)) is not None:
                offers.append(Offer(name, nbytes))
                name = PayloadId(self._attempt, name.sequence + 1, owner)
            self._next[owner] = name.sequence
        before, self._received_nbytes = self._received_nbytes, self._source.received_nbytes(self._attempt)
        return Look(tuple(sorted(offers)), is_moving=self._received_nbytes != before)

    def bring(self, offer: Offer) -> Brought:
        """See ``Feed``."""
        data = self._source.take(offer.name, nbytes=offer.nbytes)
        return Brought(offer.name, data, payload_digest(data))
