"""What has arrived of one attempt, and the one order in which it is applied.

The declared order goes sequence by sequence, and within a sequence owner by owner. Every receiver works it out
from the ids alone, so all agree, whatever order payloads arrive in; no owner has to finish before another's first payload is
applied. An owner that ended, by its end marker, is skipped from there on.

A position in the order is one number: ``sequence * owners + rank of the owner``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from deltarefit.errors import PayloadInvalidError
from deltarefit.ids import AttemptId, OwnerId, PayloadId
from deltarefit.protocol.delivery import Arrival, EndMarker, end_digest

__all__ = ["Accepted", "Arrivals"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """What is kept of an accepted payload until cleanup, so that duplicates are told after its bytes are gone."""

    digest: str
    nbytes: int


@dataclass(slots=True)
class _Stream:
    """What came from one owner."""

    accepted: dict[int, Accepted] = field(default_factory=dict)
    """By sequence."""
    end: EndMarker | None = None


class Arrivals:
    """Payloads and end markers of one attempt, from a fixed set of owners.

    Methods that raise ``PayloadInvalidError`` have changed nothing then.
    """

    def __init__(self, attempt: AttemptId, owners: Iterable[OwnerId], *, max_payloads_per_owner: int) -> None:
        self._attempt = attempt
        self._streams = {owner: _Stream() for owner in sorted(owners)}
        self._owners = tuple(self._streams)
        self._max_payloads = max_payloads_per_owner

    # ------------------------------------------------------------------------------------------ taking in

    def known(self, arrival: Arrival) -> Accepted | None:
        """What was accepted under the arrival's id before; None if it is new.

        Raises:
            PayloadInvalidError: no such owner or sequence in this attempt, or other bytes were accepted under this id.
        """
        payload = arrival.payload
        stream = self._stream(payload.owner, str(payload))
        if not 0 <= payload.sequence < self._max_payloads:
            raise PayloadInvalidError(f"{payload}: sequence {payload.sequence}, expected 0 to {self._max_payloads - 1}")
        if stream.end is not None and payload.sequence >= stream.end.count:
            raise PayloadInvalidError(f"{payload}: its owner ended after {stream.end.count} payloads")
        known = stream.accepted.get(payload.sequence)
        if known is not None and known != Accepted(arrival.digest, arrival.nbytes):
            raise PayloadInvalidError(
                f"{payload}: digest {arrival.digest} ({arrival.nbytes} bytes), but {known.digest} ({known.nbytes} bytes) was "
                "accepted under this id before; ids are never reused"
            )
        return known

    def accept(self, arrival: Arrival) -> None:
        """Note a payload for which ``known`` returned None.

        Raises:
            PayloadInvalidError: it is the last one of its owner, and together they are not what the end marker says.
        """
        stream = self._streams[arrival.payload.owner]
        stream.accepted[arrival.payload.sequence] = Accepted(arrival.digest, arrival.nbytes)
        try:
            self._check_end(stream.accepted, stream.end)
        except PayloadInvalidError:
            del stream.accepted[arrival.payload.sequence]
            raise

    def end(self, marker: EndMarker) -> None:
        """Note that an owner ended. Repeating it is harmless.

        Raises:
            PayloadInvalidError: it contradicts what arrived, or an earlier marker.
        """
        where = f"{marker.attempt}: end marker of owner {marker.owner}"
        stream = self._stream(marker.owner, where)
        if stream.end is not None and stream.end != marker:
            raise PayloadInvalidError(f"{where}: {marker.count} payloads, but {stream.end.count} in an earlier one")
        if not 0 <= marker.count <= self._max_payloads:
            raise PayloadInvalidError(f"{where}: {marker.count} payloads, expected 0 to {self._max_payloads}")
        if beyond := sorted(sequence for sequence in stream.accepted if sequence >= marker.count):
            raise PayloadInvalidError(f"{where}: {marker.count} payloads, but sequence {beyond[0]} arrived")
        self._check_end(stream.accepted, marker)
        stream.end = marker

    def _stream(self, owner: OwnerId, where: str) -> _Stream:
        stream = self._streams.get(owner)
        if stream is None:
            raise PayloadInvalidError(f"{where}: owner {owner} has no part in {self._attempt}; expected one of {self._owners}")
        return stream

    def _check_end(self, accepted: dict[int, Accepted], end: EndMarker | None) -> None:
        if end is None or len(accepted) != end.count:
            return
        found = end_digest(accepted[sequence].digest for sequence in range(end.count))
        if found != end.digest:
            raise PayloadInvalidError(
                f"{end.attempt}: payloads of owner {end.owner} have the joint digest {found}, its end marker says {end.digest}"
            )

    # ------------------------------------------------------------------------------------------ what is here

    @property
    def num_payloads(self) -> int:
        return sum(len(stream.accepted) for stream in self._streams.values())

    @property
    def nbytes(self) -> int:
        return sum(known.nbytes for stream in self._streams.values() for known in stream.accepted.values())

    @property
    def num_expected(self) -> int | None:
        """Payloads that were sent in all; None until every owner has ended."""
        ends = [stream.end for stream in self._streams.values()]
        return sum(end.count for end in ends if end is not None) if None not in ends else None

    def has(self, payload: PayloadId) -> bool:
        return payload.sequence in self._streams[payload.owner].accepted

    def nbytes_of(self, payload: PayloadId) -> int:
        return self._streams[payload.owner].accepted[payload.sequence].nbytes

    def missing(self, limit: int | None = None) -> tuple[str, ...]:
        """Names of what was sent, as far as is known, and is not here; at most ``limit`` of them."""
        names: list[str] = []
        for owner, stream in self._streams.items():
            if stream.end is None:
                names.append(f"{self._attempt}/owner {owner}/end marker")
            else:
                absent = (sequence for sequence in range(stream.end.count) if sequence not in stream.accepted)
                names.extend(str(PayloadId(self._attempt, sequence, owner)) for sequence in absent)
            if limit is not None and len(names) >= limit:
                return tuple(names[:limit])
        return tuple(names)

    # ------------------------------------------------------------------------------------------ the order

    def settle(self, position: int) -> int:
        """The first position from ``position`` on that a payload has or may still get."""
        while True:
            sequence, rank = divmod(position, len(self._owners))
            end = self._streams[self._owners[rank]].end
            if end is None or sequence < end.count or self._is_past_all(sequence):
                return position
            position += 1

    def at(self, position: int) -> PayloadId | None:
        """The payload of a position; None if its owner ended before it."""
        sequence, rank = divmod(position, len(self._owners))
        owner = self._owners[rank]
        end = self._streams[owner].end
        if end is not None and sequence >= end.count:
            return None
        return PayloadId(self._attempt, sequence, owner)

    def _is_past_all(self, sequence: int) -> bool:
        return all(stream.end is not None and stream.end.count <= sequence for stream in self._streams.values())
