"""A receiver's place in the run: joining it, keeping the lease, noticing what others did, serving again where that is right."""

from __future__ import annotations

import hashlib
import logging

from deltarefit.canonical import Catalog, digest_of_digests
from deltarefit.control import ControlPlane
from deltarefit.errors import RefitError, RejectedError
from deltarefit.ids import ReceiverId
from deltarefit.protocol import ControlState
from deltarefit.runtime.application import Application
from deltarefit.runtime.clock import Clock, Pace
from deltarefit.runtime.engine import EngineDriver
from deltarefit.runtime.messages import RunNotice, decode_message, encode_message
from deltarefit.runtime.names import COORDINATOR
from deltarefit.runtime.planning import summarise
from deltarefit.runtime.presence import Presence
from deltarefit.runtime.receiver_desk import MAX_PLAN_NBYTES, ReceiverDesk
from deltarefit.transport import RunStore, keys, read_beacon

__all__ = ["Standing"]

_LOG = logging.getLogger(__name__)


class Standing:
    """Decides when the receiver counts and when its engine may serve. Used by the receiver's thread."""

    def __init__(
        self,
        name: ReceiverId,
        *,
        engine: EngineDriver,
        store: RunStore,
        control: ControlPlane,
        application: Application,
        presence: Presence,
        desk: ReceiverDesk,
        clock: Clock,
    ) -> None:
        self.failure: RefitError | None = None
        """Why the receiver cannot take part."""
        self._name = name
        self._engine = engine
        self._store = store
        self._control = control
        self._application = application
        self._presence = presence
        self._desk = desk
        self._has_new_places = False
        renew_s = presence.lease.renew_s
        self._look_pace = Pace(clock, first_s=renew_s, most_s=renew_s)

    @property
    def is_joined(self) -> bool:
        """Whether others see that this receiver takes part."""
        return bool(self._presence.seen.summary_digest)

    @property
    def policy_version(self) -> int:
        """The version that the engine holds by a commit of the run; 0 before the first."""
        return self._presence.shown.policy_version or 0

    # --- lease and look ---------------------------------------------------------------------------------------------

    def keep_lease(self) -> None:
        """After the lease ran out: shut the gate, and take part again as a new receiver (paper B.2; checklist D37).

        Others may have gone on without this one. What it holds is looked at again: by itself (``look_at_run``), or by the
        coordinator at the next attempt.
        """
        if self._presence.may_act:
            return
        _LOG.warning("receiver %s: its lease ran out; its gate is shut until it holds the committed version", self._name)
        self._application.shut()
        self._desk.forget()
        self._presence.note(is_serving=False, activity="its lease ran out")
        self._presence.register_anew()
        self.look_at_run()

    def join(self) -> bool:
        """Prewarm for the run's catalog once its trainer is there; True once done."""
        if self.failure is not None:
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
        self.failure = error
        self._presence.show(refusal=str(error), summary_digest="")
        _LOG.error("receiver %s cannot take part: %s", self._name, error)

    def prewarm_anew(self, catalog: Catalog) -> None:
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

    def look_at_new_places(self) -> None:
        """If they happen to hold the committed bits, this engine may go on serving at once."""
        if self._has_new_places:
            self._has_new_places = False
            self._prove_place()

    def _check_lease(self, notice: RunNotice) -> None:
        if self._presence.lease.lease_s > notice.lease_s:
            raise RejectedError(
                f"receiver {self._name}: lease_s {self._presence.lease.lease_s:g}, the trainer's is {notice.lease_s:g}; a "
                "receiver must give itself up before others do: set lease_s to the trainer's"
            )

    def shut_if_left_behind(self) -> None:
        """An engine that comes to a run which has moved on serves nothing until its weights are the committed ones."""
        state = self._control.read()
        if state is None or (state.record.policy_version == 0 and state.transition is None and not state.repair):
            return
        self._application.shut()
        self._presence.note(is_serving=False, activity="waiting to be restored by the next refit")

    def _prove_place(self) -> None:
        """If the weights happen to be the committed ones, nothing needs to be sent, and this engine may serve at once."""
        self.shut_if_left_behind()
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

    def look_now_and_then(self) -> None:
        """``look_at_run`` if it is time to."""
        if self._look_pace.is_due:
            self.look_at_run()

    def look_at_run(self) -> None:
        """Greet a new coordinator, notice that others went on, serve again where that is right."""
        self._application.keep_shut()
        notice = self._notice()
        if notice is not None and notice.epoch > self._desk.epoch:
            self._desk.epoch = notice.epoch
            self._presence.show()  # so that it sees at once that this receiver lives
        resident = self._application.reception.resident
        if self._application.attempt is None and notice is not None and not resident.is_gate_closed:
            if notice.policy_version > max(self.policy_version, 0) and self.is_joined:
                _LOG.warning("receiver %s: policy version %d is committed without it", self._name, notice.policy_version)
                self._application.shut()
                self._presence.show(is_serving=False, activity="left behind; waiting for the next refit")
        elif resident.is_gate_closed and self.is_joined and (state := self._control.read()) is not None:
            self._serve_again(state)

    def _serve_again(self, state: ControlState) -> None:
        if self._presence.may_act and self._application.serve_again(state):
            version = state.record.policy_version
            _LOG.info("receiver %s: holds committed policy version %d and serves", self._name, version)
            self._presence.note(policy_version=version, is_serving=True, activity="")

    def _notice(self) -> RunNotice | None:
        reading = read_beacon(self._store, keys.control(COORDINATOR))
        return None if reading is None else decode_message(reading.info, RunNotice, sender="beacon of the coordinator")
