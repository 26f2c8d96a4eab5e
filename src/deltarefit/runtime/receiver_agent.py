"""The rollout side's one object: ``Receiver`` joins a run and refits its engine in place (paper Algorithm B.1, receivers)."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

from deltarefit.canonical import Catalog
from deltarefit.errors import DeadlineError, RefitError, RejectedError
from deltarefit.ids import ReceiverId, receiver_id
from deltarefit.placement.after_load import AfterLoad
from deltarefit.receiver import ReceiverSettings
from deltarefit.run_key import key_print
from deltarefit.runtime.adapters import engine_integration
from deltarefit.runtime.application import Application
from deltarefit.runtime.clock import Clock, Deadline, IdSource, RandomIds, SystemClock
from deltarefit.runtime.engine import EngineDriver, LocalEngine
from deltarefit.runtime.events import EventLog, StageEvent
from deltarefit.runtime.gate import LocalGate, RequestGate
from deltarefit.runtime.mailroom import MailRoom
from deltarefit.runtime.observers import Observers
from deltarefit.runtime.presence import Presence
from deltarefit.runtime.process import HomeProcess
from deltarefit.runtime.receiver_desk import ReceiverDesk
from deltarefit.runtime.rejoining import Rejoining
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
from deltarefit.runtime.standing import Standing
from deltarefit.transport import Mail, Mailbox, open_run

__all__ = ["Receiver"]

_LOG = logging.getLogger(__name__)
_CLOSE_S = 60.0
_HEED_S = 2.0  # after a message: the next one is likely to come soon
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
        """Show a first sign of life under the run; ``step`` or ``start`` does the rest.

        The engine has the run's key, if there is one.

        Raises:
            RejectedError: the run's address, its key or a setting cannot be used.
        """
        self.settings = settings or ReceiverAgentSettings()
        self._home = HomeProcess()
        self._engine = engine
        self._gate = request_gate
        self._clock = clock or SystemClock()
        ids = ids or RandomIds()
        nonce = ids.nonce()
        self.name: ReceiverId = receiver_id(name or f"receiver-{nonce}")
        self._store = open_run(run, clock=self._clock)
        self._log = EventLog(self._clock, f"receiver {self.name}")
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._news = threading.Event()
        self._unread: deque[Mail] = deque()
        """Messages that were taken; what came with one that failed is read at the next step."""
        self._closing = ExitStack()
        try:
            self._enter_run(nonce, ids)
        except BaseException:
            self._closing.close()
            raise

    def _enter_run(self, nonce: str, ids: IdSource) -> None:
        """Open what is closed in the opposite order."""
        self.observers = Observers(self.settings, self._log.where, self._clock)
        self._closing.callback(self.observers.close)
        self.observers.watch(self._log)
        key = self._engine.key
        self._mailbox = Mailbox(
            self._store, self.name, clock=self._clock, nonce=nonce, key=key, settings=mail_settings(self._store)
        )
        stale = self._mailbox.take(0.0)  # left by an earlier start of this receiver
        self._mailbox.acknowledge(*(mail.key for mail in stale))
        self._feeds = receiver_feeds(self.name, self._store, self.settings, log=self._log, clock=self._clock, ids=ids)
        self._closing.callback(self._feeds.close)
        self._application = self._new_application()
        self._closing.callback(self._application.close)
        self._presence = Presence(
            self._store,
            self.name,
            self._engine.name,
            nonce=nonce,
            lease=lease_settings(self.settings.lease_s),
            clock=self._clock,
            ids=ids,
            key_print=key_print(key),
        )
        self._closing.callback(self._presence.close)
        self._presence.note(node=self._feeds.node)
        self._mailroom = self._new_mailroom()
        self._closing.callback(self._mailroom.close)
        self._desk = self._new_desk()
        self._standing = self._new_standing(ids)
        self._standing.shut_if_left_behind()

    def _new_mailroom(self) -> MailRoom:
        return MailRoom(
            self._mailbox,
            self._clock,
            busy=busy_pace(self._store, self._clock),
            idle=idle_pace(self._store, self._clock),
            news=self._news,
        )

    def _new_application(self) -> Application:
        return Application(
            self.name,
            engine=self._engine,
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

    def _new_desk(self) -> ReceiverDesk:
        return ReceiverDesk(
            self.name,
            engine=self._engine,
            application=self._application,
            presence=self._presence,
            mailbox=self._mailroom,
            store=self._store,
            log=self._log,
            request_timeout_s=self.settings.request_timeout_s,
            prewarm_anew=self._prewarm_anew,
            restore=self._restore,
        )

    def _new_standing(self, ids: IdSource) -> Standing:
        return Standing(
            self.name,
            engine=self._engine,
            store=self._store,
            control=control_plane(self._store, self._clock, ids),
            application=self._application,
            presence=self._presence,
            desk=self._desk,
            rejoining=Rejoining(
                engine=self._engine,
                store=self._store,
                source=self._feeds.source,
                log=self._log,
                may_act=lambda: self._presence.may_act,
                request_timeout_s=self.settings.request_timeout_s,
                max_nbytes=self.settings.staging_nbytes,
                num_threads=self.settings.fetch_threads,
            ),
            log=self._log,
            clock=self._clock,
        )

    @classmethod
    def attach(
        cls,
        target: Any,
        load_weights: Callable[[Iterable[tuple[str, Any]]], object] | None = None,
        *,
        run: str,
        name: str | None = None,
        request_gate: RequestGate | None = None,
        on_refit: Callable[[int], object] | None = None,
        key: bytes | None = None,
        settings: ReceiverAgentSettings | None = None,
        rank_settings: ReceiverSettings | None = None,
        after_load: AfterLoad | None = None,
        start: bool = True,
    ) -> Receiver:
        """Join a run with an engine.

        Args:
            target: a rollout engine that an integration knows (vLLM's ``LLM``, SGLang's ``Engine``), or any torch module.
            load_weights: the module's own loader (default: its ``load_weights``): takes (checkpoint name, tensor) pairs and
                writes them into the module, in place, with torch copies. See ``docs/loader-contract.md`` for the contract.
            run: the trainer's ``run``.
            name: the receiver's name in reports and commands; default: a fresh one.
            request_gate: how to keep requests out during a refit; default: ``serving()`` of this object.
            on_refit: for torch modules: called with the committed version before requests are admitted again, to drop caches.
            key: the run's secret, if the trainer has one.
            settings: how.
            rank_settings: for torch modules: how weights are learned and written (parameters that the checkpoint lacks, the
                check after each write, what else decides the layout).
            after_load: for torch modules: what was done to the weights since they were loaded, if anything
                (``docs/design/0010-after-load.md``).
            start: run in a background thread; otherwise call ``step`` yourself.

        Raises:
            RejectedError: no integration knows the target, or it cannot be refitted.
        """
        gate = request_gate or LocalGate()
        settings = settings or ReceiverAgentSettings()
        if load_weights is None and hasattr(target, "named_parameters"):
            load_weights = getattr(target, "load_weights", None)
        if load_weights is not None:
            engine: EngineDriver = LocalEngine(
                target,
                load_weights,
                request_gate=gate,
                on_refit=on_refit,
                key=key,
                settings=rank_settings,
                after_load=after_load,
            )
        else:
            engine = engine_integration(target).engine_driver(target, request_gate=gate, key=key)
        try:
            receiver = cls(engine, run=run, name=name, request_gate=gate, settings=settings)
        except BaseException:
            engine.close()
            raise
        return receiver.start() if start else receiver

    # --- what users see ---------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The version that this engine holds by a commit of the run; 0 before the first."""
        return self._standing.policy_version

    @property
    def failure(self) -> RefitError | None:
        """Why the receiver cannot take part, if so."""
        return self._standing.failure

    @contextmanager
    def serving(self, timeout_s: float | None = None) -> Iterator[None]:
        """Hold one request open: waits while a refit is under way, and a refit waits for it.

        Raises:
            DeadlineError: a refit was still under way after ``timeout_s``.
            RejectedError: the receiver was given a gate of the user's own, another one took its name, or this is a fork of its
                process.
        """
        self._home.check("serving() of a Receiver")  # no refit reaches a fork's copy of the weights
        if not isinstance(self._gate, LocalGate):
            raise RejectedError("serving(): this receiver has a request gate of your own; admit requests through that")
        with self._gate.serving(timeout_s):
            yield

    def wait_joined(self, timeout_s: float | None = None) -> None:
        """Return once the receiver is ready for refits; waits ``join_timeout_s`` of the settings unless told otherwise.

        Raises:
            RejectedError: the engine cannot take this model; the text names tensor and reason.
            DeadlineError: no trainer opened the run in time.
        """
        self._home.check("wait_joined() of a Receiver")
        timeout_s = self.settings.join_timeout_s if timeout_s is None else timeout_s
        deadline = Deadline(self._clock, timeout_s)
        while not self._standing.is_joined:
            if self._standing.failure is not None:
                raise self._standing.failure
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
        """Leave the run. The engine keeps its weights; a closed request gate stays closed. Does nothing in a fork.

        Raises:
            DeadlineError: the engine did not come back from a call; the receiver has left all the same.
        """
        if not self._home.is_here:
            return
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._news.set()
            thread.join(_CLOSE_S)
        self._closing.close()
        if thread is not None and thread.is_alive():
            raise DeadlineError(f"receiver {self.name}: its engine is still in a call after {_CLOSE_S:.0f} s")
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _prewarm_anew(self, catalog: Catalog) -> None:
        """The desk found that the engine's places are not those that were prewarmed."""
        self._standing.prewarm_anew(catalog)

    def _restore(self) -> None:
        """The desk was told to by an operator."""
        self._standing.order_restore()

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

    def _has_given_way(self) -> bool:
        """Keep the lease, or the gate shut if another receiver has the name, and with it the messages."""
        self._standing.keep_lease()
        if not self._presence.is_replaced:
            return False
        self._unread.clear()
        self._mailroom.close()
        if isinstance(self._gate, LocalGate) and self.failure is not None:
            self._gate.refuse(str(self.failure))
        return True

    def step(self, timeout_s: float) -> None:
        """Look for work once, and do it; waits at most ``timeout_s`` for some."""
        if self._has_given_way():
            self._stopping.wait(timeout_s)
            return
        if not self._standing.is_joined and not self._standing.join():
            self._clock.sleep(timeout_s)
            return
        self._news.clear()
        is_busy = self._application.attempt is not None
        self._mailroom.is_busy = is_busy or self._clock.monotonic_s() - self._desk.heard_s < _HEED_S
        mails = self._mailroom.take(0.0 if is_busy or self._unread else timeout_s)
        self._unread.extend(mails)
        if self._has_given_way():  # the wait may have been longer than it was meant to be
            return
        while self._unread:
            self._desk.receive(self._unread.popleft())
        self._standing.look_at_new_places()
        progressed = self._application.pump(_PUMP_S)
        if not mails and not progressed and (is_busy or self._mailroom.is_running):
            self._news.wait(timeout_s)
        self._desk.report_failure()
        self._desk.answer_held()
        self.observers.metrics.version(self.policy_version)
        self._standing.look_now_and_then()
