"""A simulated rollout process: the real ``Reception`` over a small real storage, with a lease that it enforces by itself."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from deltarefit import payload
from deltarefit.canonical import digest_of_digests
from deltarefit.errors import AttemptFailedError, PayloadInvalidError, RefitError
from deltarefit.ids import AttemptId, PayloadId, ReceiverId
from deltarefit.protocol import (
    Arrival,
    ControlState,
    LeaseSettings,
    Phase,
    Reception,
    ReceptionSettings,
    SelfFence,
    Verdict,
)
from deltarefit.testing.simulation import calls
from deltarefit.testing.simulation.network import Network, Node
from deltarefit.testing.simulation.record import RecordClient
from deltarefit.testing.simulation.weights import CATALOG, Rollout
from deltarefit.testing.simulation.world import Future
from deltarefit.transport import payload_digest

__all__ = ["ReceiverNode", "Shown"]

_POLL_S = 0.05
_SETTINGS = ReceptionSettings(queue_slots=2, staging_limit_nbytes=400)


class Shown:
    """What a receiver shows beside its beat."""

    def __init__(self, incarnation: str, is_joined: bool) -> None:
        self.incarnation = incarnation
        self.is_joined = is_joined


class ReceiverNode(Node):
    """One engine. Everything is lost in a crash, and the next life starts from the initial checkpoint."""

    def __init__(
        self,
        network: Network,
        name: str,
        lease: LeaseSettings,
        *,
        on_serve: Callable[[ReceiverNode], None],
        on_write: Callable[[ReceiverNode, PayloadId], None],
        mutant: str = "",
    ) -> None:
        super().__init__(network, name)
        self._lease = lease
        self._on_serve = on_serve
        self._on_write = on_write
        self._mutant = mutant

    def boot(self) -> None:
        self.rollout = Rollout()
        self.reception = Reception(ReceiverId(self.name), settings=_SETTINGS)
        self.is_joined = False
        self.num_sessions = 0
        self._epoch = 0
        self._revision = 0
        self._queued: dict[PayloadId, payload.Payload] = {}
        self._written: set[PayloadId] = set()
        self._is_writing = False
        self._progress = Future()
        """Settled after the next write."""
        self._is_reading = False
        self._fence = SelfFence(self._lease, now_s=self.world.now_s)
        self._record = RecordClient(self)
        self.repeat(self._lease.renew_s, self._turn)
        self.spawn(self._join())

    @property
    def incarnation(self) -> str:
        return f"{self.name}/{self.life}/{self.num_sessions}"

    @property
    def is_serving(self) -> bool:
        """Whether requests are answered now."""
        return self.is_up and not self.reception.resident.is_gate_closed

    # --- standing in the run ----------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Every now and then: renew the lease, look at the record."""
        self._keep_lease()
        sent_s = self.world.now_s
        may_act = self._fence.may_act(sent_s)
        beat = calls.Beat(self.name, f"{self.incarnation}@{sent_s}", Shown(self.incarnation, self.is_joined))
        answer = self.call("store", beat, self._lease.lease_s)

        def renewed(future: Future) -> None:
            if future.error is None and self.is_up:
                if may_act:
                    self._fence.renewed(sent_s=sent_s, now_s=self.world.now_s)
                else:
                    self._fence.restore(sent_s)

        answer.then(lambda future: self.guard(lambda: renewed(future)))
        if self.is_joined and not self._is_reading:
            self._is_reading = True
            self.spawn(self._look())

    def _keep_lease(self) -> None:
        if not self._fence.may_act(self.world.now_s) and not self._is_writing and not self._is_shut:
            self.shut()
            self.num_sessions += 1

    @property
    def _is_shut(self) -> bool:
        """Already registered anew, and not heard of since."""
        return self.reception.phase is Phase.IDLE and self.reception.resident.is_gate_closed and self.num_sessions > 0

    def shut(self) -> None:
        """Serve nothing, and be bound to nothing."""
        resident = replace(self.reception.resident, fenced="", is_gate_closed=True)
        self.reception = Reception(ReceiverId(self.name), resident=resident, settings=_SETTINGS)
        self._queued = {}

    def _join(self) -> Generator[Future, Any, None]:
        state: ControlState | None = None
        while state is None:
            yield self.sleep(_POLL_S * 4)
            try:
                state = yield from self._record.read()
            except RefitError:
                continue
        self.effect("join")
        if state.record.policy_version > 0 or state.transition is not None or state.repair:
            self.shut()
            if digest_of_digests(self.rollout.digests()) == state.record.policy_digest:
                self.reception.restored(state.record.policy_version)
        self.is_joined = True

    def _look(self) -> Generator[Future, Any, None]:
        """Notice that others went on; serve again where that is right."""
        try:
            state = yield from self._record.read()
        except RefitError:
            return
        finally:
            self._is_reading = False
        if state is None or self._is_writing:
            return
        resident = self.reception.resident
        held = -1 if resident.policy_version is None else resident.policy_version
        if not resident.is_gate_closed:
            if self.reception.attempt is None and state.record.policy_version > max(held, 0):
                self.shut()
        elif self._may_serve_again(state) and self.reception.reopen_gate(None, state.record):
            self._on_serve(self)

    def _may_serve_again(self, state: ControlState) -> bool:
        is_between = state.is_idle
        return is_between and self._fence.may_act(self.world.now_s) and self.reception.committed(state.record)

    # --- calls ------------------------------------------------------------------------------------------------------

    def handle(self, source: str, body: Any) -> Any:
        self._keep_lease()
        match body:
            case calls.Deliver():
                return self._deliver(body)
            case calls.OwnerEnded(marker=marker):
                if self.reception.is_active(marker.attempt):
                    self.reception.end(marker)
                    self._kick()  # an owner that ended is passed over, so another payload may be next now
                return True
            case calls.ToReceiver(epoch=epoch, incarnation=incarnation, body=asked):
                if epoch < self._epoch or incarnation != self.incarnation:
                    return NotImplemented
                self._epoch = epoch
                return self._asked(asked)
        return NotImplemented

    def _asked(self, body: Any) -> Any:
        reception = self.reception
        match body:
            case calls.Survey():
                return self.rollout.digests()
            case calls.Prepare(request=request):
                if request.revision < self._revision:
                    raise AttemptFailedError(f"{self.name}: {request.attempt} is older than what was bound here")
                reception.prepare(request)
                self._revision = request.revision
                return True
            case calls.OpenApply(attempt=attempt):
                if reception.close_gate(attempt):
                    reception.open_apply(attempt)
                    self._kick()
                return True
            case calls.ConfirmArrival(attempt=attempt, markers=markers):
                reception.check_arrivals(attempt, markers)
                return True
            case calls.Flush():
                return self._flush(body)
            case calls.Stop(attempt=attempt):
                return self._stop(attempt)
            case calls.DropCaches() | calls.ReopenGate():
                return self._finish(body)
        return NotImplemented

    def _finish(self, body: calls.DropCaches | calls.ReopenGate) -> bool:
        """The end of a transition: it is committed; it is over."""
        if isinstance(body, calls.DropCaches):
            if not self.reception.committed(body.record):
                raise AttemptFailedError(f"{self.name}: its weights are not those of {body.record}")
            return True
        if not self._fence.may_act(self.world.now_s):
            raise AttemptFailedError(f"{self.name}: its lease ran out")
        if self.reception.reopen_gate(body.attempt, body.record):
            self._on_serve(self)
        return True

    def _flush(self, body: calls.Flush) -> Generator[Future, Any, Any]:
        reception = self.reception
        for marker in body.markers:
            reception.end(marker)
        self._kick()
        while not reception.is_drained:
            if not reception.is_active(body.attempt) or reception is not self.reception:
                raise AttemptFailedError(f"{self.name}: {body.attempt} failed: {reception.failure or 'over'}")
            yield self.world.any_of([self._progress], _POLL_S * 10)
        reception.complete(body.attempt)
        self.effect("completed")
        return self.rollout.digests()

    def _stop(self, attempt: AttemptId) -> Generator[Future, Any, Any]:
        reception = self.reception
        reception.mark_obsolete(attempt)
        while not reception.is_quiet(attempt):
            yield self.world.any_of([self._progress], _POLL_S * 10)
        reception.cleanup(attempt)
        return True

    # --- payloads ---------------------------------------------------------------------------------------------------

    def _deliver(self, body: calls.Deliver) -> str:
        reception = self.reception
        if not reception.is_active(body.attempt):
            return "late"
        try:
            found = payload.decode(body.data, catalog=CATALOG)
            name = PayloadId(found.header.attempt, found.header.sequence, found.header.owner)
            verdict = reception.arrive(
                Arrival(
                    payload=name,
                    base_version=found.header.base_version,
                    target_version=found.header.target_version,
                    plan_digest=found.header.plan_digest,
                    nbytes=len(body.data),
                    digest=payload_digest(body.data),
                )
            )
        except PayloadInvalidError as error:
            reception.fail(body.attempt, str(error))
            return "invalid"
        if verdict in (Verdict.QUEUE, Verdict.STAGE, Verdict.SPILL):
            self._queued[name] = found
            if self._mutant == "apply in arrival order" and reception.phase is Phase.APPLYING:
                self._write(name, found)
            self._kick()
        elif verdict is Verdict.IGNORE_DUPLICATE and self._mutant == "forget deduplication" and name in self._written:
            self._write(name, found)
        return verdict.value

    def _kick(self) -> None:
        if not self._is_writing:
            self.spawn(self._apply())

    def _apply(self) -> Generator[Future, Any, None]:
        """Write what is next in the declared order, for as long as it is here and allowed."""
        reception = self.reception
        while self._may_write(reception) and (name := self._next(reception)) is not None:
            self._is_writing = True
            yield self.sleep(self.world.random.uniform(0.0, 0.02))
            self.effect("write")
            found = self._queued.pop(name)
            try:
                if self.network.faults.strikes("torn write"):
                    self.rollout.write(found.items[0])
                    raise AttemptFailedError(f"{self.name}: the loader broke off in {name}")
                if not (self._mutant == "apply in arrival order" and name in self._written):
                    self._write(name, found)
                reception.applied(name)
            except RefitError as error:
                reception.write_failed(name, str(error))
            finally:
                self._is_writing = False
                progress, self._progress = self._progress, Future()
                progress.resolve()
            self.effect("written")

    @staticmethod
    def _next(reception: Reception) -> PayloadId | None:
        """Decode what is staged, as far as there are slots, then take what is next."""
        while reception.next_to_decode() is not None:
            continue
        return reception.take()

    def _may_write(self, reception: Reception) -> bool:
        return reception is self.reception and not self._is_writing and self._fence.may_act(self.world.now_s)

    def _write(self, name: PayloadId, found: payload.Payload) -> None:
        for item in found.items:
            self.rollout.write(item)
        if name not in self._written:
            self._on_write(self, name)
        self._written.add(name)
