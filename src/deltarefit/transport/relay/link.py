"""The way to one relay: offers payloads, sends what is admitted, reconnects, goes on where it stopped.

Nothing is counted as arrived before the peer says so. After a broken connection every unfinished payload is offered anew, and
the peer's answer says from which byte to go on: so resuming, a new parent for an orphan, and a restarted relay are one case,
and bytes that arrived are not sent again.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from deltarefit.errors import RejectedError, TransportError
from deltarefit.ids import AttemptId, PayloadId
from deltarefit.transport.relay import frame
from deltarefit.transport.relay.channel import Channel, RelayContext, connect
from deltarefit.transport.relay.frame import Alive, Done, Failed, Have, Message, Offer, Peer, Route

__all__ = ["Link", "LinkOwner", "PayloadBuffer", "StreamKey"]

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0

StreamKey = tuple[AttemptId, int]
"""Attempt and owner: all payloads of one take the same way."""


class PayloadBuffer(Protocol):
    """Bytes of one payload, perhaps still growing."""

    @property
    def nbytes(self) -> int:
        """Of the whole payload."""
        ...

    @property
    def received(self) -> int:
        """How many of its first bytes are here."""
        ...

    def read_into(self, byte_offset: int, view: memoryview) -> None:
        """Fill the view from that offset; all of it has been received. Raises ``OSError`` if they are gone."""
        ...


class LinkOwner(Protocol):
    """Who uses a link. All calls come with the owner's lock held."""

    def delivered(self, peer: Peer, payload_id: PayloadId) -> None:
        """The payload is whole at the peer and below."""

    def refused(self, peer: Peer, payload_id: PayloadId, text: str) -> None:
        """The peer will not take it."""

    def died(self, peer: Peer, why: str) -> None:
        """The peer was not reached for too long; the link has ended."""


class _Phase(enum.Enum):
    NEW = enum.auto()
    OFFERED = enum.auto()
    ADMITTED = enum.auto()


@dataclass(slots=True)
class _Outgoing:
    payload_id: PayloadId
    buffer: PayloadBuffer
    phase: _Phase = _Phase.NEW
    number: int = -1
    cursor: int = 0

    @property
    def stream(self) -> StreamKey:
        return self.payload_id.attempt, int(self.payload_id.owner)

    @property
    def available(self) -> int:
        return min(frame.FRAME_NBYTES, self.buffer.received - self.cursor) if self.phase is _Phase.ADMITTED else 0


@dataclass(frozen=True, slots=True)
class _SendData:
    outgoing: _Outgoing
    number: int
    byte_offset: int
    nbytes: int


class Link:
    """Everything on its way to one peer. Methods without underscore are called with the owner's lock held."""

    def __init__(self, peer: Peer, context: RelayContext, owner: LinkOwner, lock: threading.RLock) -> None:
        self.peer = peer
        self.payload_nbytes = 0
        """Payload bytes written, repeated ones included."""
        self.wire_nbytes = 0
        """All bytes written, before TLS."""
        self._context = context
        self._owner = owner
        self._changed = threading.Condition(lock)
        self._outgoing: dict[PayloadId, _Outgoing] = {}
        self._by_number: dict[int, _Outgoing] = {}
        self._routes: dict[StreamKey, Route] = {}
        self._routes_sent: set[StreamKey] = set()
        self._next_number = 0
        self._channel: Channel | None = None
        self._sending: PayloadId | None = None
        self._unheard_since_s: float | None = None
        self._closed = False
        self._frame = bytearray(frame.HEADER.size + frame.MAX_BODY_NBYTES)
        self._thread = threading.Thread(target=self._run, name=f"relay-link-{peer.name}", daemon=True)

    def start(self) -> None:
        """Begin to work; connects once there is something to bring."""
        self._thread.start()

    def set_route(self, route: Route) -> None:
        """Who is below the peer for that stream."""
        key = (AttemptId(route.attempt), route.owner)
        if self._routes.get(key) != route:
            self._routes[key] = route
            self._routes_sent.discard(key)
            self._changed.notify_all()

    def offer(self, payload_id: PayloadId, buffer: PayloadBuffer) -> None:
        """Bring this payload; once more if it was brought before."""
        if payload_id not in self._outgoing:
            self._outgoing[payload_id] = _Outgoing(payload_id, buffer)
            self._changed.notify_all()

    def drop(self, streams: Callable[[StreamKey], bool]) -> None:
        """Forget everything of these streams; a frame that is being written is still written."""
        for outgoing in [each for each in self._outgoing.values() if streams(each.stream)]:
            self._forget(outgoing)
        for key in [each for each in self._routes if streams(each)]:
            del self._routes[key]
            self._routes_sent.discard(key)
        self._changed.notify_all()

    def drop_payload(self, payload_id: PayloadId) -> None:
        """Forget one payload."""
        if (outgoing := self._outgoing.get(payload_id)) is not None:
            self._forget(outgoing)

    def grew(self) -> None:
        """More bytes of some payload are here."""
        self._changed.notify_all()

    def wait_until_written(self, streams: Callable[[StreamKey], bool], timeout_s: float) -> bool:
        """Wait while a frame of these streams is being written; False if that took too long."""
        return self._changed.wait_for(
            lambda: self._sending is None or not streams((self._sending.attempt, int(self._sending.owner))), timeout_s
        )

    def close(self) -> None:
        """End; ``join`` afterwards, without the lock."""
        self._closed = True
        if self._channel is not None:
            self._channel.abort()
        self._changed.notify_all()

    def join(self) -> None:
        """Wait for the link's threads; called without the lock."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    # Connecting.

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                channel = connect(self.peer, self._context)
            except RejectedError as error:
                self._die(str(error))
                return
            except (OSError, TransportError) as error:
                if not self._pause(str(error)):
                    return
            else:
                self._serve(channel)

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._outgoing)
            return not self._closed

    def _pause(self, why: str) -> bool:
        """Wait before the next try; False once the peer counts as dead, or the link is closed."""
        settings = self._context.settings
        now_s = self._context.clock.monotonic_s()
        with self._changed:
            if self._unheard_since_s is None:
                self._unheard_since_s = now_s
            elapsed_s = now_s - self._unheard_since_s
            if elapsed_s < settings.dead_after_s:
                pause_s = min(_MAX_PAUSE_S, max(_FIRST_PAUSE_S, elapsed_s / 2))
                self._changed.wait_for(lambda: self._closed, pause_s)
                return not self._closed
        self._die(f"{self.peer} was not reached for {settings.dead_after_s:g} s: {why}")
        return False

    def _die(self, why: str) -> None:
        _LOG.warning("%s", why)
        with self._changed:
            if not self._closed:
                self._closed = True
                self._owner.died(self.peer, why)

    def _serve(self, channel: Channel) -> None:
        with self._changed:
            if self._closed:
                channel.close()
                return
            self._channel = channel
            self._routes_sent.clear()
            self._by_number.clear()
            for outgoing in self._outgoing.values():
                outgoing.phase = _Phase.NEW
        reader = threading.Thread(target=self._read, args=(channel,), name=f"relay-answers-{self.peer.name}", daemon=True)
        reader.start()
        why = "it was closed"
        try:
            self._write(channel)
        except (OSError, TransportError) as error:
            why = str(error)
        finally:
            with self._changed:
                self._channel = None
            channel.abort()
            reader.join()
            channel.close()
            self.wire_nbytes += channel.sent_nbytes
        if not self._closed:
            _LOG.info("connection to %s ended: %s", self.peer, why)
            self._pause(why)

    # Writing: decide under the lock, write outside it.

    def _write(self, channel: Channel) -> None:
        while True:
            with self._changed:
                step = self._next_step(channel)
                if step is None:
                    return
                if isinstance(step, _SendData):
                    self._sending = step.outgoing.payload_id
            try:
                if isinstance(step, _SendData):
                    self._send_data(channel, step)
                else:
                    channel.send(step)
            finally:
                with self._changed:
                    self._sending = None
                    self._changed.notify_all()

    def _next_step(self, channel: Channel) -> Message | _SendData | None:
        clock, alive_s = self._context.clock, self._context.settings.alive_s
        end_s = clock.monotonic_s() + alive_s
        while True:
            if self._closed or self._channel is not channel:
                return None
            if (step := self._find_step()) is not None:
                return step
            left_s = end_s - clock.monotonic_s()
            if left_s <= 0:
                return Alive()
            self._changed.wait(left_s)

    def _find_step(self) -> Message | _SendData | None:
        """Routes first, then offers, then bytes; always of the payload that comes first in the declared order."""
        for key, route in self._routes.items():
            if key not in self._routes_sent:
                self._routes_sent.add(key)
                return route
        ready = [each for each in self._outgoing.values() if each.phase is _Phase.NEW or each.available > 0]
        if not ready:
            return None
        first = min(ready, key=lambda each: (each.phase is not _Phase.NEW, each.payload_id))
        if first.phase is _Phase.NEW:
            return self._offer_of(first)
        step = _SendData(first, first.number, first.cursor, first.available)
        first.cursor += step.nbytes
        return step

    def _offer_of(self, outgoing: _Outgoing) -> Offer:
        outgoing.phase = _Phase.OFFERED
        outgoing.number = self._next_number
        self._next_number = (self._next_number + 1) % 2**32
        self._by_number[outgoing.number] = outgoing
        payload_id = outgoing.payload_id
        return Offer(outgoing.number, payload_id.attempt, int(payload_id.owner), payload_id.sequence, outgoing.buffer.nbytes)

    def _send_data(self, channel: Channel, step: _SendData) -> None:
        head = frame.write_data_head(self._frame, step.number, step.byte_offset, step.nbytes)
        view = memoryview(self._frame)[: head + step.nbytes]
        try:
            step.outgoing.buffer.read_into(step.byte_offset, view[head:])
        except OSError as error:
            with self._changed:
                self._refuse(step.outgoing, f"its bytes are gone here: {error}")
            return
        channel.send_frame(view)
        self.payload_nbytes += step.nbytes

    # Answers.

    def _read(self, channel: Channel) -> None:
        try:
            while True:
                message = channel.receive_message()
                with self._changed:
                    self._unheard_since_s = None
                    self._take(message)
        except (OSError, TransportError) as error:
            _LOG.debug("answers of %s ended: %s", self.peer, error)
        finally:
            with self._changed:
                if self._channel is channel:
                    self._channel = None
                self._changed.notify_all()
            channel.abort()

    def _take(self, message: Message) -> None:
        if isinstance(message, Have | Done | Failed):
            outgoing = self._by_number.get(message.number)
            if outgoing is None or self._outgoing.get(outgoing.payload_id) is not outgoing:
                return  # dropped meanwhile
            if isinstance(message, Have):
                self._admit(outgoing, message.received)
            elif isinstance(message, Done):
                self._forget(outgoing)
                self._owner.delivered(self.peer, outgoing.payload_id)
            else:
                self._refuse(outgoing, message.text)
        elif not isinstance(message, Alive):
            raise TransportError(f"{self.peer} sent {type(message).__name__} where an answer was expected")

    def _admit(self, outgoing: _Outgoing, received: int) -> None:
        if received > outgoing.buffer.nbytes:
            raise TransportError(f"{self.peer} claims {received} of {outgoing.buffer.nbytes} bytes of {outgoing.payload_id}")
        if outgoing.phase is _Phase.OFFERED:
            outgoing.phase = _Phase.ADMITTED
            outgoing.cursor = received
            self._changed.notify_all()

    def _refuse(self, outgoing: _Outgoing, text: str) -> None:
        if self._outgoing.get(outgoing.payload_id) is outgoing:
            self._forget(outgoing)
            self._owner.refused(self.peer, outgoing.payload_id, text)

    def _forget(self, outgoing: _Outgoing) -> None:
        self._outgoing.pop(outgoing.payload_id, None)
        if self._by_number.get(outgoing.number) is outgoing:
            del self._by_number[outgoing.number]
