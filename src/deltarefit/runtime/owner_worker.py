"""One training rank during a refit: executes the coordinator's commands on its owner (paper Algorithm B.1, owners)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from deltarefit import payload
from deltarefit.canonical import TensorDigest
from deltarefit.errors import AttemptFailedError, RejectedError
from deltarefit.ids import AttemptId, BaselineId, EncodingMode, OwnerId, PayloadId
from deltarefit.plan import RefitPlan
from deltarefit.protocol import BindOwner, CommitRecord, OwnerMachine
from deltarefit.records import Bucket
from deltarefit.runtime.clock import Clock, Pace
from deltarefit.runtime.events import EventLog, StageEvent
from deltarefit.runtime.messages import Failure, OwnerMarker
from deltarefit.runtime.pipeline import Pipeline
from deltarefit.runtime.progress import Progress, ProgressBoard
from deltarefit.runtime.senders import AttemptSender
from deltarefit.runtime.trace_clock import ClockReading, boot_id
from deltarefit.source import Owner
from deltarefit.transport import ManifestWriter, PayloadEntry, RunStore, keys
from deltarefit.transport.relay import Peer

__all__ = [
    "Build",
    "Command",
    "CommitBaseline",
    "End",
    "OwnerReply",
    "OwnerWorker",
    "Recheck",
    "ReleaseAttempt",
    "ShowBaseline",
    "StopSending",
]

_IN_FLIGHT = 4  # encoded payloads waiting for the transport, per owner; bounds memory to so many buckets
_NAMED = 8  # tensors with NaN that a reply names
_HALT_S = 0.5  # how often an owner that builds looks whether it should stop


class _Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Build(_Command, frozen=True, forbid_unknown_fields=True):
    """Compare, encode and send everything this rank owns, under one attempt."""

    attempt: str
    revision: int
    base: CommitRecord
    target: CommitRecord
    candidate: str
    mode: str
    plan: bytes
    starts_transition: bool
    """The candidate may differ from what an earlier build saw; otherwise it must be the same."""
    is_asynchronous: bool = False
    """The training loop goes on meanwhile, so the candidate is proved once more at the commit, unless the framework says that
    nothing was written."""
    relays: tuple[Peer, ...] = ()
    """Payloads go to these, in this order at every owner; without any, to the store."""


class Recheck(_Command, frozen=True, forbid_unknown_fields=True):
    """Show that the candidate was still what had been compared when all of it was. Asked for before every commit."""

    attempt: str


class StopSending(_Command, frozen=True, forbid_unknown_fields=True):
    """Send nothing more of this attempt, and return when nothing is on its way."""

    attempt: str


class ReleaseAttempt(_Command, frozen=True, forbid_unknown_fields=True):
    """Forget the payloads of this attempt."""

    attempt: str
    retains: bool = False
    """It is committed, and its payloads stay in the store."""


class CommitBaseline(_Command, frozen=True, forbid_unknown_fields=True):
    """The record says so: make the baseline what it names. May be repeated; nothing happens where it is that already."""

    attempt: str
    record: CommitRecord
    copies: bool = True
    """Or only prove that the candidate is still what the record names: the same command, copying, comes before the end."""


class ShowBaseline(_Command, frozen=True, forbid_unknown_fields=True):
    """Count the digests of the committed bits anew, from memory. Changes nothing."""


class End(_Command, frozen=True, forbid_unknown_fields=True):
    """The transition ended; ``report`` or ``failure`` is what refit() returns or raises on every rank."""

    report: bytes
    failure: Failure | None


Command = Build | Recheck | StopSending | ReleaseAttempt | CommitBaseline | ShowBaseline | End


class OwnerReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one owner did."""

    owner: int
    failure: Failure | None = None
    marker: OwnerMarker | None = None
    """Of a build that came to its end."""
    payloads: int = 0
    payload_nbytes: int = 0
    crossed_nbytes: int = 0
    """Payload bytes that went to relays since the last reply, repeated ones included."""
    changed_elements: int = 0
    nans: dict[str, int] = {}
    """Of a CommitBaseline that copied: some of the tensors of which committed elements are NaN, and how many here."""
    nan_elements: int = 0
    """In all tensors."""
    digests: dict[str, str] = {}
    """Hex digest of this owner's part of each tensor it owns: of the candidate after Build, committed after a CommitBaseline
    that copied."""
    events: tuple[StageEvent, ...] = ()
    clock: ClockReading | None = None


@dataclass(frozen=True, slots=True)
class _Attempt:
    attempt: AttemptId
    base: CommitRecord
    target: CommitRecord
    plan: RefitPlan
    mode: EncodingMode


class OwnerWorker:
    """Executes commands; never raises: what went wrong travels in the reply, so that no other rank waits for ever."""

    def __init__(
        self,
        owner: Owner,
        sender: AttemptSender,
        store: RunStore,
        events: EventLog,
        *,
        clock: Clock,
        key: bytes | None,
        count_writes: Callable[[], object] | None = None,
    ) -> None:
        """``count_writes`` tells two moments apart if the framework wrote to a parameter between them; None: nobody counts."""
        self._owner = owner
        self._machine = OwnerMachine(owner.owner, None)
        self._lock = threading.Lock()  # around the machine: payloads are sent from a thread of their own
        self._sender = sender
        self._store = store
        self._events = events
        self._clock = clock
        self._key = key
        self._boot = boot_id()
        self._count_writes = count_writes
        self._writes: object = None
        """How often the candidate had been written when it was last proved to be what was sent."""
        self._proof: Future[None] | None = None
        """Of the build under way, or the latest."""
        self._is_asynchronous = False
        self._board = ProgressBoard(store)
        self._halt_pace = Pace(clock, first_s=_HALT_S, most_s=_HALT_S)
        self._began_s = clock.monotonic_s()
        self._sent: list[PayloadEntry] = []
        """Of the build under way, or the latest."""

    @property
    def owner(self) -> OwnerId:
        return self._owner.owner

    def subscribe(self, listener: Callable[[StageEvent], None]) -> None:
        self._events.subscribe(listener)

    def take_baseline(self, baseline: BaselineId) -> None:
        """The baseline that was just copied goes by this name in the record."""
        self._machine.reinitialised(baseline)

    def execute(self, command: Command) -> OwnerReply:
        """Do it and say what came of it."""
        received_s = self._clock.monotonic_s()
        try:
            reply = self._dispatch(command)
        except Exception as error:  # the coordinator decides what an owner's failure means
            reply = OwnerReply(int(self.owner), Failure.of(error))
        clock = ClockReading(received_s, self._clock.monotonic_s(), self._boot)
        crossed_nbytes = self._sender.crossed_nbytes()
        return msgspec.structs.replace(reply, events=tuple(self._events.drain()), clock=clock, crossed_nbytes=crossed_nbytes)

    def _dispatch(self, command: Command) -> OwnerReply:
        match command:
            case Build():
                return self._build(command)
            case Recheck():
                if self._proof is None:
                    raise RejectedError(f"owner {self.owner}: {command.attempt} is to be proved, but no build came to its end")
                self._proof.result()
            case StopSending(attempt=attempt):
                self._await_proof()
                with self._lock:
                    self._machine.mark_obsolete(AttemptId(attempt))
                self._sender.stop_and_wait(AttemptId(attempt))
            case ReleaseAttempt(attempt=attempt, retains=True):
                self._sender.stop_and_wait(AttemptId(attempt))
            case ReleaseAttempt(attempt=attempt):
                self._sender.cleanup(AttemptId(attempt))
            case CommitBaseline():
                return self._commit(command)
            case ShowBaseline():
                return OwnerReply(int(self.owner), digests=_hex(self._owner.recount()))
            case End():
                pass
        return OwnerReply(int(self.owner))

    def committed_digests(self) -> dict[str, str]:
        return _hex(self._owner.digests())

    def _commit(self, command: CommitBaseline) -> OwnerReply:
        self._await_proof()
        if self._machine.must_update(command.record):
            # Training went on meanwhile, and some optimizers write where nobody counts. Gates are open when owners copy.
            if self._may_have_changed() or (command.copies and self._is_asynchronous):
                self._owner.doubt()
            if not command.copies:
                self._owner.prove()
                return OwnerReply(int(self.owner))  # gates are closed, and the build told the digests
            with self._events.stage("baseline", command.attempt):
                self._owner.commit()
        self._machine.updated(command.record)
        nans = self._owner.nans()
        return OwnerReply(
            int(self.owner),
            digests=self.committed_digests(),
            nans=dict(itertools.islice(nans.items(), _NAMED)),
            nan_elements=sum(nans.values()),
        )

    def _may_have_changed(self) -> bool:
        """Whether somebody may have written to the candidate since it was proved to be what was sent."""
        if self._count_writes is None:
            return self._is_asynchronous
        return self._count_writes() != self._writes

    # --- proof of the candidate -------------------------------------------------------------------------------------

    def _begin_proof(self, attempt: AttemptId) -> Future[None]:
        """Read the candidate once more, beside whatever else goes on: payloads are on their way meanwhile."""
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deltarefit-recheck")
        proof = pool.submit(self._prove, attempt)
        pool.shutdown(wait=False)
        return proof

    def _prove(self, attempt: AttemptId) -> None:
        # Counted first: a write during or after the proof must make the commit prove it again.
        self._writes = None if self._count_writes is None else self._count_writes()
        with self._events.stage("recheck", attempt):
            self._owner.verify()

    def _await_proof(self) -> None:
        """Return when no proof is under way, whatever came of it."""
        proof, self._proof = self._proof, None
        if proof is not None:
            proof.exception()

    # --- building ---------------------------------------------------------------------------------------------------

    def _build(self, command: Build) -> OwnerReply:
        self._await_proof()
        if command.starts_transition:
            self._machine.abandoned()
            self._owner.forget_candidate()
        attempt = self._bind(command)
        self._is_asynchronous = command.is_asynchronous
        self._sender.begin(attempt.attempt, command.relays)
        manifest = None if command.relays else ManifestWriter(self._store, attempt.attempt, self.owner)
        self._sent = []
        self._began_s = self._clock.monotonic_s()
        with (
            self._board.showing(attempt.attempt, self.progress),
            Pipeline[tuple[int, Bucket]](lambda job: self._encode_and_send(attempt, manifest, *job), _IN_FLIGHT) as pipeline,
        ):
            for job in enumerate(self._scan(attempt)):
                pipeline.submit(job)
            self._proof = self._begin_proof(attempt.attempt)
            pipeline.finish()
        if manifest is not None:
            manifest.end()
        entries = self._sent
        marker = self._machine.end(attempt.attempt)
        return OwnerReply(
            int(self.owner),
            marker=OwnerMarker(int(marker.owner), marker.count, marker.digest),
            payloads=len(entries),
            payload_nbytes=sum(entry.nbytes for entry in entries),
            changed_elements=self._owner.changed_elements,
            digests=_hex(self._owner.candidate_digests()),
        )

    def progress(self) -> Progress:
        """How far the build under way is, or the latest was. May be called from any thread."""
        total_nbytes, sent = self._owner.owned_nbytes, tuple(self._sent)
        return Progress(
            who=self._events.where,
            done_nbytes=min(self._owner.compared_nbytes, total_nbytes),
            total_nbytes=total_nbytes,
            payloads=len(sent),
            payload_nbytes=sum(entry.nbytes for entry in sent),
            elapsed_s=self._clock.monotonic_s() - self._began_s,
        )

    def _bind(self, command: Build) -> _Attempt:
        attempt = AttemptId(command.attempt)
        self._machine.prepare(
            BindOwner(
                attempt=attempt,
                revision=command.revision,
                base=command.base,
                target=command.target,
                candidate=command.candidate,
            )
        )
        plan = RefitPlan.from_wire(command.plan)
        return _Attempt(attempt, command.base, command.target, plan, EncodingMode(command.mode))

    def _scan(self, attempt: _Attempt) -> Iterable[Bucket]:
        """The owner's buckets, with the time spent making each one recorded as one scan.

        Raises:
            AttemptFailedError: the coordinator has given the attempt up.
        """
        buckets = iter(self._owner.build(attempt.plan, attempt.mode))
        while True:
            with self._events.stage("scan", attempt.attempt):
                bucket = next(buckets, None)
            if bucket is None:
                return
            yield bucket
            self._check_halt(attempt.attempt)

    def _check_halt(self, attempt: AttemptId) -> None:
        """Now and then, see whether the coordinator has given the attempt up.

        Raises:
            AttemptFailedError: it has.
        """
        if self._halt_pace.is_due and self._store.head(keys.halt(attempt)) is not None:
            raise AttemptFailedError(f"{attempt}: given up by the coordinator; owner {self.owner} goes no further")

    def _encode_and_send(self, attempt: _Attempt, manifest: ManifestWriter | None, sequence: int, bucket: Bucket) -> None:
        name = PayloadId(attempt.attempt, sequence, self.owner)
        with self._events.stage("encode", attempt.attempt, nbytes=bucket.input_nbytes, payload=str(name)):
            data = payload.encode(
                bucket.items,
                attempt=attempt.attempt,
                owner=self.owner,
                sequence=sequence,
                base_version=attempt.base.policy_version,
                target_version=attempt.target.policy_version,
                plan_digest=attempt.plan.digest,
                key=self._key,
            )
        entry = PayloadEntry.of(name, data)
        with self._lock:
            if self._machine.sent(attempt.attempt, entry.digest) != sequence:
                raise AttemptFailedError(f"{name}: sent out of order by owner {self.owner}")
        self._sender.send(name, data)
        if manifest is not None:
            manifest.add(entry)
        self._sent.append(entry)


def _hex(digests: dict[str, TensorDigest]) -> dict[str, str]:
    return {name: digest.hex() for name, digest in digests.items()}


def sum_digests(replies: Iterable[OwnerReply]) -> dict[str, TensorDigest]:
    """Per tensor, the sum over owners of their parts."""
    total: dict[str, TensorDigest] = {}
    for reply in replies:
        for name, text in reply.digests.items():
            total[name] = total.get(name, TensorDigest()) + TensorDigest.from_hex(text)
    return total
