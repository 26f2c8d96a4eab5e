"""The training side's one object: ``Publisher.refit()`` after each optimizer step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from deltarefit.canonical import Catalog
from deltarefit.errors import (
    AttemptFailedError,
    DeadlineError,
    OperatorRequiredError,
    RefitError,
    RejectedError,
)
from deltarefit.protocol import CommitRecord, ControlState, Delivery, UnfinishedAttempt, commands, events
from deltarefit.run_key import check_key
from deltarefit.runtime.adapters import training_side, write_guard
from deltarefit.runtime.auditing import AuditReport, audit
from deltarefit.runtime.clock import Clock, Deadline, IdSource, RandomIds, SystemClock
from deltarefit.runtime.coordinator import Coordinator
from deltarefit.runtime.driving import drive, expect_recovered, raise_unless_committed
from deltarefit.runtime.events import EventLog, StageEvent
from deltarefit.runtime.handle import RefitHandle
from deltarefit.runtime.messages import Failure, decode_message, encode_message
from deltarefit.runtime.names import COORDINATOR
from deltarefit.runtime.observers import Observers
from deltarefit.runtime.owner_group import OwnerGroup
from deltarefit.runtime.owner_worker import End, OwnerReply, OwnerWorker, sum_digests
from deltarefit.runtime.process import HomeProcess
from deltarefit.runtime.refit_state import Session
from deltarefit.runtime.report import RefitReport
from deltarefit.runtime.report_making import make_report
from deltarefit.runtime.senders import attempt_sender
from deltarefit.runtime.session import RunHold
from deltarefit.runtime.settings import PublisherSettings
from deltarefit.runtime.sizing import source_settings
from deltarefit.runtime.trace_clock import TimeAxis, boot_id
from deltarefit.source import Collective, CoverageReport, SourceAdapter, open_source, together
from deltarefit.transport import PayloadSender, open_run

__all__ = ["Publisher"]

_LOG = logging.getLogger(__name__)
_CLOSE_S = 600.0


class Publisher:
    """Carries a model's weights to every receiver of a run, exactly, each time ``refit`` is called.

    Create one on every training rank, with equal arguments, while the model holds the weights that the receivers load; then
    call ``refit`` on every rank after each optimizer step. Rank 0 coordinates; the ranks talk only among themselves, through
    the training job's own process group, and with receivers only through the run's store.
    """

    def __init__(
        self,
        model: Any,
        *,
        run: str,
        settings: PublisherSettings | None = None,
        key: bytes | None = None,
        collective: Collective | None = None,
        manifest: Catalog | str | Path | None = None,
        export: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        export_by_layer: bool = False,
        bridge: Any = None,
        adapter: SourceAdapter | None = None,
        wrap_sender: Callable[[PayloadSender], PayloadSender] | None = None,
        clock: Clock | None = None,
        ids: IdSource | None = None,
    ) -> None:
        """Read the model's facts, prove that every element has exactly one owner, copy the baseline, and take the run.

        Args:
            model: a torch module in training, or several by the prefix of their canonical names, such as
                ``{"": policy, "draft.": draft}``. Adapters are chosen from classes, unless ``adapter`` is given.
            run: names the run: ``file:///scratch/run7``, ``s3://bucket/run7``, ...
            settings: how; equal on all ranks.
            key: one secret per run, 16 to 64 bytes (``read_key`` reads it from a file); whoever takes part needs the same.
            collective: exchanges bytes between training ranks; default: torch.distributed if it is initialised.
            manifest: the checkpoint that receivers load, or its directory. The model must produce exactly its names and
                shapes; floating-point parameters are cast to its dtypes, as 32-bit master weights are for a 16-bit checkpoint.
            export: computes what is published from what the model's checkpoint would hold: takes and returns tensors by name.
                It must depend on nothing else. What it merely rearranges is still sent directly.
            export_by_layer: whether ``export`` may be called with the tensors of one layer alone.
            bridge: the AutoBridge that a Megatron model belongs to.
            adapter: facts about a source that no integration knows, instead of the four above.
            wrap_sender: wraps the payload sender, for tests and limits.
            clock: time; default: the machine's.
            ids: fresh names; default: the operating system's randomness.

        Raises:
            RejectedError: the model cannot be mapped, the run is held by a live coordinator or belongs to another model.
        """
        check_key(key)
        self.settings = settings or PublisherSettings()
        self._clock = clock or SystemClock()
        self._ids = ids or RandomIds()
        self._key = key
        self._home = HomeProcess()
        self._is_closed = False
        self._closing = ExitStack()
        self._busy = threading.Lock()
        self._hold: RunHold | None = None
        self._session: Session | None = None
        options = {"manifest": manifest, "export": export, "export_by_layer": export_by_layer, "bridge": bridge}
        side = training_side(model, adapter, collective, options, group_timeout_s=self.settings.group_timeout_s)
        self._collective = side.collective
        if hasattr(side.own_collective, "close"):
            self._closing.callback(side.own_collective.close)
        self._steps = write_guard(model)
        try:
            record = self._open(side.adapter, run, wrap_sender)
        except BaseException:
            self.close()
            raise
        self._policy_version: int = record.policy_version

    def coverage(self) -> CoverageReport:
        """How much of this model is sent directly, by weight type, in how many items if everything changes.

        Every training rank must call it, between refits. Reads no weights.
        """
        return self._source.coverage(self._collective)

    @property
    def policy_version(self) -> int:
        """The version that is committed, as far as this rank knows."""
        return self._policy_version

    def refit(self) -> RefitReport:
        """Carry the model's present weights to every receiver; returns when the next version is committed everywhere.

        The parameters must not change until it returns. Every training rank must call it.

        Raises:
            RejectedError: nothing was changed; the text says what to correct.
            CommitConflictError: another coordinator took the run over; stop.
            OperatorRequiredError: retries cannot repair it; the text names the command to run.
        """
        self._enter("refit")
        self._settle()
        return self._refit(Delivery.SYNCHRONOUS)

    def publish(self) -> RefitHandle:
        """Carry the model's present weights to every receiver in the background; engines serve until all of it has arrived.

        Until the handle is done the parameters must not change: compute with them as you like, but call ``handle.wait()``
        before the next optimizer step. A step of a torch optimizer on them is refused until then; other writes are found when
        the version is committed, and end in OperatorRequiredError. Every training rank must call it, and nothing else on this
        publisher until its handle is done.

        Raises:
            RejectedError: another call is under way.
        """
        self._enter("publish")
        self._settle()
        target = self._policy_version + 1
        why = f"policy version {target} is being published; call handle.wait() before the next optimizer step"
        self._steps.refuse(why)
        return RefitHandle(target, lambda: self._refit(Delivery.ASYNCHRONOUS), self._owners.progress)

    def audit(self) -> AuditReport:
        """Have every receiver prove from the bits it holds now that they are the committed policy's. Changes nothing.

        Reads all weights of every receiver, which go on serving, and the trainers' committed copy. Whatever differs is named,
        and sent whole by the next refit. Every training rank must call it.

        Raises:
            RejectedError: a refit is unfinished, or no receiver joined; the text says what to do.
            CommitConflictError: another coordinator took the run over; stop.
        """
        self._enter("audit")
        return msgspec.json.decode(self._decide("audit", self._audit), type=AuditReport)

    def subscribe(self, listener: Callable[[StageEvent], None]) -> None:
        """Have ``listener`` called with each stage that ends on this rank, from the thread that ran it."""
        self._owners.subscribe(listener)
        if self._session is not None:
            self._session.log.subscribe(listener)

    def close(self) -> None:
        """Give the run back. Receivers keep serving the committed version. Does nothing in a fork: the run is its parent's."""
        if not self._home.is_here:
            return
        self._is_closed = True
        is_idle = self._busy.acquire(timeout=_CLOSE_S)  # a refit in the background ends first
        if is_idle:
            self._busy.release()
        hold, self._hold, self._session = self._hold, None, None
        with self._closing:
            if hold is not None:
                hold.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    # --- setting up -------------------------------------------------------------------------------------------------

    def _open(
        self, adapter: SourceAdapter, run: str, wrap_sender: Callable[[PayloadSender], PayloadSender] | None
    ) -> CommitRecord:
        """Take the run with what this rank owns; what it says is committed."""
        share_nbytes = adapter.catalog().nbytes // self._collective.world_size
        self._source = open_source(adapter, self._collective, source_settings(self.settings, share_nbytes))
        self._store = together(self._collective, f"opening {run}", lambda: open_run(run, clock=self._clock))
        self._axis = TimeAxis(boot_id())
        worker = together(self._collective, "setting up owners", lambda: self._new_worker(wrap_sender))
        self._owners = OwnerGroup(worker, self._collective, clock=self._clock, axis=self._axis)
        self._initial = self._exchange_digests(worker)
        together(self._collective, f"taking run {run}", self._take_run)
        record = self._share_record()
        worker.take_baseline(record.baseline)
        return record

    def _new_worker(self, wrap_sender: Callable[[PayloadSender], PayloadSender] | None) -> OwnerWorker:
        """This rank's owner, with what it sends through and who watches it."""
        log = EventLog(self._clock, f"owner {self._collective.rank}")
        self.observers = Observers(self.settings, log.where, self._clock, serves_metrics=self._collective.rank == 0)
        self._closing.callback(self.observers.close)
        self.observers.watch(log)
        sender = attempt_sender(
            self._store,
            self._collective.rank,
            self.settings,
            key=self._key,
            wrap=wrap_sender,
            log=log,
            clock=self._clock,
            ids=self._ids,
        )
        self._closing.callback(sender.close)
        return OwnerWorker(
            self._source.owner,
            sender,
            self._store,
            log,
            clock=self._clock,
            key=self._key,
            count_writes=self._steps.count_writes,
        )

    def _exchange_digests(self, worker: OwnerWorker) -> list[OwnerReply]:
        """Every rank learns the digests of what all ranks own."""
        mine = OwnerReply(int(worker.owner), digests=worker.committed_digests())
        parts = self._collective.all_gather(msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(part, type=OwnerReply) for part in parts]

    def _take_run(self) -> None:
        """Rank 0 holds the run from here on; what a former coordinator left is ended first."""
        if self._collective.rank != 0:
            return
        digests = sum_digests(self._initial)
        hold = RunHold(
            self._store,
            self._source.catalog,
            digests,
            settings=self.settings,
            clock=self._clock,
            ids=self._ids,
            key=self._key,
        )
        try:
            log = EventLog(self._clock, COORDINATOR)
            self.observers.watch(log)
            session = hold.session(self._owners, self._collective.world_size, digests, log, self._axis)
            if not hold.is_new:
                self._end_unfinished(session, hold.state, alone=True)
                session.begin(hold.take_over_baseline())
                hold.announce(hold.state.record)
            hold.activity.end()
            hold.sweep()
        except BaseException:
            hold.release()
            raise
        self._hold, self._session = hold, session

    def _share_record(self) -> CommitRecord:
        """Every rank learns which version is committed, and the name of its baseline."""
        mine = None if self._hold is None else encode_message(self._hold.state.record)
        return decode_message(self._collective.broadcast(mine), CommitRecord, sender="rank 0")

    def _end_unfinished(self, session: Session, state: ControlState, *, alone: bool) -> None:
        """End the attempt that the record still names: a former coordinator's, or one of ours that a person had to look at.

        Raises:
            OperatorRequiredError: it cannot be ended yet; the text says what is missing.
        """
        attempt = state.attempt
        if attempt is None:
            return
        _LOG.warning("run %s: ending attempt %s, which was left open", self._store.url, attempt.attempt)
        started = events.Started(
            base=attempt.base, unfinished=UnfinishedAttempt(attempt.attempt, attempt.target), recover_only=True
        )
        coordinator = Coordinator(session, unfinished=attempt, alone=alone)
        expect_recovered(self._drive(coordinator, started), attempt.attempt, self._store.url)

    def _drive(self, coordinator: Coordinator, started: events.Started) -> commands.Finish:
        return drive(coordinator, started, max_attempts=self.settings.max_attempts, run=self._store.url)

    # --- one refit on rank 0 ----------------------------------------------------------------------------------------

    def _enter(self, what: str) -> None:
        """Begin a call; ``_decide`` ends it."""
        self._home.check(f"{what} on a Publisher")
        if self._is_closed:
            raise RejectedError(f"{what} on a closed Publisher; make a new one")
        if not self._busy.acquire(blocking=False):
            raise RejectedError(
                f"{what} while another call on this Publisher is under way; one at a time: wait for its handle first"
            )

    def _settle(self) -> None:
        """Return when the parameters of all ranks are final; if they cannot be read, the call that began is over."""
        try:
            self._source.adapter.barrier()
        except BaseException:
            self._busy.release()
            raise

    def _refit(self, delivery: Delivery) -> RefitReport:
        report = msgspec.json.decode(self._decide("refit", lambda: self._transition(delivery)), type=RefitReport)
        self._policy_version = report.policy_version
        return report

    def _decide(self, what: str, work: Callable[[], msgspec.Struct]) -> bytes:
        """Have rank 0 do it while the others follow; its report, as JSON, or its failure on every rank."""
        try:
            end = self._lead(what, work) if self._collective.rank == 0 else self._owners.follow()
        finally:
            self._steps.allow()
            self._busy.release()
        if end.failure is not None:
            raise end.failure.error()
        return end.report

    def _lead(self, what: str, work: Callable[[], msgspec.Struct]) -> End:
        """Do the work; whatever happens, let the other ranks go with the same result."""
        end = End(b"", Failure(AttemptFailedError.__name__, f"the {what} was interrupted on rank 0"))
        try:
            end = End(msgspec.json.encode(work()), None)
        except RefitError as error:
            end = End(b"", Failure.of(error))
        finally:
            if self._hold is not None:
                self._hold.activity.end()
            if not self._owners.is_lost:
                self._owners.end(end)
        return end

    def _audit(self) -> AuditReport:
        hold, session = self._hold, self._session
        if hold is None or session is None:
            raise RejectedError("audit without a run; make a new Publisher")
        hold.ensure_may_act()
        self._await_receivers(session)
        return audit(session, self._record(session))

    def _transition(self, delivery: Delivery) -> RefitReport:
        hold, session = self._hold, self._session
        if hold is None or session is None:
            raise RejectedError("refit without a run; make a new Publisher")
        hold.ensure_may_act()
        self._axis.forget()
        state = self._record(session)
        self._end_unfinished(session, state, alone=False)
        self._await_receivers(session)
        state = self._without_abort(session, self._record(session))
        session.begin(state, delivery)
        coordinator = Coordinator(session)
        unfinished = state.transition is not None
        finish = self._drive(
            coordinator,
            events.Started(base=state.record, is_admitted=unfinished, is_dense=bool(state.repair) or unfinished),
        )
        raise_unless_committed(finish, self._store.url)
        hold.announce(finish.record)
        hold.sweep(session.members.long_gone())
        return make_report(session, coordinator.outcome, finish, self.observers)

    def _without_abort(self, session: Session, state: ControlState) -> ControlState:
        """An operator aborted an earlier refit while nobody was there to see it: that one is over, this one repairs."""
        if not state.abort:
            return state
        return session.control.record_abort(session.epoch, f"a refit was aborted by an operator: {state.abort}")

    def _record(self, session: Session) -> ControlState:
        state = session.control.read()
        if state is None:
            raise OperatorRequiredError(
                f"the control record of {self._store.url} is gone; see 'deltarefit doctor --run "
                f"{self._store.url}', bring it back from a copy, or start a new run"
            )
        return state

    def _await_receivers(self, session: Session) -> None:
        count = self.settings.min_receivers
        deadline = Deadline(self._clock, self.settings.join_timeout_s if count else self.settings.lease_s)
        try:
            session.members.wait_ready(session.catalog.digest, count, deadline, waiting=session.activity.begin)
        except DeadlineError as error:
            raise RejectedError(str(error)) from error
