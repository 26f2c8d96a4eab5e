"""The rollout side's one object: ``Receiver`` joins a run and refits its engine in place (paper Algorithm B.1, receivers)."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from deltarefit.canonical import Catalog, digest_of_digests
from deltarefit.errors import DeadlineError, RefitError, RejectedError
from deltarefit.ids import ReceiverId, receiver_id
from deltarefit.protocol import ControlState
from deltarefit.receiver import ReceiverSettings
from deltarefit.runtime.adapters import engine_integration
from deltarefit.runtime.application import Application
from deltarefit.runtime.clock import Clock, Deadline, IdSource, Pace, RandomIds, SystemClock
from deltarefit.runtime.engine import EngineDriver, LocalEngine
from deltarefit.runtime.events import EventLog, StageEvent
from deltarefit.runtime.gate import LocalGate, RequestGate
from deltarefit.runtime.mailroom import MailRoom
from deltarefit.runtime.messages import RunNotice, decode_message, encode_message
from deltarefit.runtime.names import COORDINATOR
from deltarefit.runtime.observers import Observers
from deltarefit.runtime.planning import summarise
from deltarefit.runtime.presence import Presence
from deltarefit.runtime.receiver_desk import MAX_PLAN_NBYTES, ReceiverDesk
from deltarefit.runtime.session import control_plane, lease_settings, mail_settings
from deltarefit.runtime.settings import ReceiverAgentSettings
from deltarefit.runtime.sharing import (
    busy_pace,
    delivery_limits,
    idle_pace,
    receiver_feeds,
    reception_settings,
    relay_pace,
)
from deltarefit.transport import Mailbox, keys, open_run, read_beacon

__all__ = ["Receiver"]

_LOG = logging.getLogger(__name__)
_CLOSE_S = 60.0
_PUMP_S = 0.25
"""Longest stretch of applying payloads before calls are looked at again. A single payload is never interrupted."""


class Receiver:
    """Keeps one rollout engine at the committed policy version of a run.

    ``Receiver.attach`` starts it in a thread of its own. Requests to an engine in this process go through
    ``with receiver.serving():``, so that none ever sees partly applied weights.
    """

    def __init__(
        self,
        engine: EngineDriver,
        *,
        run: str,
        name: str | None = None,
        request_gate: RequestGate | None = None,
        settings: ReceiverAgentSettings | None = None,
        clock: Clock | None = None,
        ids: IdSource | None = None,
    ) -> None:
        """Show a first sign of life under the run; ``step`` or ``start`` does the rest."""
        self.settings = settings or ReceiverAgentSettings()
        self._engine = engine
        self._gate = request_gate
        self._clock = clock or SystemClock()
        ids = ids or RandomIds()
        nonce = ids.nonce()
        self.name: ReceiverId = receiver_id(name or f"receiver-{nonce}")
        self._store = open_run(run, clock=self._clock)
        self._control = control_plane(self._store, self._clock, ids)
        self._mailbox = Mailbox(self._store, self.name, clock=self._clock, nonce=nonce, settings=mail_settings(self._store))
        self._log = EventLog(self._clock, f"receiver {self.name}")
        self.observers = Observers(self.settings, self._log.where, self._clock)
        self.observers.watch(self._log)
        self._failure: RefitError | None = None
        self._has_new_places = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        stale = self._mailbox.take(0.0)  # left by an earlier start of this receiver
        self._mailbox.acknowledge(*(mail.key for mail in stale))
        lease = lease_settings(self.settings.lease_s)
        self._look_pace = Pace(self._clock, first_s=lease.renew_s, most_s=lease.renew_s)
        self._presence = Presence(self._store, self.name, engine.name, nonce=nonce, lease=lease, clock=self._clock, ids=ids)
        self._feeds = receiver_feeds(self.name, self._store, self.settings, log=self._log, clock=self._clock, ids=ids)
        self._presence.note(node=self._feeds.node)
        self._news = threading.Event()
        self._mailroom = MailRoom(
            self._mailbox,
            self._clock,
            busy=busy_pace(self._store, self._clock),
            idle=idle_pace(self._store, self._clock),
            news=self._news,
        )
        self._application = Application(
            self.name,
            engine=engine,
            store=self._store,
            feeds=self._feeds,
            log=self._log,
            clock=self._clock,
            new_pace=lambda way: relay_pace(self._clock) if way == "relay" else busy_pace(self._store, self._clock),
            may_act=lambda: self._presence.may_act,
            news=self._news,
            settings=reception_settings(self.settings),
            limits=delivery_limits(self.settings),
        )
        self._desk = ReceiverDesk(
            self.name,
            engine=engine,
            application=self._application,
            presence=self._presence,
            mailbox=self._mailroom,
            store=self._store,
            log=self._log,
            request_timeout_s=self.settings.request_timeout_s,
            prewarm_anew=self._prewarm_anew,
        )
        self._shut_if_left_behind()

    @classmethod
    def attach(
        cls,
        target: Any,
        load_weights: Callable[[Iterable[tuple[str, Any]]], object] | None = None,
        *,
        run: str,
        name: str | None = None,
        request_gate: RequestGate | None = None,
        on_refit: Callable[[int], None] | None = None,
        key: bytes | None = None,
        settings: ReceiverAgentSettings | None = None,
        rank_settings: ReceiverSettings | None = None,
        start: bool = True,
    ) -> Receiver:
        """Join a run with an engine.

        Args:
            target: a rollout engine that an integration knows (vLLM's ``LLM``), or any torch module with ``load_weights``.
            load_weights: the module's own loader: takes (checkpoint name, tensor) pairs and writes them into the module, in
                place, with torch copies. See ``docs/loader-contract.md`` for the contract.
            run: the trainer's ``run``.
            name: the receiver's name in reports and commands; default: a fresh one.
            request_gate: how to keep requests out during a refit; default: ``serving()`` of this object.
            on_refit: for torch modules: called with the committed version before requests are admitted again, to drop caches.
            key: the run's secret, if the trainer has one.
            settings: how.
            rank_settings: for torch modules: how weights are learned and written (parameters that the checkpoint lacks, the
                check after each write, what else decides the layout).
            start: run in a background thread; otherwise call ``step`` yourself.

        Raises:
            RejectedError: no integration knows the target, or it cannot be refitted.
        """
        gate = request_gate or LocalGate()
        settings = settings or ReceiverAgentSettings()
        if load_weights is not None:
            engine: EngineDriver = LocalEngine(
                target, load_weights, request_gate=gate, on_refit=on_refit, key=key, settings=rank_settings
            )
        else:
            engine = engine_integration(target).engine_driver(target, request_gate=gate, key=key)
        receiver = cls(engine, run=run, name=name, request_gate=gate, settings=settings)
        return receiver.start() if start else receiver

    # --- what users see ---------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The version that this engine holds by a commit of the run; 0 before the first."""
        return self._presence.shown.policy_version or 0

    @property
    def failure(self) -> RefitError | None:
        """Why the receiver cannot take part, if so."""
        return self._failure

    @contextmanager
    def serving(self, timeout_s: float | None = None) -> Iterator[None]:
        """Hold one request open: waits while a refit is under way, and a refit waits for it.

        Raises:
            DeadlineError: a refit was still under way after ``timeout_s``.
            RejectedError: the receiver was given a gate of the user's own.
        """
        if not isinstance(self._gate, LocalGate):
            raise RejectedError("serving(): this receiver has a request gate of your own; admit requests through that")
        with self._gate.serving(timeout_s):
            yield

    def wait_joined(self, timeout_s: float) -> None:
        """Return once the receiver is ready for refits.

        Raises:
            RejectedError: the engine cannot take this model; the text names tensor and reason.
            DeadlineError: no trainer opened the run in time.
        """
        deadline = Deadline(self._clock, timeout_s)
        while not self._is_joined:
            if self._failure is not None:
                raise self._failure
            if deadline.expired:
                raise DeadlineError(f"receiver {self.name}: no trainer opened {self._store.url} within {timeout_s:.0f} s")
            self._clock.sleep(min(self.settings.poll_s, deadline.remaining_s()))

    def start(self) -> Receiver:
        """Serve the run from a background thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"deltarefit-{self.name}", daemon=True)
            self._thread.start()
        return self

    def subscribe(self, listener: Callable[[StageEvent], None]) -> None:
        """Have ``listener`` called with each stage that ends here, from the receiver's thread."""
        self._log.subscribe(listener)

    def close(self) -> None:
        """Leave the run. The engine keeps its weights; a closed request gate stays closed.

        Raises:
            DeadlineError: the engine did not come back from a call; the receiver has left all the same.
        """
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._news.set()
            thread.join(_CLOSE_S)
        self._mailroom.close()
        self._presence.close()
        self._application.close()
        self._feeds.close()
        self.observers.close()
        if thread is not None and thread.is_alive():
            raise DeadlineError(f"receiver {self.name}: its engine is still in a call after {_CLOSE_S:.0f} s")
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._mailroom.start()
        while not self._stopping.is_set():
            try:
                self.step(self.settings.poll_s)
            except RefitError as error:
                _LOG.warning("receiver %s: %s", self.name, error)
                self._clock.sleep(self.settings.poll_s)
            except Exception:
                _LOG.exception("receiver %s: unexpected failure, goes on", self.name)
                self._clock.sleep(self.settings.poll_s)

    def step(self, timeout_s: float) -> None:
        """Look for work once, and do it; waits at most ``timeout_s`` for some."""
        self._keep_lease()
        if not self._is_joined and not self._join():
            self._clock.sleep(timeout_s)
            return
        self._news.clear()
        is_busy = self._mailroom.is_busy = self._application.attempt is not None
        mails = self._mailroom.take(0.0 if is_busy else timeout_s)
        self._keep_lease()  # the wait may have been longer than it was meant to be
        for mail in mails:
            self._desk.receive(mail)
        self._look_at_new_places()
        progressed = self._application.pump(_PUMP_S)
        if not mails and not progressed and (is_busy or self._mailroom.is_running):
            self._news.wait(timeout_s)
        self._desk.report_failure()
        self._desk.answer_held()
        self.observers.metrics.version(self.policy_version)
        if self._look_pace.is_due:
            self._look_at_run()

    @property
    def _is_joined(self) -> bool:
        return bool(self._presence.seen.summary_digest)

    # --- standing in the run ----------------------------------------------------------------------------------------

    def _keep_lease(self) -> None:
        """After the lease ran out: shut the gate, and take part again as a new receiver (paper B.2; checklist D37).

        Others may have gone on without this one. What it holds is looked at again: by itself (``_look_at_run``), or by the
        coordinator at the next attempt.
        """
        if self._presence.may_act:
            return
        _LOG.warning("receiver %s: its lease ran out; its gate is shut until it holds the committed version", self.name)
        self._application.shut()
        self._desk.forget()
        self._presence.note(is_serving=False, activity="its lease ran out")
        self._presence.register_anew()
        self._look_at_run()

    def _join(self) -> bool:
        """Prewarm for the run's catalog once its trainer is there; True once done."""
        if self._failure is not None:
            return False
        notice = self._notice()
        if notice is None:
            return False
        try:
            self._check_lease(notice)
            catalog = Catalog.from_wire(self._store.get(keys.plan(notice.catalog_digest), max_nbytes=MAX_PLAN_NBYTES))
            digest = self._prewarm(catalog)
        except RejectedError as error:
            self._refuse(error)
            return False
        self._desk.catalog = catalog
        self._desk.epoch = notice.epoch
        self._prove_place()
        self._presence.show(catalog_digest=catalog.digest, summary_digest=digest)
        return True

    def _prewarm(self, catalog: Catalog) -> str:
        """Learn where the engine keeps what; the digest of the summary, which is then in the store."""
        summary = encode_message(summarise(self._engine.prewarm(catalog), catalog))
        digest = hashlib.blake2b(summary, digest_size=16).hexdigest()
        self._store.put_if_absent(keys.plan(digest), summary)
        return digest

    def _refuse(self, error: RejectedError) -> None:
        self._failure = error
        self._presence.show(refusal=str(error), summary_digest="")
        _LOG.error("receiver %s cannot take part: %s", self.name, error)

    def _prewarm_anew(self, catalog: Catalog) -> None:
        """The engine moved its weights or laid them out anew. What lies in the new places is unknown until it is looked at."""
        self._application.forget_weights()
        self._presence.note(is_serving=False, policy_version=None, activity="prewarming again")
        try:
            digest = self._prewarm(catalog)
        except RejectedError as error:
            self._refuse(error)
            raise
        self._presence.show(summary_digest=digest)
        self._has_new_places = True

    def _look_at_new_places(self) -> None:
        """If they happen to hold the committed bits, this engine may go on serving at once."""
        if self._has_new_places:
            self._has_new_places = False
            self._prove_place()

    def _check_lease(self, notice: RunNotice) -> None:
        if self.settings.lease_s > notice.lease_s:
            raise RejectedError(
                f"receiver {self.name}: lease_s {self.settings.lease_s:g}, the trainer's is {notice.lease_s:g}; a receiver "
                "must give itself up before others do: set lease_s to the trainer's"
            )

    def _shut_if_left_behind(self) -> None:
        """An engine that comes to a run which has moved on serves nothing until its weights are the committed ones."""
        state = self._control.read()
        if state is None or (state.record.policy_version == 0 and state.transition is None and not state.repair):
            return
        self._application.shut()
        self._presence.note(is_serving=False, activity="waiting to be restored by the next refit")

    def _prove_place(self) -> None:
        """If the weights happen to be the committed ones, nothing needs to be sent, and this engine may serve at once."""
        self._shut_if_left_behind()
        if not self._application.reception.resident.is_gate_closed:
            return
        state = self._control.read()
        if state is not None and self._proves(state):
            self._application.reception.restored(state.record.policy_version)
            self._presence.note(policy_version=state.record.policy_version)
            self._serve_again(state)

    def _proves(self, state: ControlState) -> bool:
        """Whether the resident bits are those of the committed policy, by its digest."""
        shown = self._desk.digests()
        whole = {name: digest for name, digest in shown.items() if digest is not None}
        return len(whole) == len(shown) and digest_of_digests(whole) == state.record.policy_digest

    def _look_at_run(self) -> None:
        """Now and then: greet a new coordinator, notice that others went on, serve again where that is right."""
        self._application.keep_shut()
        notice = self._notice()
        if notice is not None and notice.epoch > self._desk.epoch:
            self._desk.epoch = notice.epoch
            self._presence.show()  # so that it sees at once that this receiver lives
        resident = self._application.reception.resident
        if self._application.attempt is None and notice is not None and not resident.is_gate_closed:
            if notice.policy_version > max(self.policy_version, 0) and self._is_joined:
                _LOG.warning("receiver %s: policy version %d is committed without it", self.name, notice.policy_version)
                self._application.shut()
                self._presence.show(is_serving=False, activity="left behind; waiting for the next refit")
        elif resident.is_gate_closed and self._is_joined and (state := self._control.read()) is not None:
            self._serve_again(state)

    def _serve_again(self, state: ControlState) -> None:
        if self._presence.may_act and self._application.serve_again(state):
            version = state.record.policy_version
            _LOG.info("receiver %s: holds committed policy version %d and serves", self.name, version)
            self._presence.note(policy_version=version, is_serving=True, activity="")

    def _notice(self) -> RunNotice | None:
        reading = read_beacon(self._store, keys.control(COORDINATOR))
        return None if reading is None else decode_message(reading.info, RunNotice, sender="beacon of the coordinator")
