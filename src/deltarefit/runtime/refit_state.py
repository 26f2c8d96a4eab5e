"""What a coordinator knows while it holds a run, and what one refit produces. Values; nothing here acts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from deltarefit.canonical import Catalog, TensorDigest, digest_of_digests
from deltarefit.control import ControlPlane
from deltarefit.ids import AttemptId, ReceiverId
from deltarefit.plan import RefitPlan
from deltarefit.protocol import CommitRecord, ControlState, Delivery
from deltarefit.runtime.activity import Activity
from deltarefit.runtime.calls import Caller
from deltarefit.runtime.clock import Clock, IdSource
from deltarefit.runtime.events import EventLog, StageEvent
from deltarefit.runtime.members import Member, Members
from deltarefit.runtime.owner_group import OwnerGroup
from deltarefit.runtime.owner_worker import OwnerReply
from deltarefit.runtime.relays import Relays
from deltarefit.runtime.settings import PublisherSettings
from deltarefit.runtime.trace_clock import TimeAxis
from deltarefit.transport import RunStore
from deltarefit.transport.relay import Peer

__all__ = ["BoundAttempt", "Identity", "Outcome", "Session"]

Identity = tuple[str, str]
"""A receiver's name and incarnation."""


@dataclass(slots=True)
class Session:
    """What one coordinator holds for as long as it owns the run."""

    store: RunStore
    control: ControlPlane
    holder: str
    epoch: int
    catalog: Catalog
    owners: OwnerGroup
    num_owners: int
    caller: Caller
    members: Members
    relays: Relays
    clock: Clock
    ids: IdSource
    settings: PublisherSettings
    log: EventLog
    axis: TimeAxis
    """How the clocks of owners and receivers stand to this process's."""
    activity: Activity
    ensure_may_act: Callable[[], None]
    """Raises CommitConflictError once another coordinator has the run."""
    policy_version: int
    """The committed version."""
    committed: dict[str, TensorDigest]
    """Digest of each canonical tensor of the committed policy."""
    doubtful: dict[Identity, frozenset[str]] = field(default_factory=dict)
    """Per receiver that showed what it holds: tensors that it does not hold, or cannot prove to hold, at the committed version.
    These are sent whole. A receiver that is not listed has not been asked yet."""
    settled: frozenset[Identity] = frozenset()
    """Receivers that acknowledged the latest commit: they know by themselves which version they hold."""
    delivery: Delivery = Delivery.SYNCHRONOUS
    """Of the refit under way."""
    is_first: bool = True
    """No refit was ever begun in this run, so every receiver must come with the weights that the run started from."""
    num_refits: int = 0

    @property
    def is_audit_due(self) -> bool:
        every = self.settings.audit_every
        return self.num_refits == 0 or (every > 0 and self.num_refits % every == 0)

    def begin(self, state: ControlState, delivery: Delivery = Delivery.SYNCHRONOUS) -> None:
        """A refit begins from this record."""
        self.delivery = delivery
        self.policy_version = state.record.policy_version
        self.is_first = state.record.policy_version == 0 and state.transition is None and not state.repair

    def distrust(self, identity: Identity) -> None:
        """Ask this receiver what it holds before it is taken at its word again."""
        self.doubtful.pop(identity, None)
        self.settled -= {identity}


@dataclass(frozen=True, slots=True)
class BoundAttempt:
    """The attempt that is bound at the moment."""

    attempt: AttemptId
    revision: int
    mode: str
    base: CommitRecord
    target: CommitRecord
    candidate: str
    is_dense: bool
    plan: RefitPlan
    required: Mapping[ReceiverId, Member]
    relays: tuple[Peer, ...]
    """Payloads go over these; without any, over the object store."""

    @property
    def transport(self) -> str:
        return "relay" if self.relays else "object_store"


@dataclass(slots=True)
class Outcome:
    """What the transition produced; the report is made from it."""

    changed_elements: int = 0
    nan_elements: int = 0
    payloads: int = 0
    payload_nbytes: int = 0
    sent_nbytes: int = 0
    crossed_nbytes: int = 0
    """Payload bytes that went to relays, over all attempts."""
    transport: str = "object_store"
    """Of the latest attempt."""
    digests: dict[str, TensorDigest] = field(default_factory=dict)
    """Of each tensor of the candidate."""
    policy_digest: str = digest_of_digests({})
    """Of all of them together."""
    receivers: tuple[ReceiverId, ...] = ()
    audited: bool = False
    covered: dict[ReceiverId, str] = field(default_factory=dict)
    """What each receiver's audit covered, in words."""
    t0_s: float = 0.0
    t1_s: float = 0.0
    events: list[StageEvent] = field(default_factory=list)

    def note(self, replies: Iterable[OwnerReply]) -> None:
        """Keep what owners tell with every reply. What is still on its way is told with a later one."""
        for reply in replies:
            self.events.extend(reply.events)
            self.crossed_nbytes += reply.crossed_nbytes
