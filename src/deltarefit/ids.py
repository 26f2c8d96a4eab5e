"""Names of things that cross processes. Plain values, validated at birth, never reused (paper App. B)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import NewType

from deltarefit.errors import RejectedError

__all__ = [
    "AttemptId",
    "BaselineId",
    "EncodingMode",
    "OwnerId",
    "PayloadId",
    "PolicyVersion",
    "ReceiverId",
    "attempt_id",
    "baseline_id",
    "receiver_id",
]

PolicyVersion = NewType("PolicyVersion", int)
"""Counts committed policies; 0 is the policy that the run started from."""
AttemptId = NewType("AttemptId", str)
"""One try of one transition: ``v<target policy version>-a<ordinal>-<nonce>``. Never reused."""
BaselineId = NewType("BaselineId", str)
"""Names the source baseline that a commit binds to a policy version: ``b<version>-<nonce>``."""
OwnerId = NewType("OwnerId", int)
"""A training rank that owns source elements, 0-based."""
ReceiverId = NewType("ReceiverId", str)
"""A rollout engine (all its ranks together)."""


class EncodingMode(Enum):
    """Which encodings an attempt may use (paper B, mode m)."""

    MIXED = "mixed"
    """Each tensor as the plan says: difference or xor where every receiver can take it, else overwrite."""
    OVERWRITE = "overwrite"
    """Overwrites only: every retry, because a failed attempt may have applied anything."""


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _checked(kind: str, text: str) -> str:
    if not _NAME.fullmatch(text):
        raise RejectedError(
            f"{kind} {text!r}: expected 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit"
        )
    return text


def attempt_id(target_version: int, ordinal: int, nonce: str) -> AttemptId:
    """Name attempt ``ordinal`` (from 1) of the transition to ``target_version``."""
    return AttemptId(_checked("attempt", f"v{target_version:06d}-a{ordinal}-{nonce}"))


def baseline_id(target_version: int, nonce: str) -> BaselineId:
    """Name the candidate baseline that an attempt binds."""
    return BaselineId(_checked("baseline", f"b{target_version:06d}-{nonce}"))


def receiver_id(text: str) -> ReceiverId:
    """Check a receiver's name: it becomes part of object keys."""
    return ReceiverId(_checked("receiver", text))


@dataclass(frozen=True, slots=True, order=True)
class PayloadId:
    """One payload of one attempt.

    The order of these ids is the one declared order in which every receiver applies payloads: by sequence first, so that no
    owner has to finish before another's first payload is applied (paper B.1).
    """

    attempt: AttemptId
    sequence: int
    """0-based position within its owner's payloads."""
    owner: OwnerId

    def __str__(self) -> str:
        return f"{self.attempt}/owner {self.owner}/payload {self.sequence}"
