"""Opens a run for a coordinator: the record, the lease, the notice that receivers join by."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

from deltarefit.canonical import Catalog, TensorDigest, digest_of_digests
from deltarefit.control import (
    ControlPlane,
    MemoryRecordStore,
    ObjectRecordStore,
    RecordStore,
    SqliteRecordStore,
    probe_conditional_writes,
)
from deltarefit.errors import RejectedError
from deltarefit.ids import PolicyVersion, baseline_id
from deltarefit.protocol import CommitRecord, ControlState, LeaseSettings, LeaseVerdict, LeaseWatch
from deltarefit.runtime.calls import Caller
from deltarefit.runtime.clock import Clock, IdSource
from deltarefit.runtime.coordinator import Session
from deltarefit.runtime.events import EventLog
from deltarefit.runtime.heartbeat import Heartbeat
from deltarefit.runtime.members import Members
from deltarefit.runtime.messages import RunNotice, encode_message
from deltarefit.runtime.owner_group import OwnerGroup
from deltarefit.runtime.settings import PublisherSettings
from deltarefit.transport import Beacon, Mailbox, MailboxSettings, RunStore, keys, read_beacon

__all__ = ["COORDINATOR", "MAIL_NBYTES", "RunHold", "control_plane", "lease_settings", "mail_settings", "record_store"]

COORDINATOR = "coordinator"
"""Name of the coordinator's beacon, and the stem of its mailbox's name."""
MAIL_NBYTES = 64 * 2**20
"""Longest message: digests of 200,000 tensors with 60-byte names take about 20 MB."""
_WATCH_S = 0.1


def lease_settings(lease_s: float) -> LeaseSettings:
    """Renewals come five times as often as the lease needs them."""
    return LeaseSettings(lease_s=lease_s, renew_s=lease_s / 5)


def record_store(store: RunStore, ids: IdSource) -> RecordStore:
    """Where the run's control record is: a SQLite file for ``file://``, else an object under conditional writes.

    Raises:
        RejectedError: the object store ignores conditions, so two coordinators could both win.
    """
    if store.directory is not None:
        return SqliteRecordStore(store.directory / "control" / "record.sqlite")
    if store.url.startswith("memory:"):
        return MemoryRecordStore(store.url)
    probe_conditional_writes(store.backend, keys.control(f"probe-{ids.nonce()}"))
    return ObjectRecordStore(store.backend, keys.control("record"), place=f"{store.url}/{keys.control('record')}")


def control_plane(store: RunStore, clock: Clock, ids: IdSource) -> ControlPlane:
    return ControlPlane(record_store(store, ids), new_nonce=ids.nonce, pause=clock.sleep)


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
    ) -> None:
        """Take the run, or create it.

        Raises:
            RejectedError: another live coordinator holds it, or it belongs to another model.
        """
        self.store = store
        self.catalog = catalog
        self._clock = clock
        self._ids = ids
        self._settings = settings
        self._lease = lease_settings(settings.lease_s)
        self.nonce = ids.nonce()
        self.holder = f"{platform.node() or 'host'}-{os.getpid()}-{self.nonce}"
        self.control = control_plane(store, clock, ids)
        self._digest = digest_of_digests(digests)
        store.put_if_absent(keys.plan(catalog.digest), catalog.to_wire())
        record = CommitRecord(PolicyVersion(0), baseline_id(0, self.nonce), self._digest)
        self._wait_out(self.control.create("run", catalog.digest, record))
        self.state = self.control.acquire(self.holder, catalog.digest, expired_epoch=self._expired_epoch)
        self.epoch = self.state.epoch
        self._heartbeat = Heartbeat(
            Beacon(store, keys.control(COORDINATOR), nonce=self.nonce), self._lease, clock, self._notice(self.state)
        )

    @property
    def is_new(self) -> bool:
        """Whether this hold is the first that the run ever had."""
        return self.epoch == 1

    def _wait_out(self, state: ControlState) -> None:
        """If somebody holds the run, watch whether they live; return once they surely do not.

        Raises:
            RejectedError: they do.
        """
        self._expired_epoch = state.epoch
        if not state.coordinator:
            return
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
                return
            self._clock.sleep(min(_WATCH_S, self._lease.renew_s))

    def _notice(self, state: ControlState) -> bytes:
        return encode_message(RunNotice(self.epoch, self.catalog.digest, state.record.policy_version, self._settings.lease_s))

    @property
    def may_act(self) -> bool:
        """False once others may have concluded that this coordinator is dead."""
        return self._heartbeat.may_act

    def take_over_baseline(self) -> ControlState:
        """Bind the committed version to the baseline that these owners just made (checklist D36)."""
        name = baseline_id(self.state.record.policy_version, self._ids.nonce())
        self.state = self.control.reinitialise(self.epoch, name, self._digest)
        return self.state

    def announce(self, state: ControlState) -> None:
        """Show the committed version beside the heartbeat."""
        self.state = state
        self._heartbeat.show(self._notice(state))

    def session(self, owners: OwnerGroup, num_owners: int, digests: Mapping[str, TensorDigest], log: EventLog) -> Session:
        """What a coordinator works with while this hold lasts."""
        members = Members(self.store, self._clock, self._settings.lease_s)
        mailbox = Mailbox(
            self.store,
            f"{COORDINATOR}-{self.epoch}",
            clock=self._clock,
            nonce=self.nonce,
            settings=mail_settings(self.store),
        )
        return Session(
            store=self.store,
            control=self.control,
            holder=self.holder,
            epoch=self.epoch,
            catalog=self.catalog,
            owners=owners,
            num_owners=num_owners,
            caller=Caller(mailbox, members, self._clock, nonce=self.nonce, epoch=self.epoch),
            members=members,
            clock=self._clock,
            ids=self._ids,
            settings=self._settings,
            log=log,
            policy_version=self.state.record.policy_version,
            committed=dict(digests),
        )

    def release(self) -> None:
        """Give the run back. The next coordinator need not wait for the lease."""
        self._heartbeat.close()
        self.control.release(self.epoch, self.holder)


def mail_settings(store: RunStore) -> MailboxSettings:
    pace = MailboxSettings.for_store(store)
    return MailboxSettings(max_nbytes=MAIL_NBYTES, first_poll_s=pace.first_poll_s, max_poll_s=pace.max_poll_s)
