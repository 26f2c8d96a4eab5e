"""Brings payloads to every peer below, over one link per child, and gives orphans a new parent.

Used by relays, which split the peers below them into parts, and by owners, for which all relays are one part below them. The
first of a part is the child and hears of the rest by a route. When a child is dead, the next of its part takes its place:
what it already holds it says when it is offered it, so nothing that arrived is sent again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deltarefit.ids import AttemptId, PayloadId
from deltarefit.transport.relay.channel import RelayContext
from deltarefit.transport.relay.frame import Peer, Route
from deltarefit.transport.relay.link import Link, PayloadBuffer, StreamKey
from deltarefit.transport.relay.tree import split

__all__ = ["Forwarder", "ForwarderOwner"]

_LOG = logging.getLogger(__name__)


class ForwarderOwner:
    """What a forwarder reports; all calls come with the lock held. Override what matters."""

    def delivered(self, payload_id: PayloadId) -> None:
        """The payload is whole at every peer below that can be reached."""

    def refused(self, payload_id: PayloadId, text: str) -> None:
        """A peer will not take it."""

    def lost(self, stream: StreamKey, peer: Peer, why: str) -> None:
        """A peer is dead; what it should have got, it will not get."""


@dataclass(slots=True)
class _Part:
    """A child and the peers below it."""

    peers: tuple[Peer, ...]
    missing: set[PayloadId]
    """Not yet whole at all of them."""


@dataclass(slots=True)
class _Stream:
    fan_out: int
    """Of the relays below."""
    below: tuple[Peer, ...] = ()
    parts: list[_Part] = field(default_factory=list)
    buffers: dict[PayloadId, PayloadBuffer] = field(default_factory=dict)
    """Not yet delivered."""


class Forwarder:
    """All methods but ``close`` and ``join`` are called with the lock held."""

    def __init__(self, context: RelayContext, owner: ForwarderOwner, lock: threading.RLock) -> None:
        self._context = context
        self._owner = owner
        self._lock = lock
        self._links: dict[Peer, Link] = {}
        self._ended: list[Link] = []
        self._streams: dict[StreamKey, _Stream] = {}

    def set_route(self, stream: StreamKey, below: Sequence[Peer], *, split_by: int, fan_out: int) -> None:
        """Say who is below for this stream; parts that stay as they were go on undisturbed."""
        entry = self._streams.setdefault(stream, _Stream(fan_out))
        below = tuple(below)
        if entry.parts and entry.below == below and entry.fan_out == fan_out:
            return
        entry.below, entry.fan_out = below, fan_out
        before = {part.peers: part for part in entry.parts}
        entry.parts = []
        for peers in split(below, split_by):
            part = before.get(peers) or _Part(peers, set(entry.buffers))
            entry.parts.append(part)
            self._attach(stream, entry, part)

    def add(self, payload_id: PayloadId, buffer: PayloadBuffer) -> None:
        """Bring this payload to all below; adding one that was delivered makes sure once more."""
        stream = _stream_of(payload_id)
        entry = self._streams.setdefault(stream, _Stream(1))
        if not entry.parts:
            self._owner.delivered(payload_id)
            return
        entry.buffers[payload_id] = buffer
        for part in entry.parts:
            part.missing.add(payload_id)
            self._link(part.peers[0]).offer(payload_id, buffer)

    def is_delivered(self, payload_id: PayloadId) -> bool:
        """Whether nobody below lacks it."""
        entry = self._streams.get(_stream_of(payload_id))
        return entry is None or payload_id not in entry.buffers

    def drop(self, streams: Callable[[StreamKey], bool]) -> None:
        """Forget these streams."""
        for key in [each for each in self._streams if streams(each)]:
            del self._streams[key]
        for link in self._links.values():
            link.drop(streams)

    def drop_payload(self, payload_id: PayloadId) -> None:
        """Forget one payload."""
        entry = self._streams.get(_stream_of(payload_id))
        if entry is not None and entry.buffers.pop(payload_id, None) is not None:
            for part in entry.parts:
                part.missing.discard(payload_id)
                self._link(part.peers[0]).drop_payload(payload_id)

    def grew(self, payload_id: PayloadId) -> None:
        """More bytes of this payload are here."""
        entry = self._streams.get(_stream_of(payload_id))
        for part in entry.parts if entry is not None else ():
            self._link(part.peers[0]).grew()

    def wait_until_written(self, streams: Callable[[StreamKey], bool], timeout_s: float) -> bool:
        """Wait while a frame of these streams is being written; False if a link takes too long."""
        return all(link.wait_until_written(streams, timeout_s) for link in list(self._links.values()))

    @property
    def payload_nbytes(self) -> int:
        """Payload bytes written to all peers so far, repeated ones included."""
        return sum(link.payload_nbytes for link in [*self._links.values(), *self._ended])

    def close(self) -> None:
        """End all links and wait for their threads; called without the lock."""
        with self._lock:
            links = [*self._links.values(), *self._ended]
            for link in links:
                link.close()
        for link in links:
            link.join()

    # What links report.

    def peer_delivered(self, peer: Peer, payload_id: PayloadId) -> None:
        """A part has it all."""
        entry = self._streams.get(_stream_of(payload_id))
        if entry is not None:
            for part in entry.parts:
                if part.peers[0] == peer:
                    part.missing.discard(payload_id)
            self._settle(entry, payload_id)

    def peer_died(self, peer: Peer, why: str) -> None:
        """The next of its part takes its place, in every stream."""
        link = self._links.pop(peer, None)
        if link is not None:
            self._ended.append(link)
        for stream, entry in list(self._streams.items()):
            for part in [each for each in entry.parts if each.peers[0] == peer]:
                self._owner.lost(stream, peer, why)
                part.peers = part.peers[1:]
                if part.peers:
                    _LOG.warning("attempt %s, owner %d: %s takes the place of %s", *stream, part.peers[0], peer)
                    self._attach(stream, entry, part)
                else:
                    entry.parts.remove(part)
                    part.missing.clear()
            for payload_id in list(entry.buffers):
                self._settle(entry, payload_id)

    def _attach(self, stream: StreamKey, entry: _Stream, part: _Part) -> None:
        link = self._link(part.peers[0])
        link.set_route(Route(stream[0], stream[1], part.peers[1:], entry.fan_out))
        for payload_id in sorted(part.missing):
            link.offer(payload_id, entry.buffers[payload_id])

    def _settle(self, entry: _Stream, payload_id: PayloadId) -> None:
        if payload_id in entry.buffers and not any(payload_id in part.missing for part in entry.parts):
            del entry.buffers[payload_id]
            self._owner.delivered(payload_id)

    def _link(self, peer: Peer) -> Link:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = Link(peer, self._context, _Reports(self, self._owner), self._lock)
            link.start()
        return link


class _Reports:
    """Passes a link's reports on."""

    def __init__(self, forwarder: Forwarder, owner: ForwarderOwner) -> None:
        self._forwarder = forwarder
        self._owner = owner

    def delivered(self, peer: Peer, payload_id: PayloadId) -> None:
        self._forwarder.peer_delivered(peer, payload_id)

    def refused(self, peer: Peer, payload_id: PayloadId, text: str) -> None:
        self._owner.refused(payload_id, f"{peer}: {text}")

    def died(self, peer: Peer, why: str) -> None:
        self._forwarder.peer_died(peer, why)


def _stream_of(payload_id: PayloadId) -> StreamKey:
    return AttemptId(payload_id.attempt), int(payload_id.owner)
