"""Carries out what ``protocol.Reception`` decides about attempts, the weights and the request gate; ``delivery`` does payloads.

Reception decides what is taken, in which order, what the weights are worth and whether they may be served; nothing here does.
Used by one thread, which is the lock that Reception asks for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from deltarefit.errors import (
    AttemptFailedError,
    CommitConflictError,
    DeadlineError,
    LoaderContractError,
    PayloadMissingError,
    RefitError,
)
from deltarefit.ids import AttemptId, BaselineId, EncodingMode, OwnerId, PolicyVersion, ReceiverId
from deltarefit.plan import RefitPlan
from deltarefit.protocol import (
    CommitRecord,
    ControlState,
    Delivery,
    EndMarker,
    Phase,
    PrepareAttempt,
    Reception,
    ReceptionSettings,
    Resident,
)
from deltarefit.runtime import messages
from deltarefit.runtime.clock import Clock, Deadline, Pace
from deltarefit.runtime.delivery import AttemptDelivery, DeliveryLimits
from deltarefit.runtime.engine import EngineDriver, require_done
from deltarefit.runtime.events import EventLog, StageEvent
from deltarefit.runtime.progress import Progress, ProgressBoard
from deltarefit.runtime.sharing import ReceiverFeeds
from deltarefit.transport import RunStore

__all__ = ["Application"]

_LOG = logging.getLogger(__name__)
_SHUT_S = 1.0  # an engine that must not serve is asked to stop at once; whether requests ended is waited for before writing


class Application:
    """One receiver's reception and its engine, over all attempts."""

    def __init__(
        self,
        receiver: ReceiverId,
        *,
        engine: EngineDriver,
        store: RunStore,
        feeds: ReceiverFeeds,
        log: EventLog,
        clock: Clock,
        new_pace: Callable[[str], Pace],
        may_act: Callable[[], bool],
        news: threading.Event,
        settings: ReceptionSettings | None = None,
        limits: DeliveryLimits | None = None,
    ) -> None:
        self.reception = Reception(receiver, settings=settings)
        self.failure: RefitError | None = None
        """Why the attempt at hand failed here."""
        self._receiver = receiver
        self._engine = engine
        self._feeds = feeds
        self._log = log
        self._clock = clock
        self._new_pace = new_pace
        self._news = news
        self._may_act = may_act
        self._settings = settings
        self._limits = limits or DeliveryLimits()
        self._delivery: AttemptDelivery | None = None
        self._revision = 0
        self._must_shut = False
        self._closed_s: float | None = None
        """Since when the gate has been closed in the transition at hand."""
        self._board = ProgressBoard(store)
        self._must_drop = False
        """Caches may stem from weights that were written over."""
        self._flushed: Deadline | None = None

    # --- attempt ----------------------------------------------------------------------------------------------------

    @property
    def attempt(self) -> AttemptId | None:
        return self.reception.attempt

    @property
    def is_receiving(self) -> bool:
        """Whether payloads are to be taken in, or applied."""
        return self._delivery is not None and self.reception.phase in (Phase.RECEIVING, Phase.APPLYING)

    @property
    def written_elements(self) -> int:
        """Of the attempt at hand."""
        return 0 if self._delivery is None else self._delivery.written_elements

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
            delivery=Delivery(body.delivery),
        )
        self.reception.prepare(request)
        self._end_delivery()
        self._revision = body.revision
        self.failure = None
        self._flushed = None
        try:
            self._engine.prepare(plan)
            self._begin_delivery(request, body.transport)
        except Exception as error:
            self._fail(error)
            raise

    def _begin_delivery(self, request: PrepareAttempt, transport: str) -> None:
        self._delivery = AttemptDelivery(
            request.attempt,
            self.reception,
            self._engine,
            self._feeds.feed(request.attempt, request.owners, transport),
            limits=self._limits,
            log=self._log,
            clock=self._clock,
            pace=self._new_pace(transport),
            may_act=self._may_act,
            news=self._news,
        )
        self._board.begin(request.attempt, self._progress(self._clock.monotonic_s()))

    def _end_delivery(self) -> None:
        """Take nothing more in, and show no progress."""
        self._board.end()
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            delivery.close()
            self._feeds.forget(delivery.attempt)

    def open(self, attempt: AttemptId, request_timeout_s: float) -> None:
        """Close the request gate, wait for running requests, and apply from now on. Of another attempt: nothing happens.

        Raises:
            DeadlineError: requests did not end.
        """
        if self.reception.close_gate(attempt):
            self._closed_s = self._log.now_s() if self._closed_s is None else self._closed_s
            self._engine.close_gate(request_timeout_s)
            self._must_shut = False
            self._must_drop = True
            self.reception.open_apply(attempt)

    def pump(self, budget_s: float) -> bool:
        """Take in what arrived and apply what is next, for about so long; whether there was anything. A failure is kept."""
        if not self.is_receiving or self._delivery is None:
            return False
        try:
            progressed = self._delivery.pump(budget_s)
        except Exception as error:
            self._fail(error)
            return False
        return progressed

    def is_finished(self, body: messages.Flush) -> bool:
        """Whether everything that the owners sent is applied. Raises what ``has_arrived`` raises."""
        attempt = AttemptId(body.attempt)
        if self.reception.is_active(attempt) and self.reception.phase is Phase.RECEIVING and self.failure is None:
            raise AttemptFailedError(f"receiver {self._receiver}: flush of {attempt} before it was opened")
        self._note_ended(attempt, body.ended)
        return self.reception.is_drained

    def has_arrived(self, body: messages.ConfirmArrival) -> bool:
        """The arrival check: whether everything that the owners sent is here, and what may be decoded by now is whole.

        Raises:
            AttemptFailedError: the attempt is not at hand, or failed here.
            PayloadMissingError: something that was sent does not show up.
        """
        self._note_ended(AttemptId(body.attempt), body.ended)
        return not self.reception.missing(limit=1) and self._delivery is not None and self._delivery.is_checked

    def complete(self, attempt: AttemptId) -> None:
        """Everything is applied: bring devices in step; from here on the commit decides.

        Raises:
            PayloadMissingError: a tensor that must be loaded whole did not arrive whole.
        """
        self._engine.synchronize()
        self.reception.complete(attempt)
        self._board.end()
        if self._delivery is not None:
            self._delivery.close()

    def stop(self, attempt: AttemptId) -> None:
        """Apply nothing more of it. Calls come between payloads, so no write is under way; devices are brought in step.

        Raises:
            RefitError: the engine cannot be asked whether it still writes.
        """
        if not self.reception.mark_obsolete(attempt):
            return
        self._end_delivery()
        try:
            self._engine.synchronize()
        except (PayloadMissingError, LoaderContractError) as error:
            _LOG.info("receiver %s: %s stopped: %s", self._receiver, attempt, error)  # devices are in step before it is raised
        self.reception.cleanup(attempt)

    def close(self) -> None:
        """Take in nothing more; the engine keeps what it holds."""
        self._end_delivery()

    # --- after the commit, and between attempts ---------------------------------------------------------------------

    def drop_caches(self, record: CommitRecord) -> None:
        """Forget what was computed from older weights, and label the engine.

        Raises:
            AttemptFailedError: the weights here are not what the record publishes.
        """
        holds = self.reception.committed(record)
        self._end_delivery()
        require_done(self._engine.drop_caches(), f"receiver {self._receiver}: drop_caches")
        if not holds:
            raise AttemptFailedError(f"receiver {self._receiver}: its weights are not those of {record}")
        self._engine.publish(record.policy_version)  # may refuse too: a module's owner drops caches there
        self._must_drop = False

    def reopen(self, attempt: AttemptId, record: CommitRecord) -> bool:
        """Serve again at the end of a transition; False if another attempt came after it.

        Raises:
            OperatorRequiredError: the weights are not what the record publishes.
            AttemptFailedError: caches of older weights are still there.
        """
        if self._must_drop and self.reception.attempt in (None, attempt):
            raise AttemptFailedError(
                f"receiver {self._receiver}: its engine still has caches of older weights; its gate stays closed"
            )
        if not self.reception.reopen_gate(attempt, record):
            return False
        with self._opening():
            self._engine.reopen_gate()
        if self._closed_s is not None:
            self._log.add(StageEvent("pause", self._log.where, attempt, self._closed_s, self._log.now_s()))
        self._closed_s = None
        return True

    def shut(self) -> None:
        """Serve nothing and take part in no attempt as the one that it was: it was left behind, or may have been."""
        resident = replace(self.reception.resident, fenced="", is_gate_closed=True)
        self.reception = Reception(self._receiver, resident=resident, settings=self._settings)
        self.failure = None
        self._end_delivery()
        self._closed_s = None
        self._must_shut = True
        self.keep_shut()

    def forget_weights(self) -> None:
        """Serve nothing: what the engine holds is not known any more, and no attempt goes on."""
        self.reception = Reception(self._receiver, resident=Resident(is_gate_closed=True), settings=self._settings)
        self._must_drop = True
        self.shut()

    def doubt_caches(self) -> None:
        """What wrote the weights may have died before it had caches dropped: an engine may outlive the receiver beside it."""
        self._must_drop = True

    @property
    def is_shut(self) -> bool:
        """Whether the engine did what ``shut`` asked it to."""
        return not self._must_shut

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
        if not state.is_idle:
            return False
        if not self.reception.committed(state.record):
            return False
        if self._must_drop:
            require_done(self._engine.drop_caches(), f"receiver {self._receiver}: drop_caches")
        if not self.reception.reopen_gate(None, state.record):
            return False
        with self._opening():
            self._engine.publish(state.record.policy_version)
            self._must_drop = False
            self._engine.reopen_gate()
        self._must_shut = False
        self._closed_s = None  # a pause that outlasted its refit is in no report, so not in the next one's either
        return True

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """An engine that could not be opened is closed, whatever was meant: so it is tried again."""
        try:
            yield
        except BaseException:
            self.reception.keep_gate_closed()
            raise

    # --- payloads ---------------------------------------------------------------------------------------------------

    def _note_ended(self, attempt: AttemptId, ended: Iterable[messages.OwnerMarker]) -> None:
        """Take in what the owners say that they sent, and notice if some of it does not show up.

        Raises:
            AttemptFailedError: the attempt is not at hand, or failed here.
            PayloadMissingError: nothing new was seen for a while, and something is still missing.
        """
        if self.failure is not None and self.attempt == attempt:
            raise self.failure
        if not self.reception.is_active(attempt) or self._delivery is None:
            raise AttemptFailedError(
                f"receiver {self._receiver}: asked about the end of {attempt}, but {self.attempt or 'no attempt'} is at hand, "
                f"{self.reception.phase.value}"
            )
        markers = list(ended)
        for one in markers:
            self.reception.end(EndMarker(attempt=attempt, owner=OwnerId(one.owner), count=one.count, digest=one.digest))
        patience_s = self._delivery.patience_s
        if self._flushed is None:
            self._flushed = Deadline(self._clock, patience_s)
        absent, quiet_s = self._delivery.unseen({one.owner: one.count for one in markers})
        if absent and self._flushed.expired and quiet_s >= patience_s:
            raise PayloadMissingError(
                f"{min(absent)} and {len(absent) - 1} more: sent, say their owners, but nothing of them was seen here for "
                f"{quiet_s:.0f} s"
            )

    def _progress(self, began_s: float) -> Callable[[], Progress]:
        delivery = self._delivery

        def read() -> Progress:
            applied = () if delivery is None else tuple(delivery.applied)
            elapsed_s = self._clock.monotonic_s() - began_s
            return Progress(who=self._log.where, payloads=len(applied), payload_nbytes=sum(applied), elapsed_s=elapsed_s)

        return read

    def _fail(self, error: Exception) -> None:
        known = error if isinstance(error, RefitError) else AttemptFailedError(f"{type(error).__name__}: {error}")
        if not isinstance(error, RefitError):
            _LOG.exception("receiver %s: %s failed", self._receiver, self.attempt)
        if self.failure is None:
            self._log.failed(self.attempt or "", str(known))
        self.failure = self.failure or known
        if self._delivery is not None:
            self._delivery.close()
        if self.attempt is not None:
            self.reception.fail(self.attempt, str(known))
