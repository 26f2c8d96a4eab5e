"""Which payload is decoded and which is written next, and what there is room for. One attempt's accounting, no bytes.

Bounded without deadlock: of ``queue_slots`` places one is kept for the payload that is next in the declared order, until it is
here. Later ones may fill all others, and then wait. So whatever order payloads arrive in, the next one always finds a place.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltarefit.errors import RejectedError
from deltarefit.ids import PayloadId
from deltarefit.protocol.arrivals import Arrivals
from deltarefit.protocol.delivery import Arrival, Delivery, Verdict

__all__ = ["ApplyQueue", "ReceptionSettings"]


@dataclass(frozen=True, slots=True)
class ReceptionSettings:
    """How much may be held before it is applied."""

    queue_slots: int = 264
    """Decoded payloads: 32 x 8 + 8, as the paper's receivers have."""
    staging_limit_nbytes: int = 8 << 30
    """Staged bytes in memory, in asynchronous delivery."""
    may_spill: bool = True
    """Whether staging may go on on local disk past the limit; else the attempt fails."""
    max_payloads_per_owner: int = 1 << 20
    """Refuses a runaway owner before the table of accepted payloads eats the memory."""

    def __post_init__(self) -> None:
        if self.queue_slots < 1 or self.staging_limit_nbytes < 0 or self.max_payloads_per_owner < 1:
            raise RejectedError(f"reception: {self}; expected at least one slot and one payload, and no negative limit")


class ApplyQueue:
    """Slots, staged bytes and positions in the declared order."""

    def __init__(self, arrivals: Arrivals, delivery: Delivery, settings: ReceptionSettings) -> None:
        self._arrivals = arrivals
        self._delivery = delivery
        self._settings = settings
        self._apply_position = 0
        """In the declared order: the next payload to write."""
        self._decode_position = 0
        """Asynchronous delivery: the next staged payload to decode. Never behind the one above."""
        self._num_queued = 0
        """Slots in use: payloads decoded or being decoded, and not yet written."""
        self._num_applied = 0
        self._staged_nbytes = 0
        self._in_memory: set[PayloadId] = set()
        """Staged payloads that count in ``_staged_nbytes``; the others were spilled."""

    @property
    def num_applied(self) -> int:
        return self._num_applied

    @property
    def is_drained(self) -> bool:
        """Whether every payload of every owner is written."""
        return self._arrivals.num_expected == self._num_applied

    # ------------------------------------------------------------------------------------------ room

    def room_for(self, arrival: Arrival) -> Verdict | None:
        """QUEUE, WAIT, STAGE or SPILL; None if it would have to be spilled and may not. Changes nothing."""
        if self._delivery is Delivery.SYNCHRONOUS:
            following = self.next_payload()
            keeps_one = following is not None and following != arrival.payload and not self._arrivals.has(following)
            free = self._settings.queue_slots - self._num_queued - int(keeps_one)
            return Verdict.QUEUE if free > 0 else Verdict.WAIT
        if self._staged_nbytes + arrival.nbytes <= self._settings.staging_limit_nbytes:
            return Verdict.STAGE
        return Verdict.SPILL if self._settings.may_spill else None

    def placed(self, arrival: Arrival, verdict: Verdict) -> None:
        """Count what was accepted."""
        if verdict is Verdict.QUEUE:
            self._num_queued += 1
        elif verdict is Verdict.STAGE:
            self._staged_nbytes += arrival.nbytes
            self._in_memory.add(arrival.payload)

    # ------------------------------------------------------------------------------------------ order

    def next_payload(self) -> PayloadId | None:
        """The next payload to write in the declared order, arrived or not; None if all are written.

        While its owner has not ended, it may turn out that this payload does not exist and another one is next.
        """
        self._apply_position = self._arrivals.settle(self._apply_position)
        return self._arrivals.at(self._apply_position)

    def next_to_decode(self) -> PayloadId | None:
        """The next staged payload to decode; None if there is none or no free slot. Takes a slot and releases staged bytes."""
        if self._delivery is Delivery.SYNCHRONOUS or self._num_queued >= self._settings.queue_slots:
            return None
        self._decode_position = self._arrivals.settle(self._decode_position)
        payload = self._arrivals.at(self._decode_position)
        if payload is None or not self._arrivals.has(payload):
            return None
        self._decode_position += 1
        self._num_queued += 1
        if payload in self._in_memory:
            self._in_memory.remove(payload)
            self._staged_nbytes -= self._arrivals.nbytes_of(payload)
        return payload

    def next_to_write(self) -> PayloadId | None:
        """The next payload to write if it is here, and decoded in asynchronous delivery. Changes nothing that counts."""
        payload = self.next_payload()
        if payload is None or not self._arrivals.has(payload):
            return None
        if self._delivery is Delivery.ASYNCHRONOUS and self._apply_position >= self._decode_position:
            return None
        return payload

    def written(self) -> None:
        """The payload that ``next_to_write`` gave is written; its slot is free."""
        self._apply_position += 1
        self._num_queued -= 1
        self._num_applied += 1
