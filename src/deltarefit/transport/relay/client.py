"""The owners' side of the relay tree: each payload crosses the cluster boundary once, to one root (paper 7.1)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Self

from deltarefit.errors import DeadlineError, RejectedError, TransportError
from deltarefit.ids import AttemptId, PayloadId
from deltarefit.transport.guard import STOP_TIMEOUT_S
from deltarefit.transport.relay.calls import call_tree
from deltarefit.transport.relay.channel import RelayContext
from deltarefit.transport.relay.forwarder import Forwarder, ForwarderOwner
from deltarefit.transport.relay.frame import Call, Peer
from deltarefit.transport.relay.link import StreamKey
from deltarefit.transport.relay.tree import rotate

__all__ = ["RelaySender"]

_LOG = logging.getLogger(__name__)


class _Retained:
    """A payload in this process's memory; a ``PayloadBuffer``."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    @property
    def nbytes(self) -> int:
        return len(self._data)

    @property
    def received(self) -> int:
        return len(self._data)

    def read_into(self, byte_offset: int, view: memoryview) -> None:
        view[:] = self._data[byte_offset : byte_offset + len(view)]


class RelaySender(ForwarderOwner):
    """A ``PayloadSender`` over the tree. A context manager; ``close`` it when no more attempt will come.

    ``send`` returns once the payload is retained in this process, where it stays until every relay that can be reached has it
    whole. Relays that die are passed over; whether required receivers got everything is for the arrival check to judge.
    """

    def __init__(
        self,
        context: RelayContext,
        peers: Callable[[], Sequence[Peer]],
        *,
        fan_out: int = 2,
        max_retained_nbytes: int = 1 << 30,
    ) -> None:
        """Send to whom ``peers`` names, asked once per attempt.

        Args:
            context: names, key, TLS and times.
            peers: all relays, in the same order at every owner. Owner ``n`` begins at relay ``n`` modulo their number.
            fan_out: children of each relay.
            max_retained_nbytes: most bytes kept here; ``send`` waits for room. A larger payload goes alone.
        """
        if max_retained_nbytes < 1 or not 1 <= fan_out <= 64:
            raise RejectedError(f"relay sender: fan-out {fan_out}, {max_retained_nbytes} bytes: expected 1 to 64, at least 1")
        self._context = context
        self._peers = peers
        self._fan_out = fan_out
        self._max_nbytes = max_retained_nbytes
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._forwarder = Forwarder(context, self, lock)
        self._routes: dict[AttemptId, tuple[Peer, ...]] = {}
        self._streams: set[StreamKey] = set()
        self._retained: dict[PayloadId, int] = {}
        self._stopped: set[AttemptId] = set()
        self._trouble: dict[AttemptId, str] = {}
        self._alive: dict[StreamKey, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop what is still retained, and end all connections."""
        self._forwarder.close()

    @property
    def sent_nbytes(self) -> int:
        """Payload bytes written to roots, repeated ones included: what crossed the cluster boundary."""
        return self._forwarder.payload_nbytes

    @property
    def retained_nbytes(self) -> int:
        """Bytes that not every relay has yet."""
        with self._changed:
            return sum(self._retained.values())

    def send(self, payload_id: PayloadId, data: bytes | memoryview) -> None:
        """See ``PayloadSender``; blocks while too much is retained.

        Raises:
            TransportError: the attempt was stopped, no relay can be reached, or one refused a payload of this attempt.
        """
        kept = bytes(data)
        with self._changed:
            self._route(payload_id)
            self._changed.wait_for(lambda: self._refusal(payload_id) or self._has_room(payload_id, len(kept)))
            if (why := self._refusal(payload_id)) is not None:
                raise TransportError(f"{payload_id}: not sent, because {why}")
            self._retained[payload_id] = len(kept)
            self._forwarder.add(payload_id, _Retained(kept))

    def wait_until_delivered(self, attempt: AttemptId, timeout_s: float) -> bool:
        """Wait until every relay that can be reached has all payloads of the attempt; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(key.attempt == attempt for key in self._retained), timeout_s)

    def trouble(self, attempt: AttemptId) -> str:
        """Why not all payloads of the attempt reached every relay that could be reached; empty if nothing is known of that."""
        with self._changed:
            return self._trouble.get(attempt, "")

    def stop_and_wait(self, attempt: AttemptId) -> None:
        """See ``PayloadSender``: payloads that not every relay has yet are dropped, here and at the relays."""
        self._stop(attempt)
        with self._changed:
            route = self._routes.get(attempt)
            owners = sorted(owner for its, owner in self._streams if its == attempt)
        for owner in owners if route is not None else ():
            self._call("stop", attempt, owner, route or ())

    def cleanup(self, attempt: AttemptId) -> None:
        """See ``PayloadSender``: no relay that can be reached keeps anything of the attempt."""
        self._stop(attempt)
        with self._changed:
            route = self._routes.pop(attempt, None)
            self._streams = {stream for stream in self._streams if stream[0] != attempt}
            self._trouble.pop(attempt, None)
        self._call("cleanup", attempt, 0, route if route is not None else tuple(self._peers()))

    def _stop(self, attempt: AttemptId) -> None:
        def ours(stream: StreamKey) -> bool:
            return stream[0] == attempt

        with self._changed:
            self._stopped.add(attempt)
            self._forwarder.drop(ours)
            self._retained = {key: n for key, n in self._retained.items() if key.attempt != attempt}
            self._changed.notify_all()
            # A frame that is being written ends within the time of silence, or its connection does.
            if not self._forwarder.wait_until_written(ours, STOP_TIMEOUT_S):
                raise DeadlineError(f"attempt {attempt}: a frame was still being written {STOP_TIMEOUT_S:g} s after the stop")

    def _call(self, verb: str, attempt: AttemptId, owner: int, route: tuple[Peer, ...]) -> None:
        call = Call(verb, attempt, owner, rotate(route, owner), self._fan_out, self._context.settings.call_s)
        reached, lost = call_tree(self._context, call)
        if lost:
            _LOG.warning("%s of attempt %s: done by %d relays, not reached: %s", verb, attempt, reached, ", ".join(lost))

    # With the lock held.

    def _route(self, payload_id: PayloadId) -> None:
        attempt, owner = payload_id.attempt, int(payload_id.owner)
        if (attempt, owner) in self._streams or attempt in self._stopped:
            return
        if attempt not in self._routes:
            self._routes[attempt] = tuple(self._peers())
        peers = self._routes[attempt]
        if not peers:
            raise TransportError(f"{payload_id}: there is no relay to send it to; start one per rollout node")
        self._streams.add((attempt, owner))
        self._alive[attempt, owner] = len(peers)
        self._forwarder.set_route((attempt, owner), rotate(peers, owner), split_by=1, fan_out=self._fan_out)

    def _has_room(self, payload_id: PayloadId, nbytes: int) -> bool:
        return payload_id in self._retained or not self._retained or sum(self._retained.values()) + nbytes <= self._max_nbytes

    def _refusal(self, payload_id: PayloadId) -> str | None:
        if payload_id.attempt in self._stopped:
            return "its attempt was stopped"
        return self._trouble.get(payload_id.attempt)

    def delivered(self, payload_id: PayloadId) -> None:
        """See ``ForwarderOwner``."""
        self._retained.pop(payload_id, None)
        self._changed.notify_all()

    def refused(self, payload_id: PayloadId, text: str) -> None:
        """See ``ForwarderOwner``."""
        self._trouble.setdefault(payload_id.attempt, f"an earlier payload was refused: {payload_id}: {text}")
        self._retained.pop(payload_id, None)
        self._changed.notify_all()

    def lost(self, stream: StreamKey, peer: Peer, why: str) -> None:
        """See ``ForwarderOwner``."""
        self._alive[stream] -= 1
        if not self._alive[stream]:
            self._trouble.setdefault(stream[0], f"no relay of the run can be reached; the last one: {why}")
        self._changed.notify_all()
