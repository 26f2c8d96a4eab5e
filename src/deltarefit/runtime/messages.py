"""Messages between the coordinator, receivers and owners: strict msgspec structs, tagged by type, no pickle."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from deltarefit.errors import (
    AttemptFailedError,
    BaseMismatchError,
    CommitConflictError,
    DeadlineError,
    LoaderContractError,
    OperatorRequiredError,
    PayloadInvalidError,
    PayloadMissingError,
    RefitError,
    RejectedError,
    TransportError,
)
from deltarefit.protocol import CommitRecord
from deltarefit.runtime.events import StageEvent
from deltarefit.runtime.trace_clock import ClockReading

__all__ = [
    "Audit",
    "Audited",
    "Broken",
    "Call",
    "CallBody",
    "Completed",
    "ConfirmArrival",
    "Done",
    "DropCaches",
    "EngineSummary",
    "Failure",
    "Flush",
    "Holding",
    "Membership",
    "OpenApply",
    "OwnerMarker",
    "Prepare",
    "ReopenGate",
    "Reply",
    "ReplyBody",
    "Restore",
    "RunNotice",
    "Stop",
    "Survey",
    "Surveyed",
    "decode_message",
    "encode_message",
]

_KINDS: dict[str, type[RefitError]] = {
    kind.__name__: kind
    for kind in (
        AttemptFailedError, BaseMismatchError, CommitConflictError, DeadlineError, LoaderContractError, OperatorRequiredError,
        PayloadInvalidError, PayloadMissingError, RejectedError, TransportError,
    )
}  # fmt: skip
MessageT = TypeVar("MessageT")


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Failure(_Message, frozen=True, forbid_unknown_fields=True):
    """An error of ours, carried to whoever asked."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Known kinds travel as they are; anything else becomes a failed attempt that names the foreign type."""
        for kind in type(error).__mro__:
            if kind.__name__ in _KINDS:
                return cls(kind.__name__, str(error))
        return cls(AttemptFailedError.__name__, f"{type(error).__name__}: {error}")

    def error(self, whose: str = "") -> RefitError:
        prefix = f"{whose}: " if whose else ""
        return _KINDS.get(self.kind, AttemptFailedError)(prefix + self.text)


# --- what receivers are asked -------------------------------------------------------------------------------------


class Survey(_Message, frozen=True, forbid_unknown_fields=True):
    """Compute digests from the resident bits. Writes nothing and belongs to no attempt."""

    lists: bool = False
    """Answer with the digest of each tensor: many bytes, so only where a summary has shown that something differs."""


class Audit(_Message, frozen=True, forbid_unknown_fields=True):
    """Show everything that can be told of the resident bits, on demand. Writes nothing and belongs to no attempt."""


class Restore(_Message, frozen=True, forbid_unknown_fields=True):
    """From an operator: take nothing for granted that the engine holds, and bring it to the committed version. Has no answer:
    the receiver shows a new incarnation."""


class Prepare(_Message, frozen=True, forbid_unknown_fields=True):
    """Bind the engine to an attempt (``protocol.PrepareAttempt``)."""

    attempt: str
    revision: int
    """Of the control record that binds the attempt: tells older prepares from newer ones, whoever sends them."""
    base_version: int
    target_version: int
    baseline: str
    """The candidate baseline that the record will name if the attempt is committed."""
    candidate: str
    mode: str
    restores: bool
    """Whatever this receiver was not proved to hold at the base version is sent whole, so its weights need not be trusted."""
    plan_digest: str
    num_owners: int
    delivery: str = "synchronous"
    """``protocol.Delivery``: whether payloads are applied as they arrive, or staged until all are here."""
    transport: str = "object_store"
    """How payloads come: ``object_store`` or ``relay``."""


class OpenApply(_Message, frozen=True, forbid_unknown_fields=True):
    """Close the request gate, drain running requests, then apply payloads as they arrive."""

    attempt: str


class OwnerMarker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What one owner sent in all (``protocol.EndMarker``)."""

    owner: int
    count: int
    digest: str


class ConfirmArrival(_Message, frozen=True, forbid_unknown_fields=True):
    """Everything was sent: answer when all of it is here. Nothing is applied for it (paper B.1, lines 22 to 25)."""

    attempt: str
    ended: tuple[OwnerMarker, ...]
    """One per owner."""


class Flush(_Message, frozen=True, forbid_unknown_fields=True):
    """Everything was sent: finish applying all of it, and answer when the device is in step."""

    attempt: str
    ended: tuple[OwnerMarker, ...]
    """One per owner. What arrived must agree."""
    audit: bool
    """Answer with what the resident bits prove."""


class Stop(_Message, frozen=True, forbid_unknown_fields=True):
    """The attempt is obsolete: apply nothing more of it, and answer when no write of it is under way."""

    attempt: str


class DropCaches(_Message, frozen=True, forbid_unknown_fields=True):
    """The attempt is committed: forget what was computed from older weights, and label the engine with the new version."""

    attempt: str
    record: CommitRecord
    reopens: bool = False
    """And serve again at once. Owners have the new baseline by then, or proved that they hold it, so nothing is waited for."""


class ReopenGate(_Message, frozen=True, forbid_unknown_fields=True):
    """The transition is over: serve again."""

    attempt: str
    record: CommitRecord


# --- what receivers answer ----------------------------------------------------------------------------------------


class Holding(_Message, frozen=True, forbid_unknown_fields=True):
    """Which bits an engine holds, in short: a message must not take longer over a long link than the rest of a pause."""

    summary: str
    """``digest_of_digests`` of the tensors that resident bits prove; 32 hex digits."""
    unproven: tuple[str, ...] = ()
    """Canonical tensors that the engine does not hold, or cannot prove."""


class Surveyed(_Message, frozen=True, forbid_unknown_fields=True):
    holding: Holding
    digests: dict[str, str | None] | None = None
    """If a list was asked for: hex digest per tensor that the engine holds; None where resident bits cannot prove it."""


class Audited(_Message, frozen=True, forbid_unknown_fields=True):
    digests: dict[str, str | None]
    """As in ``Surveyed``, each tensor."""
    disagreeing: dict[str, tuple[int, ...]]
    """Tensors of which ranks hold the same elements with different bits, and these ranks. Their digests are no policy's."""
    drifted: tuple[str, ...]
    """Storages whose bytes outside all canonical tensors changed since prewarm, as ``rank <n>: <name>``."""
    covered: str


class Completed(_Message, frozen=True, forbid_unknown_fields=True):
    written_elements: int
    holding: Holding | None
    """None if no audit was asked for."""
    covered: str


class Done(_Message, frozen=True, forbid_unknown_fields=True):
    """Done, and nothing to tell but what ran meanwhile."""

    events: tuple[StageEvent, ...] = ()


class Broken(_Message, frozen=True, forbid_unknown_fields=True):
    """Sent unasked, under no call's name: the attempt failed here, so nobody need wait for its end to learn it."""

    attempt: str
    failure: Failure


CallBody = Survey | Audit | Prepare | ConfirmArrival | OpenApply | Flush | Stop | DropCaches | ReopenGate | Restore
ReplyBody = Surveyed | Audited | Completed | Done | Failure | Broken


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request, under a name that its reply repeats."""

    name: str
    """Fresh for every call: ``<coordinator nonce>-<number>``."""
    epoch: int
    """Of the coordinator; receivers ignore one that was replaced."""
    incarnation: str
    """Of the receiver that is meant: one that restarted, or registered anew, is another one and ignores it."""
    body: CallBody


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to one call, or its failure."""

    name: str
    incarnation: str
    """Of the receiver that answers."""
    body: ReplyBody
    clock: ClockReading | None = None
    """Places the receiver's events on the coordinator's time axis."""


class EngineSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What prewarm found on all ranks of one engine together; lies under the run, named by its digest."""

    encodings: dict[str, tuple[int, ...]]
    """Per canonical tensor, encodings that every rank holding a part of it can take; all of them where no rank holds any."""
    skipped: tuple[str, ...]
    """Tensors that the engine's loader skips on every rank, as a full reload would."""
    dense: tuple[str, ...]
    """Tensors of which every element must be sent each time, because the loader computes with them."""
    computed: tuple[str, ...] = ()
    """Tensors whose canonical bits storage cannot prove before all of them were sent once."""


class Membership(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a receiver shows beside its heartbeat."""

    incarnation: str
    """Fresh for every start of the process, and after every lease that ran out: a restarted receiver is a new one."""
    engine: str
    catalog_digest: str
    summary_digest: str
    """Names its EngineSummary; '' until it has prewarmed."""
    policy_version: int | None
    """The version that it holds by a commit of this run; None if it never took part in one."""
    refusal: str = ""
    """Why it cannot take part, if prewarm refused."""
    activity: str = ""
    """What it is doing, for people."""
    is_serving: bool = True
    """Whether its request gate is open, as far as it knows."""
    node: str = ""
    """Names the rollout node, by what its processes share; empty if it shares nothing, so no relay can serve it."""
    key_print: str = ""
    """Fingerprint of its run key; empty if it has none. Messages between different ones are not understood."""


class RunNotice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the coordinator shows beside its heartbeat: all that a receiver needs to join."""

    epoch: int
    catalog_digest: str
    policy_version: int
    lease_s: float
    """Of receivers too: a receiver's own may be shorter, never longer."""
    activity: str = ""
    """What the coordinator is doing or waiting for, for people; empty between refits."""
    activity_s: float = 0.0
    """For how long already."""
    key_print: str = ""
    """As in ``Membership``."""


def encode_message(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_message(data: bytes | memoryview, kind: type[MessageT], *, sender: str) -> MessageT:
    """Decode a message of one kind.

    Raises:
        TransportError: the bytes are no such message; the text names the sender.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise TransportError(
            f"message from {sender}: expected {kind.__name__}, got {len(data)} bytes that are not: {error}"
        ) from error
