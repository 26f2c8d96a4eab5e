"""A receiver's place in the run: joining it, keeping the lease, noticing what others did, serving again where that is right."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping

from deltarefit.canonical import Catalog, TensorDigest, digest_of_digests
from deltarefit.control import ControlPlane
from deltarefit.errors import AttemptFailedError, RefitError, RejectedError
from deltarefit.ids import ReceiverId
from deltarefit.protocol import ControlState
from deltarefit.run_key import key_trouble
from deltarefit.runtime.application import Application
from deltarefit.runtime.clock import Clock, Deadline, Pace
from deltarefit.runtime.engine import EngineDriver
from deltarefit.runtime.events import EventLog
from deltarefit.runtime.messages import RunNotice, decode_message, encode_message
from deltarefit.runtime.names import COORDINATOR
from deltarefit.runtime.planning import summarise
from deltarefit.runtime.presence import Presence
from deltarefit.runtime.receiver_desk import MAX_PLAN_NBYTES, ReceiverDesk
from deltarefit.runtime.rejoining import Rejoining
from deltarefit.transport import RunStore, keys, read_beacon
from deltarefit.wording import some_of

__all__ = ["Standing"]

_LOG = logging.getLogger(__name__)
_FIRST_RETRY_S = 1.0
_MOST_RETRY_S = 30.0
_MAX_ROUNDS = 3
_SHOWN = 5
_WAITS = "waiting to be restored by the next refit"


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
        rejoining: Rejoining,
        log: EventLog,
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
        self._rejoining = rejoining
        self._log = log
        self._skipped: frozenset[str] = frozenset()
        self._has_new_places = False
        self._may_catch_up = True
        """Not tried since it came, or since it fell behind."""
        self._is_restore_ordered = False
        self._gave_way = False
        """To a later start of this name."""
        self._clock = clock
        self._retry_s = 0.0
        self._beat = self._first_beat = ("", 0)
        """Of the coordinator's beacon: the latest, and the one by which it is told whether that one moves."""
        self._retry: Deadline | None = None
        """When to prewarm again after it failed."""
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
        """After the lease ran out: shut the gate, and take part again as a new receiver (paper B.2).

        Others may have gone on without this one. What it holds is looked at again: by itself (``look_at_run``), or by the
        coordinator at the next attempt.
        """
        if self._presence.is_replaced:
            self._give_way()
            return
        if self._presence.may_act:
            return
        _LOG.warning("receiver %s: its lease ran out; its gate is shut until it holds the committed version", self._name)
        self._application.shut()
        self._desk.forget()
        self._presence.note(is_serving=False, activity="its lease ran out")
        self._presence.register_anew()
        self._may_catch_up = True
        self.look_at_run()

    def join(self) -> bool:
        """Prewarm for the run's catalog once its trainer is there; True once done."""
        if self.failure is not None:
            return False
        if self._retry is not None and not self._retry.expired:
            return False
        notice = self._notice()
        if notice is None:
            return False
        try:
            if (trouble := self._trouble(notice)) and self._is_heard_twice(trouble):
                raise RejectedError(f"receiver {self._name}: {trouble}")
            if trouble:
                return False
            catalog = self._store.get_as(keys.plan(notice.catalog_digest), Catalog.from_wire, max_nbytes=MAX_PLAN_NBYTES)
            digest = self._prewarm(catalog)
        except RejectedError as error:
            self._refuse(error)
            return False
        except AttemptFailedError:
            self._retry_s = min(max(_FIRST_RETRY_S, 2 * self._retry_s), _MOST_RETRY_S)
            self._retry = Deadline(self._clock, self._retry_s)
            raise
        self._retry_s, self._retry = 0.0, None
        self._desk.catalog = catalog
        self._desk.epoch = notice.epoch
        self._prove_place()
        self._presence.show(catalog_digest=catalog.digest, summary_digest=digest)
        return True

    def _prewarm(self, catalog: Catalog) -> str:
        """Learn where the engine keeps what; the digest of the summary, which is then in the store."""
        found = summarise(self._engine.prewarm(catalog), catalog)
        self._skipped = frozenset(found.skipped)
        if self._skipped:
            _LOG.warning(
                "receiver %s: its engine takes nothing of %d of %d tensors, nor would it in a full reload: %s",
                self._name,
                len(self._skipped),
                len(catalog),
                some_of(sorted(self._skipped), _SHOWN),
            )
        summary = encode_message(found)
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
            self._may_catch_up = True
            self._prove_place()

    def _trouble(self, notice: RunNotice) -> str:
        """Why this receiver cannot work with that trainer; empty if it can."""
        if self._presence.lease.lease_s > notice.lease_s:
            return (
                f"lease_s {self._presence.lease.lease_s:g}, the trainer's is {notice.lease_s:g}; a receiver must give itself "
                "up before others do: set lease_s to the trainer's"
            )
        return key_trouble(self._presence.shown.key_print, notice.key_print, "the trainer")

    def _is_heard_twice(self, trouble: str) -> bool:
        """Whether the trainer lives: nobody is refused for what a dead one left, to which a new one may be the remedy."""
        nonce, counter = self._beat
        if self._first_beat == (nonce, counter):
            return False
        first_nonce, self._first_beat = self._first_beat[0], self._beat
        if first_nonce != nonce:
            _LOG.info("receiver %s: waiting to see whether that trainer lives: %s", self._name, trouble)
        return first_nonce == nonce

    def shut_if_left_behind(self) -> None:
        """An engine that comes to a run which has moved on serves nothing until its weights are the committed ones."""
        state = self._control.read()
        if state is None or (state.record.policy_version == 0 and state.transition is None and not state.repair):
            return
        self._application.shut()
        self._presence.note(is_serving=False, activity=_WAITS)

    def _prove_place(self) -> None:
        """Serve at once if the weights are the committed ones, or can be made so from what the store retains."""
        self.shut_if_left_behind()
        if not self._application.reception.resident.is_gate_closed:
            return
        self._application.doubt_caches()
        for _ in range(_MAX_ROUNDS):  # others may commit meanwhile
            state = self._control.read()
            if state is None or not self._holds(state):
                break
            version = state.record.policy_version
            self._application.reception.restored(version)
            self._presence.note(policy_version=version)
            state = self._control.read()
            if state is not None and state.record.policy_version == version:
                try:
                    self._serve_again(state)
                except RefitError as error:  # no reason to learn its layout again: the next look tries again
                    _LOG.warning("receiver %s: holds policy version %d and does not serve yet: %s", self._name, version, error)
                break
        else:
            self._may_catch_up = False

    def _holds(self, state: ControlState) -> bool:
        """Whether the engine holds the committed policy, by its digest, now or after catching up."""
        shown = self._held()
        whole = {name: digest for name, digest in shown.items() if digest is not None}
        if len(whole) == len(shown) and digest_of_digests(whole) == state.record.policy_digest:
            return True
        if not self._may_catch_up or not state.is_idle or not state.links or self._desk.catalog is None:
            return False
        self._presence.show(activity=f"catching up to policy version {state.record.policy_version}")
        self._may_catch_up = False
        try:
            self._may_catch_up = self._rejoining.catch_up(
                state.links, shown, self._desk.catalog, begins=self._forget, survey=self._held
            )
        except RefitError as error:
            _LOG.warning("receiver %s does not catch up by itself; the next refit restores it: %s", self._name, error)
        self._log.drain()  # these stages are of no refit; observers have heard of them
        if not self._may_catch_up:
            self._presence.note(activity=_WAITS)
        return self._may_catch_up

    def _held(self) -> Mapping[str, TensorDigest | None]:
        """Digests of what the engine holds, without what it skips as a full reload would."""
        return {name: digest for name, digest in self._desk.digests().items() if name not in self._skipped}

    def _forget(self) -> None:
        """What the engine holds is not known from here on; nothing may be served."""
        self._application.forget_weights()
        self._presence.note(is_serving=False, policy_version=None)

    def order_restore(self) -> None:
        """An operator does not trust what the engine holds: shut its gate, and place it anew, after the attempt at hand."""
        self._is_restore_ordered = True
        self.look_at_run()

    def _leave(self) -> None:
        """Be a newcomer: ``join`` places the engine anew, and until then the coordinator asks nothing of it."""
        self._application.shut()
        self._desk.forget()
        self._presence.show(summary_digest="", is_serving=False, activity=_WAITS)
        self._presence.register_anew()

    def look_now_and_then(self) -> None:
        """``look_at_run`` if it is time to.

        Not while payloads are taken in for a coordinator that was heard within a lease: a look waits for the store.
        """
        is_led = self._clock.monotonic_s() - self._desk.heard_s < self._presence.lease.lease_s
        if self._look_pace.is_due and not (is_led and self._application.is_receiving):
            self.look_at_run()

    def look_at_run(self) -> None:
        """Greet a new coordinator, notice that others went on, serve again where that is right."""
        self._application.keep_shut()
        if self._is_restore_ordered and self._application.attempt is None:
            _LOG.warning("receiver %s: an operator ordered it to be restored", self._name)
            self._may_catch_up = True
            self._forget()
            self._leave()
            self._is_restore_ordered = False  # last: what fails on the way is tried again at the next look
            return
        notice = self._notice()
        if notice is not None and notice.epoch > self._desk.epoch:
            self._desk.epoch = notice.epoch
            if trouble := key_trouble(self._presence.shown.key_print, notice.key_print, "the trainer that took the run over"):
                _LOG.error("receiver %s: takes no part in what it asks for: %s", self._name, trouble)
            self._presence.show()  # so that it sees at once that this receiver lives
        resident = self._application.reception.resident
        if self._application.attempt is None and notice is not None and not resident.is_gate_closed:
            if notice.policy_version > max(self.policy_version, 0) and self.is_joined:
                _LOG.warning("receiver %s: policy version %d is committed without it", self._name, notice.policy_version)
                self._may_catch_up = True
                self._application.shut()
                self._presence.show(is_serving=False, activity="left behind; waiting for the next refit")
        elif resident.is_gate_closed and self.is_joined and (state := self._control.read()) is not None:
            self._serve_again(state)
            # Whatever attempt is at hand here is over if the record is idle.
            if self._application.reception.resident.is_gate_closed and self._may_catch_up and state.links and state.is_idle:
                self._leave()

    def _give_way(self) -> None:
        """No refit reaches this engine any more: the run's messages go to the other one. Told again until the gate is shut."""
        if not self._gave_way:
            self._gave_way = True
            self.failure = None
            self._application.shut()
        else:
            self._application.keep_shut()
        if self.failure is None and self._application.is_shut:
            self.failure = RejectedError(
                f"receiver {self._name}: another receiver started under this name and took its place, so this one's gate is "
                "shut; expected one receiver of a name in a run. Give each its own name, or none, and start this one again"
            )
            _LOG.error("%s", self.failure)

    def _serve_again(self, state: ControlState) -> None:
        if self._presence.may_act and self._application.serve_again(state):
            version = state.record.policy_version
            _LOG.info("receiver %s: holds committed policy version %d and serves", self._name, version)
            self._presence.note(policy_version=version, is_serving=True, activity="")

    def _notice(self) -> RunNotice | None:
        reading = read_beacon(self._store, keys.control(COORDINATOR))
        if reading is None:
            return None
        self._beat = reading.nonce, reading.counter
        return decode_message(reading.info, RunNotice, sender="beacon of the coordinator")
