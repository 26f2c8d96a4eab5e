"""Carries out what ``protocol.Reception`` decides: fetches payloads as they appear, applies them, opens and shuts the gate.

Reception decides what is taken, in which order, what the weights are worth and whether they may be served; nothing here does.
Used by one thread, which is the lock that Reception asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from deltarefit import payload
from deltarefit.errors import (
    AttemptFailedError,
    CommitConflictError,
    DeadlineError,
    LoaderContractError,
    PayloadInvalidError,
    PayloadMissingError,
    RefitError,
)
from deltarefit.ids import AttemptId, BaselineId, EncodingMode, OwnerId, PayloadId, PolicyVersion, ReceiverId
from deltarefit.plan import RefitPlan
from deltarefit.protocol import (
    Arrival,
    CommitRecord,
    ControlState,
    Delivery,
    EndMarker,
    Phase,
    PrepareAttempt,
    Reception,
    Verdict,
    end_digest,
)
from deltarefit.runtime import messages
from deltarefit.runtime.clock import Clock, Deadline, Pace
from deltarefit.runtime.engine import EngineDriver
from deltarefit.runtime.events import EventLog, StageEvent
from deltarefit.runtime.progress import Progress, ProgressBoard
from deltarefit.transport import Manifest, PayloadEntry, PayloadSource, RunStore, read_manifest

__all__ = ["Application"]

_LOG = logging.getLogger(__name__)
_SHUT_S = 1.0  # an engine that must not serve is asked to stop at once; whether requests ended is waited for before writing
_UNLISTED_S = 5.0
"""After a flush the manifest is durable. A store whose listings lag gets this long to show it."""


class Application:
    """One receiver's reception and its engine, over all attempts."""

    def __init__(
        self,
        receiver: ReceiverId,
        *,
        engine: EngineDriver,
        store: RunStore,
        source: PayloadSource,
        log: EventLog,
        clock: Clock,
        pace: Pace,
        may_act: Callable[[], bool],
    ) -> None:
        self.reception = Reception(receiver)
        self.failure: RefitError | None = None
        """Why the attempt at hand failed here."""
        self.written_elements = 0
        """Of the attempt at hand."""
        self._receiver = receiver
        self._engine = engine
        self._store = store
        self._source = source
        self._log = log
        self._clock = clock
        self._pace = pace
        self._may_act = may_act
        self._revision = 0
        self._must_shut = False
        self._closed_s: float | None = None
        """Since when the gate has been closed in the transition at hand."""
        self._board = ProgressBoard(store)
        self._applied: list[int] = []
        """Length of each payload applied in the attempt at hand."""
        self._must_drop = False
        """Caches may stem from weights that were written over."""
        self._manifest = Manifest("")
        self._entries: dict[tuple[int, int], PayloadEntry] = {}
        """What the manifest lists, by sequence and owner."""
        self._flushed: Deadline | None = None

    # --- attempt ----------------------------------------------------------------------------------------------------

    @property
    def attempt(self) -> AttemptId | None:
        return self.reception.attempt

    @property
    def is_applying(self) -> bool:
        return self.reception.phase is Phase.APPLYING

    def prepare(self, body: messages.Prepare, plan: RefitPlan) -> None:
        """Bind to an attempt; an earlier one is over by that (paper B: a later prepare replaces it).

        Raises:
            CommitConflictError: a later attempt was bound here before.
            RejectedError: weights or engine do not fit the attempt.
        """
        if body.revision < self._revision:
            raise CommitConflictError(
                f"receiver {self._receiver}: {body.attempt} was bound by record revision {body.revision}, but revision "
                f"{self._revision} bound another attempt here; another coordinator took over"
            )
        request = PrepareAttempt(
            attempt=AttemptId(body.attempt),
            revision=body.revision,
            base_version=PolicyVersion(body.base_version),
            target_version=PolicyVersion(body.target_version),
            baseline=BaselineId(body.baseline),
            plan_digest=plan.digest,
            mode=EncodingMode(body.mode),
            is_dense=body.restores,
            candidate=body.candidate,
            owners=tuple(OwnerId(number) for number in range(plan.num_owners)),
            delivery=Delivery.SYNCHRONOUS,
        )
        self.reception.prepare(request)
        self._board.end()
        self._revision = body.revision
        self.failure = None
        self.written_elements = 0
        self._applied = []
        self._manifest = Manifest(body.attempt)
        self._entries = {}
        self._flushed = None
        self._pace.reset()
        try:
            self._engine.prepare(plan)
        except Exception as error:
            self._fail(error)
            raise

    def open(self, attempt: AttemptId, request_timeout_s: float) -> None:
        """Close the request gate, wait for running requests, and apply from now on. Of another attempt: nothing happens.

        Raises:
            DeadlineError: requests did not end.
        """
        if self.reception.close_gate(attempt):
            self._board.begin(attempt, self._progress(self._clock.monotonic_s()))
            self._closed_s = self._log.now_s() if self._closed_s is None else self._closed_s
            self._engine.close_gate(request_timeout_s)
            self._must_shut = False
            self.reception.open_apply(attempt)

    def pump(self, budget_s: float) -> bool:
        """Apply what has arrived and is next, for about so long; whether there was anything. A failure is kept."""
        if not self.is_applying:
            return False
        deadline = Deadline(self._clock, budget_s)
        progressed = False
        try:
            if self._pace.is_due:
                self._look()
            while self._apply_next():
                progressed = True
                self._pace.reset()
                if deadline.expired:
                    break
        except Exception as error:
            self._fail(error)
        return progressed

    def is_finished(self, body: messages.Flush) -> bool:
        """Whether everything that the owners sent is applied.

        Raises:
            AttemptFailedError: the attempt is not at hand, or failed here.
            PayloadMissingError: the durable manifest lacks what the owners say they sent.
        """
        attempt = AttemptId(body.attempt)
        if self.failure is not None and self.attempt == attempt:
            raise self.failure
        if not self.reception.is_active(attempt) or self.reception.phase is Phase.RECEIVING:
            raise AttemptFailedError(
                f"receiver {self._receiver}: flush of {attempt}, but {self.attempt or 'no attempt'} is at hand, "
                f"{self.reception.phase.value}"
            )
        for owner in body.ended:
            self.reception.end(EndMarker(attempt=attempt, owner=OwnerId(owner.owner), count=owner.count, digest=owner.digest))
        if not self.reception.is_drained:
            self._require_listed(body)
        return self.reception.is_drained

    def complete(self, attempt: AttemptId) -> None:
        """Everything is applied: bring devices in step; from here on the commit decides.

        Raises:
            PayloadMissingError: a tensor that must be loaded whole did not arrive whole.
        """
        self._engine.synchronize()
        self.reception.complete(attempt)
        self._board.end()

    def stop(self, attempt: AttemptId) -> None:
        """Apply nothing more of it. Calls come between payloads, so no write is under way; devices are brought in step.

        Raises:
            RefitError: the engine cannot be asked whether it still writes.
        """
        if not self.reception.mark_obsolete(attempt):
            return
        self._board.end()
        try:
            self._engine.synchronize()
        except (PayloadMissingError, LoaderContractError) as error:
            _LOG.info("receiver %s: %s stopped: %s", self._receiver, attempt, error)  # devices are in step before it is raised
        self.reception.cleanup(attempt)

    # --- after the commit, and between attempts ---------------------------------------------------------------------

    def drop_caches(self, record: CommitRecord) -> None:
        """Forget what was computed from older weights, and label the engine.

        Raises:
            AttemptFailedError: the weights here are not what the record publishes.
        """
        holds = self.reception.committed(record)
        self._engine.drop_caches()
        if not holds:
            raise AttemptFailedError(f"receiver {self._receiver}: its weights are not those of {record}")
        self._must_drop = False
        self._engine.publish(record.policy_version)

    def reopen(self, attempt: AttemptId, record: CommitRecord) -> bool:
        """Serve again at the end of a transition; False if another attempt came after it.

        Raises:
            OperatorRequiredError: the weights are not what the record publishes.
        """
        if not self.reception.reopen_gate(attempt, record):
            return False
        self._engine.reopen_gate()
        if self._closed_s is not None:
            self._log.add(StageEvent("pause", self._log.where, attempt, self._closed_s, self._log.now_s()))
        self._closed_s = None
        return True

    def shut(self) -> None:
        """Serve nothing and take part in no attempt as the one that it was: it was left behind, or may have been."""
        resident = replace(self.reception.resident, fenced="", is_gate_closed=True)
        self.reception = Reception(self._receiver, resident=resident)
        self.failure = None
        self._board.end()
        self._closed_s = None
        self._must_shut = True
        self.keep_shut()

    def keep_shut(self) -> None:
        """If the engine could not be stopped when the gate was shut, try again."""
        if not self._must_shut:
            return
        try:
            self._engine.close_gate(_SHUT_S)
        except DeadlineError as error:
            _LOG.info("receiver %s: gate shut; %s", self._receiver, error)
        except RefitError as error:
            _LOG.warning("receiver %s: the engine did not stop serving, will try again: %s", self._receiver, error)
            return
        self._must_shut = False

    def serve_again(self, state: ControlState) -> bool:
        """Open a shut gate between refits, if the weights are what the record publishes; True if it was opened now.

        So a receiver whose lease ran out, that just joined, or that missed the end of a refit, need not wait for the next one.
        """
        if state.attempt is not None or state.transition is not None or state.repair:
            return False
        if not self.reception.committed(state.record) or not self.reception.reopen_gate(None, state.record):
            return False
        if self._must_drop:
            self._engine.drop_caches()
            self._must_drop = False
        self._engine.publish(state.record.policy_version)
        self._engine.reopen_gate()
        self._must_shut = False
        return True

    # --- payloads ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Read the manifest, and check that nothing that was accepted has changed since."""
        attempt = AttemptId(self._manifest.attempt)
        manifest = read_manifest(self._store, attempt)
        if manifest == self._manifest:
            return
        self._pace.reset()
        for entry in manifest.entries:
            before = self._entries.setdefault((entry.sequence, entry.owner), entry)
            if before != entry:
                raise PayloadInvalidError(
                    f"{entry.payload_id(attempt)}: listed with digest {entry.digest}, before with {before.digest}; ids are "
                    "never reused"
                )
        for end in manifest.ended:
            digests = [entry.digest for entry in manifest.entries if entry.owner == end.owner]
            self.reception.end(
                EndMarker(attempt=attempt, owner=OwnerId(end.owner), count=end.count, digest=end_digest(digests))
            )
        self._manifest = manifest

    def _apply_next(self) -> bool:
        """Fetch, hand to reception and apply the payload that is next in the declared order, if it is listed."""
        name = self.reception.next_payload()
        entry = self._entries.get((name.sequence, int(name.owner))) if name is not None else None
        if name is None or entry is None:
            return False
        with self._log.stage("fetch", name.attempt, nbytes=entry.nbytes, payload=str(name)):
            data = self._source.fetch(name, nbytes=entry.nbytes, digest=entry.digest)
        verdict = self.reception.arrive(_arrival(name, entry, data))
        if verdict is not Verdict.QUEUE:
            raise AttemptFailedError(f"{name}: expected to be queued, the reception says {verdict.value}")
        if not self._may_act():
            raise AttemptFailedError(
                f"receiver {self._receiver}: its lease ran out during {name.attempt}; it writes nothing more of it"
            )
        taken = self.reception.take()
        if taken != name:
            raise AttemptFailedError(f"{name}: expected to be next, the reception names {taken}")
        self._must_drop = True
        try:
            with self._log.stage("apply", name.attempt, nbytes=entry.nbytes, payload=str(name)):
                self.written_elements += self._engine.apply(data)
        except Exception as error:
            self.reception.write_failed(name, str(error))
            raise
        self.reception.applied(name)
        self._applied.append(entry.nbytes)
        return True

    def _progress(self, began_s: float) -> Callable[[], Progress]:
        def read() -> Progress:
            applied = tuple(self._applied)
            elapsed_s = self._clock.monotonic_s() - began_s
            return Progress(who=self._log.where, payloads=len(applied), payload_nbytes=sum(applied), elapsed_s=elapsed_s)

        return read

    def _require_listed(self, body: messages.Flush) -> None:
        """After a flush everything must show in the manifest, soon."""
        if self._flushed is None:
            self._flushed = Deadline(self._clock, _UNLISTED_S)
        if not self._flushed.expired:
            return
        absent = [(n, o.owner) for o in body.ended for n in range(o.count) if (n, o.owner) not in self._entries]
        if absent:
            sequence, owner = min(absent)
            raise PayloadMissingError(
                f"{PayloadId(AttemptId(body.attempt), sequence, OwnerId(owner))} and {len(absent) - 1} more: sent, say their "
                f"owners, but not listed in {self._store.url} {_UNLISTED_S:.0f} s after the flush"
            )

    def _fail(self, error: Exception) -> None:
        known = error if isinstance(error, RefitError) else AttemptFailedError(f"{type(error).__name__}: {error}")
        if not isinstance(error, RefitError):
            _LOG.exception("receiver %s: %s failed", self._receiver, self.attempt)
        if self.failure is None:
            self._log.failed(self.attempt or "", str(known))
        self.failure = self.failure or known
        if self.attempt is not None:
            self.reception.fail(self.attempt, str(known))


def _arrival(name: PayloadId, entry: PayloadEntry, data: bytes) -> Arrival:
    """What a payload says of itself: a key in a store is no proof.

    Raises:
        PayloadInvalidError: it is another payload than its key says.
    """
    header = payload.read_header(data)
    found = PayloadId(header.attempt, header.sequence, header.owner)
    if found != name:
        raise PayloadInvalidError(f"{name}: its header says {found}; it was not applied")
    return Arrival(
        payload=name,
        base_version=header.base_version,
        target_version=header.target_version,
        plan_digest=header.plan_digest,
        nbytes=entry.nbytes,
        digest=entry.digest,
    )
