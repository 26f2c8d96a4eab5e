"""One relay: takes payloads from above, keeps them for the engines of its node, and forwards them as they arrive.

It knows no membership: the owner's route says who is below. What it acknowledges is that a payload is whole on the shelves of
this relay and of all below it, never that an engine applied it (paper B.1, Fig. B.3).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from deltarefit.errors import RejectedError, TransportError
from deltarefit.ids import AttemptId, OwnerId, PayloadId
from deltarefit.transport.relay import frame
from deltarefit.transport.relay.calls import call_tree
from deltarefit.transport.relay.channel import Channel, RelayContext, accept
from deltarefit.transport.relay.forwarder import Forwarder, ForwarderOwner
from deltarefit.transport.relay.frame import Alive, Call, Done, Failed, Have, Message, Offer, Peer, Reply, Route
from deltarefit.transport.relay.link import StreamKey
from deltarefit.transport.relay.shelf import Held, Shelf

__all__ = ["RelayNode"]

_LOG = logging.getLogger(__name__)
_ADMIT_S = 0.05
"""How often a full shelf looks whether engines took something."""
_STOPPED = "its attempt was stopped"


class _Above:
    """A connection on which payloads come, and the answers that go back on it."""

    def __init__(self, channel: Channel, name: str) -> None:
        self.channel = channel
        self.name = name
        self.held: dict[int, Held] = {}
        self.carries = False
        """Whether payloads come on it; others carry one call."""
        self.ended = threading.Event()
        self._answers: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def answer(self, message: Message) -> None:
        """Say it soon; never blocks."""
        self._answers.put(message)

    def end(self) -> None:
        """Let ``write`` return."""
        self._answers.put(None)

    def write(self, alive_s: float) -> None:
        """Send answers until ``end`` or until the connection breaks."""
        with contextlib.suppress(OSError, TransportError):
            while True:
                try:
                    message = self._answers.get(timeout=alive_s)
                except queue.Empty:
                    message = Alive()
                if message is None:
                    return
                self.channel.send(message)
        self.channel.abort()


class RelayNode(ForwarderOwner):
    """Listens from ``start`` to ``close``."""

    def __init__(
        self, context: RelayContext, directory: Path, *, host: str = "127.0.0.1", port: int = 0, max_nbytes: int = 8 << 30
    ) -> None:
        """Serve ``context.run`` from ``directory``, which this relay and the engines of its node share.

        Args:
            context: names, key, TLS and times.
            directory: holds payloads; ``max_nbytes`` of them, and at most one more per engine that waits for it.
            host: address to listen on; 127.0.0.1 unless other machines are to reach it.
            port: 0 lets the system choose.
            max_nbytes: bound on what is kept. Offers wait when it is full, which slows the owners down.
        """
        if max_nbytes < 1:
            raise RejectedError(f"relay {context.name}: max_nbytes {max_nbytes}: expected at least 1")
        self.received_nbytes = 0
        """Payload bytes that came in, repeated ones included."""
        self._context = context
        self._listen = (host, port)
        self._lock = threading.RLock()
        self._shelf = Shelf(directory, max_nbytes)
        self._forwarder = Forwarder(context, self, self._lock)
        self._stopped: set[StreamKey] = set()
        self._cleaned: set[AttemptId] = set()
        self._aboves: set[_Above] = set()
        self._closing = threading.Event()
        self._server: socket.socket | None = None
        self._threads: list[threading.Thread] = []

    @property
    def forwarded_nbytes(self) -> int:
        """Payload bytes written to relays below."""
        return self._forwarder.payload_nbytes

    @property
    def held_nbytes(self) -> int:
        """Of all payloads that were admitted and not removed."""
        with self._lock:
            return self._shelf.nbytes

    def start(self) -> Peer:
        """Listen; returns what others need to reach this relay.

        Raises:
            RejectedError: the address cannot be used.
        """
        try:
            self._shelf.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            server = socket.create_server(self._listen, backlog=128)
        except OSError as error:
            raise RejectedError(f"relay {self._context.name}: cannot listen on {self._listen}: {error}") from error
        self._server = server
        self._spawn(self._accept, server)
        self._spawn(self._keep)
        return Peer(self._context.name, self._listen[0], server.getsockname()[1])

    def attempts(self) -> frozenset[AttemptId]:
        """Of which anything is kept here."""
        with self._lock:
            return self._shelf.attempts()

    def forget(self, attempt: AttemptId) -> None:
        """As a cleanup of that attempt, for whoever knows that it is over. Nothing of it is taken any more."""
        with self._lock:
            self._cleaned.add(attempt)
            self._drop(lambda stream: stream[0] == attempt, whole_too=True)
            self._shelf.remove_attempt(attempt)
            self._admit()

    def close(self) -> None:
        """Stop at once; what is on the shelf stays there for a relay that is started on it again."""
        self._closing.set()
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()
        with self._lock:
            for above in self._aboves:
                above.channel.abort()
                above.end()
        self._forwarder.close()
        for thread in list(self._threads):
            thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Threads.

    def _spawn(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name=f"relay-{self._context.name}", daemon=True)
        with self._lock:
            self._threads = [each for each in self._threads if each.is_alive()]
            thread.start()
            self._threads.append(thread)

    def _accept(self, server: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = server.accept()
            except OSError:
                return
            self._spawn(self._serve, sock)

    def _keep(self) -> None:
        while not self._closing.wait(_ADMIT_S):
            with self._lock:
                if self._shelf.is_waiting:
                    self._admit()

    def _serve(self, sock: socket.socket) -> None:
        try:
            channel, name = accept(sock, self._context)
        except (OSError, TransportError, RejectedError) as error:
            _LOG.warning("relay %s refused a connection: %s", self._context.name, error)
            return
        above = _Above(channel, name)
        with self._lock:
            if self._closing.is_set():
                channel.close()
                return
            self._aboves.add(above)
        writer = threading.Thread(target=above.write, args=(self._context.settings.alive_s,), name="relay-answers", daemon=True)
        writer.start()
        try:
            self._read(above)
        except (OSError, TransportError) as error:
            _LOG.info("relay %s: connection of %s ended: %s", self._context.name, name, error)
        finally:
            with self._lock:
                self._aboves.discard(above)
            above.ended.set()
            above.end()
            channel.abort()
            writer.join()
            channel.close()

    def _read(self, above: _Above) -> None:
        while not self._closing.is_set():
            kind, body = above.channel.receive()
            if kind == frame.DATA:
                self._take_bytes(above, body)
                continue
            message = frame.decode(body)
            if isinstance(message, Route):
                self._succeed(above)
                self._take_route(message)
            elif isinstance(message, Offer):
                self._take_offer(above, message)
            elif isinstance(message, Call):
                self._spawn(self._take_call, above, message)
            elif not isinstance(message, Alive):
                raise TransportError(f"{above.name} sent {type(message).__name__} where payloads were expected")

    # What comes from above.

    def _succeed(self, above: _Above) -> None:
        """End an earlier connection of the same caller, whose last bytes may still be on their way to the shelf: only then is
        the answer to an offer right about what is here."""
        if above.carries:
            return
        above.carries = True
        with self._lock:
            earlier = [each for each in self._aboves if each.carries and each.name == above.name and each is not above]
        for each in earlier:
            each.channel.abort()
            each.ended.wait(self._context.settings.silence_s)

    def _take_route(self, route: Route) -> None:
        stream = (AttemptId(route.attempt), route.owner)
        with self._lock:
            if self._refuses(stream):
                return
            self._forwarder.set_route(stream, route.peers, split_by=route.fan_out, fan_out=route.fan_out)
            for held in self._shelf.of(stream):
                held.delivered = False
                self._forwarder.add(held.payload_id, held)
                self._settle(held)

    def _take_offer(self, above: _Above, offer: Offer) -> None:
        payload_id = PayloadId(AttemptId(offer.attempt), offer.sequence, OwnerId(offer.owner))
        with self._lock:
            if self._refuses((payload_id.attempt, offer.owner)):
                above.answer(Failed(offer.number, _STOPPED))
                return
            if self._shelf.had(payload_id, offer.nbytes):
                above.answer(Have(offer.number, offer.nbytes))
                above.answer(Done(offer.number))
                return
            held = self._shelf.get(payload_id) or self._shelf.offer(payload_id, offer.nbytes)
            if held.nbytes != offer.nbytes:
                above.answer(Failed(offer.number, f"it was offered with {held.nbytes} bytes before, now with {offer.nbytes}"))
                return
            above.held[offer.number] = held
            if held.admitted:
                above.answer(Have(offer.number, held.received))
                if held.delivered:
                    above.answer(Done(offer.number))
            else:
                self._admit()

    def _take_bytes(self, above: _Above, body: memoryview) -> None:
        number, byte_offset = frame.DATA_HEAD.unpack_from(body)
        data = body[frame.DATA_HEAD.size :]
        held = above.held.get(number)
        if held is None:
            return  # it was removed while this frame was on its way
        self.received_nbytes += len(data)
        try:
            held.write(byte_offset, data)
            finished = held.finish()
        except OSError as error:
            with self._lock:
                self._fail(held, f"relay {self._context.name} cannot keep it: {error}")
            return
        with self._lock:
            if finished:
                self._settle(held)
            self._forwarder.grew(held.payload_id)

    def _take_call(self, above: _Above, call: Call) -> None:
        attempt = AttemptId(call.attempt)
        if call.verb == "cleanup":
            self.forget(attempt)
        else:
            with self._lock:
                self._stopped.add((attempt, call.owner))
                self._drop(lambda stream: stream == (attempt, call.owner), whole_too=False)
                self._admit()
        reached, lost = call_tree(self._context, call)
        with self._lock:
            if call.verb == "cleanup":  # an engine that was still waiting may have left a marker
                self._shelf.remove_attempt(attempt)
        above.answer(Reply(reached + 1, lost))

    # Decisions, all with the lock held.

    def _refuses(self, stream: StreamKey) -> bool:
        return stream in self._stopped or stream[0] in self._cleaned

    def _drop(self, streams: Callable[[StreamKey], bool], *, whole_too: bool) -> None:
        self._forwarder.drop(streams)
        removed = self._shelf.remove(lambda held: streams(held.stream) and (whole_too or not held.whole))
        self._unlist(removed, _STOPPED)

    def _admit(self) -> None:
        try:
            for held in self._shelf.admit():
                self._answer(held, partial(_have, held))
                self._forwarder.add(held.payload_id, held)
                if held.nbytes == held.received:
                    held.finish()
                    self._settle(held)
        except OSError as error:
            _LOG.warning("relay %s: %s", self._context.name, error)

    def _settle(self, held: Held) -> None:
        if held.whole and not held.delivered and self._forwarder.is_delivered(held.payload_id):
            held.delivered = True
            self._answer(held, Done)

    def _answer(self, held: Held, message: Callable[[int], Message]) -> None:
        for above in self._aboves:
            for number in [each for each, it in above.held.items() if it is held]:
                above.answer(message(number))

    def _fail(self, held: Held, text: str) -> None:
        _LOG.warning("%s: %s", held.payload_id, text)
        self._forwarder.drop_payload(held.payload_id)
        self._unlist(self._shelf.remove(lambda each: each is held), text)

    def _unlist(self, removed: list[Held], text: str) -> None:
        gone = set(map(id, removed))
        for above in self._aboves:
            for number in [each for each, held in above.held.items() if id(held) in gone]:
                del above.held[number]
                above.answer(Failed(number, text))

    # What the forwarder reports.

    def delivered(self, payload_id: PayloadId) -> None:
        """See ``ForwarderOwner``."""
        held = self._shelf.get(payload_id)
        if held is not None:
            self._settle(held)

    def refused(self, payload_id: PayloadId, text: str) -> None:
        """Passed on: the owner must know that not everyone will get it."""
        held = self._shelf.get(payload_id)
        if held is not None:
            self._answer(held, lambda number: Failed(number, text[:2000]))


def _have(held: Held, number: int) -> Have:
    return Have(number, held.received)
