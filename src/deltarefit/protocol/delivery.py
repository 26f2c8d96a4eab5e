"""What coordinator, owners and receivers tell each other about one attempt. Values only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from deltarefit.ids import AttemptId, BaselineId, EncodingMode, OwnerId, PayloadId, PolicyVersion, ReceiverId

__all__ = ["Arrival", "Completion", "Delivery", "EndMarker", "PrepareAttempt", "Verdict", "contradiction", "end_digest"]


class Delivery(Enum):
    """When the request gate closes (paper 7.2)."""

    SYNCHRONOUS = "synchronous"
    """First; payloads are decoded and queued as they arrive, and applied meanwhile."""
    ASYNCHRONOUS = "asynchronous"
    """After every payload arrived; until then they are staged as they came, and the engine serves."""


class Verdict(Enum):
    """What to do with a payload that arrived."""

    QUEUE = "queue"
    """Decode it and keep it until ``take`` names it. Its slot is counted from now on."""
    STAGE = "stage"
    """Keep the bytes in memory until ``next_to_decode`` names it."""
    SPILL = "spill"
    """As STAGE, but on local disk: the memory for staging is used up."""
    WAIT = "wait"
    """No slot: hold it back and ask again after the next ``applied``. Nothing was noted."""
    IGNORE_DUPLICATE = "ignore duplicate"
    """The very payload was accepted before; acknowledge it again."""
    DROP_LATE = "drop late"
    """Not of the active attempt, or that attempt is over. No fault of anybody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareAttempt:
    """Binds a receiver to an attempt."""

    attempt: AttemptId
    revision: int
    """Revision of the control record that binds the attempt. It grows with every change of the record, so an older prepare, of
    whichever coordinator, is known by it."""
    base_version: PolicyVersion
    target_version: PolicyVersion
    baseline: BaselineId
    """The candidate baseline g; the commit record names it if this attempt is committed."""
    plan_digest: str
    mode: EncodingMode
    is_dense: bool
    candidate: str
    owners: tuple[OwnerId, ...]
    delivery: Delivery


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A payload that arrived and whose bytes were found whole (digest, format, catalog)."""

    payload: PayloadId
    base_version: PolicyVersion
    target_version: PolicyVersion
    plan_digest: str
    nbytes: int
    digest: str
    """Identifies the payload's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndMarker:
    """An owner says that it has sent everything of an attempt."""

    attempt: AttemptId
    owner: OwnerId
    count: int
    """Payloads that it sent; their sequences are 0 to count - 1."""
    digest: str
    """``end_digest`` of their digests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A receiver's completion acknowledgement."""

    receiver: ReceiverId
    attempt: AttemptId
    num_payloads: int
    nbytes: int
    num_late: int
    num_duplicates: int


def end_digest(digests: Iterable[str]) -> str:
    """32 hex digits over an owner's payload digests in the order of their sequence."""
    return hashlib.blake2b("\n".join(digests).encode(), digest_size=16).hexdigest()


def contradiction(arrival: Arrival, request: PrepareAttempt) -> str:
    """What in a payload of the attempt does not fit it; empty if all does."""
    for what, found, expected in (
        ("base version", arrival.base_version, request.base_version),
        ("target version", arrival.target_version, request.target_version),
        ("plan", arrival.plan_digest, request.plan_digest),
    ):
        if found != expected:
            return f"{arrival.payload}: {what} {found}, expected {expected}"
    return ""
