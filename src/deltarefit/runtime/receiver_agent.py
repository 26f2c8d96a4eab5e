"""The rollout side's one object: ``Receiver`` joins a run and refits its engine in place (paper Algorithm B.1, receivers)."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import msgspec

from deltarefit.canonical import Catalog
from deltarefit.errors import AttemptFailedError, DeadlineError, RefitError, RejectedError
from deltarefit.ids import AttemptId, EncodingMode, PolicyVersion, ReceiverId, receiver_id
from deltarefit.plan import RefitPlan
from deltarefit.receiver import merge_digests
from deltarefit.runtime import messages
from deltarefit.runtime.adapters import engine_integration
from deltarefit.runtime.application import Application
from deltarefit.runtime.clock import Clock, Deadline, IdSource, RandomIds, SystemClock
from deltarefit.runtime.engine import EngineDriver, LocalEngine
from deltarefit.runtime.events import EventLog
from deltarefit.runtime.gate import LocalGate, RequestGate
from deltarefit.runtime.heartbeat import Heartbeat
from deltarefit.runtime.messages import Call, Failure, Membership, Reply, RunNotice, decode_message, encode_message
from deltarefit.runtime.planning import summarise
from deltarefit.runtime.session import COORDINATOR, lease_settings, mail_settings
from deltarefit.runtime.settings import ReceiverAgentSettings
from deltarefit.transport import Beacon, Mail, Mailbox, ObjectStoreSource, keys, open_run, read_beacon

__all__ = ["Receiver"]

_LOG = logging.getLogger(__name__)
_MAX_PLAN_NBYTES = 128 * 2**20


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
        self._source = ObjectStoreSource(self._store)
        self._mailbox = Mailbox(self._store, self.name, clock=self._clock, nonce=nonce, settings=mail_settings(self._store))
        self._log = EventLog(self._clock, f"receiver {self.name}")
        self._membership = Membership(nonce, engine.name, "", "", None)
        self._catalog: Catalog | None = None
        self._epoch = 0
        self._application: Application | None = None
        self._completed: AttemptId | None = None
        self._flush: tuple[Mail, Call] | None = None
        self._failure: RefitError | None = None
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        stale = self._mailbox.take(0.0)  # left by an earlier start of this receiver
        self._mailbox.acknowledge(*(mail.key for mail in stale))
        self._heartbeat = Heartbeat(
            Beacon(self._store, keys.member(self.name), nonce=nonce),
            lease_settings(self.settings.lease_s),
            self._clock,
            encode_message(self._membership),
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
        on_refit: Callable[[int], None] | None = None,
        key: bytes | None = None,
        settings: ReceiverAgentSettings | None = None,
        start: bool = True,
    ) -> Receiver:
        """Join a run with an engine.

        Args:
            target: a rollout engine that an integration knows (vLLM's ``LLM``), or any torch module with ``load_weights``.
            load_weights: the module's own loader: takes (checkpoint name, tensor) pairs and writes them into the module, in
                place, with torch copies. See ``deltarefit.receiver`` for the contract.
            run: the trainer's ``run``.
            name: the receiver's name in reports and commands; default: a fresh one.
            request_gate: how to keep requests out during a refit; default: ``serving()`` of this object.
            on_refit: for torch modules: called with the committed version before requests are admitted again, to drop caches.
            key: the run's secret, if the trainer has one.
            settings: how.
            start: run in a background thread; otherwise call ``step`` yourself.

        Raises:
            RejectedError: no integration knows the target, or it cannot be refitted.
        """
        gate = request_gate or LocalGate()
        settings = settings or ReceiverAgentSettings()
        if load_weights is not None:
            engine: EngineDriver = LocalEngine(target, load_weights, request_gate=gate, on_refit=on_refit, key=key)
        else:
            engine = engine_integration(target).engine_driver(target, request_gate=gate, key=key)
        receiver = cls(engine, run=run, name=name, request_gate=gate, settings=settings)
        return receiver.start() if start else receiver

    # --- what users see ---------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The version that this engine holds by a commit of the run; 0 before the first."""
        return self._membership.policy_version or 0

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
        while not self._membership.summary_digest:
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

    def close(self) -> None:
        """Leave the run. The engine keeps its weights; a closed request gate stays closed."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._heartbeat.close()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.step(self.settings.poll_s)
            except RefitError as error:
                _LOG.warning("receiver %s: %s", self.name, error)
                self._clock.sleep(self.settings.poll_s)

    def step(self, timeout_s: float) -> None:
        """Look for work once, and do it; waits at most ``timeout_s`` for some."""
        if not self._membership.summary_digest and not self._join():
            self._clock.sleep(timeout_s)
            return
        busy = self._application is not None and self._application.is_running
        for mail in self._mailbox.take(0.0 if busy else timeout_s):
            self._receive(mail)
        if self._application is not None and self._application.is_running:
            progressed = self._application.pump()
            if not progressed and busy:
                self._clock.sleep(0.002)
        self._answer_flush()

    def _join(self) -> bool:
        """Prewarm for the run's catalog once its trainer is there; True once done."""
        if self._failure is not None:
            return False
        notice = self._notice()
        if notice is None:
            return False
        data = self._store.get(keys.plan(notice.catalog_digest), max_nbytes=_MAX_PLAN_NBYTES)
        catalog = Catalog.from_wire(data)
        try:
            summary = summarise(self._engine.prewarm(catalog), catalog)
        except RefitError as error:
            self._failure = error
            self._show(refusal=str(error))
            _LOG.error("receiver %s cannot take this model: %s", self.name, error)
            return False
        encoded = encode_message(summary)
        digest = hashlib.blake2b(encoded, digest_size=16).hexdigest()
        self._store.put_if_absent(keys.plan(digest), encoded)
        self._catalog = catalog
        self._epoch = notice.epoch
        self._show(catalog_digest=catalog.digest, summary_digest=digest)
        return True

    def _notice(self) -> RunNotice | None:
        reading = read_beacon(self._store, keys.control(COORDINATOR))
        return None if reading is None else decode_message(reading.info, RunNotice, sender="beacon of the coordinator")

    def _show(self, **changes: object) -> None:
        self._membership = msgspec.structs.replace(self._membership, **changes)
        self._heartbeat.show(encode_message(self._membership))

    # --- calls ------------------------------------------------------------------------------------------------------

    def _receive(self, mail: Mail) -> None:
        call = decode_message(mail.data, Call, sender=mail.sender)
        if call.epoch < self._epoch:
            self._mailbox.acknowledge(mail.key)  # of a coordinator that was replaced (paper B.2)
            return
        self._epoch = call.epoch
        if isinstance(call.body, messages.Flush):
            self._flush = (mail, call)
            return
        self._reply(mail, call, self._outcome(call))

    def _outcome(self, call: Call) -> messages.ReplyBody:
        try:
            return self._handle(call.body)
        except RefitError as error:
            return Failure.of(error)
        except Exception as error:
            _LOG.exception("receiver %s: %s failed", self.name, type(call.body).__name__)
            return Failure.of(error)

    def _reply(self, mail: Mail, call: Call, body: messages.ReplyBody) -> None:
        self._mailbox.post(mail.sender, encode_message(Reply(call.name, self._membership.incarnation, body)))
        self._mailbox.acknowledge(mail.key)

    def _handle(self, body: messages.CallBody) -> messages.ReplyBody:
        match body:
            case messages.Survey():
                return messages.Surveyed(self._digests())
            case messages.Prepare():
                self._prepare(body)
            case messages.OpenApply(attempt=attempt):
                self._bound(attempt).open(self.settings.request_timeout_s)
            case messages.Stop(attempt=attempt):
                self._stop(AttemptId(attempt))
            case messages.DropCaches(attempt=attempt, policy_version=version):
                self._engine.drop_caches()
                if self._completed == attempt:
                    self._show(policy_version=version)
                    self._engine.publish(version)
            case messages.ReopenGate():
                self._reopen()
            case _:
                raise RejectedError(f"receiver {self.name}: unexpected call {type(body).__name__}")
        return messages.Done()

    def _digests(self) -> dict[str, str | None]:
        """Per canonical tensor that this engine holds, the digest of its resident bits."""
        if self._catalog is None:
            raise RejectedError(f"receiver {self.name} has not prewarmed yet")
        self._engine.synchronize()
        merged: Mapping[str, Any] = merge_digests(self._engine.digests(), self._catalog)
        return {name: None if digest is None else digest.hex() for name, digest in merged.items()}

    def _prepare(self, body: messages.Prepare) -> None:
        """Bind the engine to the attempt; an earlier one is over by that (paper B: a later prepare replaces it)."""
        plan = RefitPlan.from_wire(self._store.get(keys.plan(body.plan_digest), max_nbytes=_MAX_PLAN_NBYTES))
        if self._catalog is None or plan.catalog != self._catalog or plan.digest != body.plan_digest:
            raise RejectedError(
                f"receiver {self.name}: plan {body.plan_digest} is for another catalog than the one prewarmed; "
                "restart the receiver"
            )
        if not self._heartbeat.may_act:
            self._heartbeat.restore()  # nothing of an older attempt can be applied any more: the attempt at hand is this one
        self._engine.prepare(plan)
        self._flush = None
        self._completed = None
        self._application = Application(
            AttemptId(body.attempt),
            PolicyVersion(body.base_version),
            PolicyVersion(body.target_version),
            EncodingMode(body.mode),
            plan,
            engine=self._engine,
            store=self._store,
            source=self._source,
            log=self._log,
            may_act=lambda: self._heartbeat.may_act,
        )

    def _bound(self, attempt: str) -> Application:
        if self._application is None or self._application.attempt != attempt:
            raise AttemptFailedError(f"receiver {self.name}: {attempt} is not the attempt that it is bound to")
        return self._application

    def _stop(self, attempt: AttemptId) -> None:
        """Calls are handled between payloads, so no write is under way; later ones are refused from here on."""
        if self._application is not None and self._application.attempt == attempt:
            self._application = None
            self._flush = None
            self._engine.synchronize()

    def _reopen(self) -> None:
        if not self._heartbeat.may_act:
            raise AttemptFailedError(
                f"receiver {self.name} showed no sign of life for {self.settings.lease_s:.0f} s; its gate stays closed until "
                "it was refitted again"
            )
        self._application = None
        self._engine.reopen_gate()

    # --- flush ------------------------------------------------------------------------------------------------------

    def _answer_flush(self) -> None:
        """Answer a waiting flush once everything is applied, or failed."""
        if self._flush is None:
            return
        mail, call = self._flush
        body = call.body
        if not isinstance(body, messages.Flush):
            return
        try:
            application = self._bound(body.attempt)
            if not application.is_complete(body.ended):
                return
            answer: messages.ReplyBody = self._complete(application, body)
        except RefitError as error:
            answer = Failure.of(error)
        except Exception as error:
            _LOG.exception("receiver %s: flush failed", self.name)
            answer = Failure.of(error)
        self._flush = None
        self._reply(mail, call, answer)

    def _complete(self, application: Application, body: messages.Flush) -> messages.Completed:
        self._engine.synchronize()
        digests = None
        if body.audit:
            with self._log.stage("verify", application.attempt):
                digests = self._digests()
        self._completed = application.attempt
        return messages.Completed(application.written_elements, digests, self._engine.covered(), tuple(self._log.drain()))
