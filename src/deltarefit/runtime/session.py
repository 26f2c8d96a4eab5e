"""Opens a run for a coordinator: the record, the lease, the notice that receivers join by."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Collection, Mapping

import msgspec

from deltarefit.canonical import Catalog, TensorDigest, digest_of_digests
from deltarefit.control import ControlPlane, ControlSettings
from deltarefit.errors import CommitConflictError, RefitError, RejectedError
from deltarefit.ids import PolicyVersion, baseline_id
from deltarefit.protocol import CommitRecord, ControlState, LeaseSettings, LeaseVerdict, LeaseWatch
from deltarefit.run_key import key_print
from deltarefit.runtime.activity import Activity
from deltarefit.runtime.calls import Caller
from deltarefit.runtime.clock import Clock, IdSource
from deltarefit.runtime.control_place import place_record, probe_record_store, record_store
from deltarefit.runtime.events import EventLog
from deltarefit.runtime.heartbeat import Heartbeat
from deltarefit.runtime.members import Members
from deltarefit.runtime.messages import RunNotice, encode_message
from deltarefit.runtime.names import COORDINATOR, coordinator_mailbox
from deltarefit.runtime.owner_group import OwnerGroup
from deltarefit.runtime.refit_state import Session
from deltarefit.runtime.relays import Relays, relay_context
from deltarefit.runtime.settings import PublisherSettings
from deltarefit.runtime.sweeping import sweep
from deltarefit.runtime.trace_clock import TimeAxis
from deltarefit.transport import Beacon, Mailbox, MailboxSettings, RunStore, keys, read_beacon

__all__ = ["MAIL_NBYTES", "RunHold", "control_plane", "lease_settings", "mail_settings"]

_LOG = logging.getLogger(__name__)
MAIL_NBYTES = 64 * 2**20
"""Longest message: digests of 200,000 tensors with 60-byte names take about 20 MB."""
_WATCH_S = 0.1
_ANSWER_POLL_S = 0.01, 0.05
_MAX_ACTIVITY = 2000  # a beacon is a small object


def lease_settings(lease_s: float) -> LeaseSettings:
    """Renewals come five times as often as the lease needs them."""
    return LeaseSettings(lease_s=lease_s, renew_s=lease_s / 5)


def control_plane(store: RunStore, clock: Clock, ids: IdSource, settings: ControlSettings | None = None) -> ControlPlane:
    """For anybody who reads the record, or fences it."""
    return ControlPlane(record_store(store), new_nonce=ids.nonce, pause=clock.sleep, settings=settings)


class RunHold:
    """One coordinator's hold on a run: acquired, shown alive, given back."""

    def __init__(
        self,
        store: RunStore,
        catalog: Catalog,
        digests: Mapping[str, TensorDigest],
        *,
        settings: PublisherSettings,
        clock: Clock,
        ids: IdSource,
        key: bytes | None = None,
    ) -> None:
        """Take the run, or create it.

        Raises:
            RejectedError: another live coordinator holds it, or it belongs to another model.
        """
        self.store = store
        self._key = key
        self.catalog = catalog
        self.activity = Activity(clock)
        self._clock = clock
        self._ids = ids
        self._settings = settings
        self._lease = lease_settings(settings.lease_s)
        self.nonce = ids.nonce()
        self.holder = f"{platform.node() or 'host'}-{os.getpid()}-{self.nonce}"
        place_record(store, settings.control)
        probe_record_store(store, ids)
        self.control = control_plane(store, clock, ids)
        self._digest = digest_of_digests(digests)
        store.put_if_absent(keys.plan(catalog.digest), catalog.to_wire())
        self._first = CommitRecord(PolicyVersion(0), baseline_id(0, self.nonce), self._digest)
        expired_epoch = self._wait_out(self.control.create("run", catalog.digest, self._first))
        self.state = self.control.acquire(self.holder, catalog.digest, expired_epoch=expired_epoch)
        self.epoch = self.state.epoch
        beacon = Beacon(store, keys.control(COORDINATOR), nonce=self.nonce)
        try:
            self._heartbeat = Heartbeat(beacon, self._lease, clock, self._notice)
        except BaseException:
            self.control.release(self.epoch, self.holder)
            raise

    @property
    def is_new(self) -> bool:
        """Whether the record names the baseline that this coordinator brought, because it made the run."""
        return self.state.record.baseline == self._first.baseline

    def _wait_out(self, state: ControlState) -> int | None:
        """If somebody holds the run, watch whether they live; the epoch that has expired, once it surely has.

        Raises:
            RejectedError: they live.
        """
        if not state.coordinator:
            return None
        _LOG.info("waiting up to %.0f s to see whether coordinator %s lives", self._lease.lease_s, state.coordinator)
        watch = LeaseWatch(self._lease)
        while True:
            asked_s = self._clock.monotonic_s()
            reading = read_beacon(self.store, keys.control(COORDINATOR))
            beat = None if reading is None else f"{reading.nonce}/{reading.counter}"
            verdict = watch.observe(beat, asked_s=asked_s, now_s=self._clock.monotonic_s())
            if verdict is LeaseVerdict.ALIVE:
                raise RejectedError(
                    f"run {self.store.url} is in use by live coordinator {state.coordinator} (epoch {state.epoch}); stop that "
                    "trainer first, or name another run"
                )
            if verdict is LeaseVerdict.EXPIRED:
                return state.epoch
            self._clock.sleep(min(_WATCH_S, self._lease.renew_s))

    def _notice(self) -> bytes:
        activity, activity_s = self.activity.read()
        return encode_message(
            RunNotice(
                self.epoch,
                self.catalog.digest,
                self.state.record.policy_version,
                self._settings.lease_s,
                activity[:_MAX_ACTIVITY],
                activity_s,
                key_print(self._key),
            )
        )

    def ensure_may_act(self) -> None:
        """Return if this coordinator still has the run; ask before whatever others rely on.

        A lease that ran out (the process was frozen, or the store out of reach) is taken up again if nobody took the run over
        meanwhile. Whoever is about to take it over fences this coordinator in the record, whatever it does here.

        Raises:
            CommitConflictError: another coordinator has it.
        """
        if self._heartbeat.may_act:
            return
        state = self.control.read()
        if state is None or state.epoch != self.epoch or state.coordinator != self.holder:
            raise CommitConflictError(
                f"this coordinator showed no sign of life for {self._settings.lease_s:.0f} s and another one took "
                f"{self.store.url} over; stop this trainer"
            )
        self._heartbeat.restore()
        _LOG.warning("this coordinator's lease on %s ran out; nobody took the run over, so it goes on", self.store.url)

    def take_over_baseline(self) -> ControlState:
        """Bind the committed version to the baseline that these owners just made."""
        name = baseline_id(self.state.record.policy_version, self._ids.nonce())
        self.state = self.control.reinitialise(self.epoch, name, self._digest)
        return self.state

    def announce(self, record: CommitRecord) -> None:
        """Show the committed version beside the heartbeat."""
        self.state = msgspec.structs.replace(self.state, record=record)
        try:
            self._heartbeat.show()
        except RefitError as error:
            _LOG.warning("version %d is committed, but not announced yet: %s", record.policy_version, error)

    def session(
        self, owners: OwnerGroup, num_owners: int, digests: Mapping[str, TensorDigest], log: EventLog, axis: TimeAxis
    ) -> Session:
        """What a coordinator works with while this hold lasts."""
        members = Members(self.store, self._clock, self._lease, key_print=key_print(self._key))
        mailbox = Mailbox(
            self.store,
            coordinator_mailbox(self.epoch),
            clock=self._clock,
            nonce=self.nonce,
            key=self._key,
            settings=mail_settings(self.store),
        )
        caller = Caller(
            mailbox,
            members,
            self._clock,
            nonce=self.nonce,
            epoch=self.epoch,
            life_s=self._lease.renew_s / 2,
            activity=self.activity,
            axis=axis,
        )
        context = relay_context(
            self.store.url, f"coordinator-{self.nonce}", key=self._key, tls=self._settings, clock=self._clock, ids=self._ids
        )
        return Session(
            store=self.store,
            control=self.control,
            holder=self.holder,
            epoch=self.epoch,
            catalog=self.catalog,
            owners=owners,
            num_owners=num_owners,
            caller=caller,
            members=members,
            relays=Relays(self.store, self._clock, self._settings.lease_s, self._settings, context),
            clock=self._clock,
            ids=self._ids,
            settings=self._settings,
            log=log,
            axis=axis,
            activity=self.activity,
            ensure_may_act=self.ensure_may_act,
            policy_version=self.state.record.policy_version,
            committed=dict(digests),
        )

    def sweep(self, gone: Collection[str] = ()) -> None:
        """Remove what the dead left behind. Only while no attempt is bound."""
        sweep(self.store, self.control, epoch=self.epoch, gone=gone)

    def release(self) -> None:
        """Give the run back. The next coordinator need not wait for the lease."""
        is_mine = False
        try:
            state = self.control.read()
            is_mine = state is not None and (state.epoch, state.coordinator) == (self.epoch, self.holder)
        finally:  # a thread that beats on would hold the run for nobody
            self._heartbeat.close(say_goodbye=is_mine)
        self.control.release(self.epoch, self.holder)


def mail_settings(store: RunStore) -> MailboxSettings:
    """Looks come at least 20 times a second: a coordinator only looks while it waits for answers."""
    pace = MailboxSettings.for_store(store)
    first_s, most_s = _ANSWER_POLL_S
    return MailboxSettings(
        max_nbytes=MAIL_NBYTES, first_poll_s=min(pace.first_poll_s, first_s), max_poll_s=min(pace.max_poll_s, most_s)
    )
