"""What a transport promises: opaque payload bytes under ids, and the small values that describe them.

A transport never looks into a payload. It adapts exactly three calls of the protocol, ``send``, ``stop_and_wait`` and
``cleanup`` (paper Table B.1, App. C); receivers get ``fetch``. Which payloads exist travels beside the bytes: in messages,
or in the attempt's manifest (``manifest.py``).
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Protocol

import msgspec

from deltarefit.errors import PayloadInvalidError, RejectedError
from deltarefit.ids import AttemptId, OwnerId, PayloadId

__all__ = [
    "MAX_PAYLOAD_NBYTES",
    "BoundedSource",
    "Clock",
    "PayloadEntry",
    "PayloadSender",
    "PayloadSource",
    "check_payload",
    "check_size",
    "payload_digest",
]

MAX_PAYLOAD_NBYTES = 16 << 30
"""No payload may be larger: a bucket aims at 512 MiB (paper App. C) and exceeds that only by one whole tensor."""

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Ordinal = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Clock(Protocol):
    """The little of a clock that a transport needs; ``runtime/clock.py`` has the real one."""

    def monotonic_s(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return after about that many seconds."""
        ...


class PayloadEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """One payload as a manifest or a message announces it. The attempt is said by what carries the entry."""

    sequence: Ordinal
    """0-based position within its owner's payloads."""
    owner: Ordinal
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_PAYLOAD_NBYTES)]
    digest: Digest
    """``payload_digest`` of all bytes of the payload: not the keyed digest that the payload carries inside."""

    @classmethod
    def of(cls, payload_id: PayloadId, data: bytes | memoryview) -> PayloadEntry:
        """Describe these bytes."""
        return cls(payload_id.sequence, int(payload_id.owner), memoryview(data).nbytes, payload_digest(data))

    def payload_id(self, attempt: AttemptId) -> PayloadId:
        """The id of this entry within that attempt."""
        return PayloadId(attempt, self.sequence, OwnerId(self.owner))


class PayloadSender(Protocol):
    """Carries payloads towards every receiver.

    All calls may come from any thread, ``send`` from several at once. A ``TransportError`` may pass when the call is repeated;
    ``RejectedError`` (credentials, permissions) is final.
    """

    def send(self, payload_id: PayloadId, data: bytes | memoryview) -> None:
        """Carry one payload.

        After return the transport holds the bytes by itself: the caller may free or change them. It does *not* say that any
        receiver has them (paper B.1: acknowledgments confirm queueing only). Sending the same id again with the same bytes
        is harmless; with other bytes it is the caller's error, which receivers report. May block for as long as the
        transport's queues are full.

        Raises:
            TransportError: not carried, or perhaps carried (a lost reply); or the attempt was stopped.
        """
        ...

    def stop_and_wait(self, attempt: AttemptId) -> None:
        """Refuse every later ``send`` of the attempt on this sender and return once no running one can still take effect.

        What was carried before may stay until ``cleanup``, and what was still on its way may be dropped. May be called again,
        and for an attempt that never sent. Other attempts go on.

        Raises:
            DeadlineError: a running send did not end within the sender's limit; the attempt stays refused.
        """
        ...

    def cleanup(self, attempt: AttemptId) -> None:
        """Stop the attempt as above, then remove everything that the transport keeps for it, whoever sent it.

        Called after the commit, or once every owner's ``stop_and_wait`` has returned: what another process sends later is
        not waited for. May be called again. After return ``fetch`` of the attempt's payloads raises ``PayloadMissingError``.
        """
        ...


class PayloadSource(Protocol):
    """Gets payloads on the rollout side. Calls may come from several threads at once."""

    def fetch(self, payload_id: PayloadId, *, nbytes: int, digest: str) -> bytes:
        """Return the payload's bytes, of exactly that length and ``payload_digest``.

        Never reads more than ``nbytes`` (plus one transport frame). May be called again, also after success.

        Raises:
            PayloadMissingError: no such payload, or it was cleaned up.
            PayloadInvalidError: it has another length or digest, also when read a second time. Final for this payload.
            TransportError: it could not be carried; may pass when the call is repeated.
        """
        ...


class BoundedSource:
    """A ``PayloadSource`` around another that refuses larger payloads before anything of them is read or allocated."""

    def __init__(self, inner: PayloadSource, max_nbytes: int) -> None:
        self._inner = inner
        self._max_nbytes = max_nbytes

    def fetch(self, payload_id: PayloadId, *, nbytes: int, digest: str) -> bytes:
        """See ``PayloadSource``."""
        check_size(payload_id, nbytes, self._max_nbytes)
        return self._inner.fetch(payload_id, nbytes=nbytes, digest=digest)


def check_size(payload_id: PayloadId, nbytes: int, max_nbytes: int) -> None:
    """Raise ``RejectedError`` if so large a payload is not taken."""
    if nbytes > max_nbytes:
        raise RejectedError(
            f"{payload_id}: expected at most {max_nbytes} bytes (max_payload_nbytes), {nbytes} are announced; nothing was "
            "read. Raise max_payload_nbytes at this receiver, or lower bucket_nbytes at the trainer"
        )


def payload_digest(data: bytes | memoryview) -> str:
    """32 hex digits: BLAKE2b-128 over all bytes. It finds damage on the way, not forgery (payloads carry keyed digests)."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def check_payload(payload_id: PayloadId, data: bytes | memoryview, *, nbytes: int, digest: str) -> None:
    """Raise ``PayloadInvalidError`` unless the bytes have that length and digest."""
    got_nbytes = memoryview(data).nbytes
    if got_nbytes != nbytes:
        raise PayloadInvalidError(
            f"{payload_id}: expected {nbytes} bytes, got {got_nbytes}: it was cut short or is another payload"
        )
    got = payload_digest(data)
    if got != digest:
        raise PayloadInvalidError(f"{payload_id}: expected digest {digest}, got {got}: its bytes changed on the way")
