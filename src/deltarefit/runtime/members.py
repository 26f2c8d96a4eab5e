"""The receivers of a run as the coordinator sees them."""

from __future__ import annotations

from dataclasses import dataclass

from deltarefit.errors import DeadlineError, RejectedError
from deltarefit.ids import ReceiverId
from deltarefit.runtime.clock import Clock, Deadline
from deltarefit.runtime.messages import EngineSummary, Membership, decode_message
from deltarefit.transport import BeaconWatch, RunStore, keys

__all__ = ["Member", "Members"]

_MAX_SUMMARY_NBYTES = 64 * 2**20  # 200,000 tensors of 60-byte names need about 15 MB
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Member:
    """A receiver that shows signs of life."""

    receiver: ReceiverId
    membership: Membership

    @property
    def identity(self) -> tuple[str, str]:
        """The receiver's name and the start of its process: a restarted receiver is another member."""
        return self.receiver, self.membership.incarnation


class Members:
    """Watches the beacons under a run. Used by one thread."""

    def __init__(self, store: RunStore, clock: Clock, lease_s: float) -> None:
        self._store = store
        self._clock = clock
        self._lease_s = lease_s
        self._watch = BeaconWatch(store, clock=clock)
        self._summaries: dict[str, EngineSummary] = {}

    def alive(self) -> dict[ReceiverId, Member]:
        """Receivers whose beacon moved within the lease, by name."""
        found = {}
        for name, sighting in self._watch.look().items():
            if sighting.age_s < self._lease_s:
                membership = decode_message(sighting.reading.info, Membership, sender=f"beacon of receiver {name}")
                found[ReceiverId(name)] = Member(ReceiverId(name), membership)
        return found

    def ready(self, catalog_digest: str) -> dict[ReceiverId, Member]:
        """Live receivers that prewarmed for this catalog.

        Raises:
            RejectedError: a receiver refuses this model; the text is its own.
        """
        ready = {}
        for receiver, member in self.alive().items():
            shown = member.membership
            if shown.refusal:
                raise RejectedError(f"receiver {receiver} ({shown.engine}) refuses this model: {shown.refusal}")
            if shown.summary_digest and shown.catalog_digest == catalog_digest:
                ready[receiver] = member
        return ready

    def wait_ready(self, catalog_digest: str, count: int, deadline: Deadline) -> dict[ReceiverId, Member]:
        """Wait until at least ``count`` receivers are ready.

        Raises:
            DeadlineError: they did not come; the text says who is there and what to start.
            RejectedError: as in ``ready``.
        """
        while len(ready := self.ready(catalog_digest)) < count:
            if deadline.expired:
                joining = sorted(set(self.alive()) - set(ready))
                raise DeadlineError(
                    f"{len(ready)} of {count} receivers joined {self._store.url} within {deadline.timeout_s:.0f} s"
                    f" (ready: {', '.join(sorted(ready)) or 'none'}; still preparing: {', '.join(joining) or 'none'}); start"
                    " Receiver.attach(..., run=...) in each rollout process with the same run, or set min_receivers"
                )
            self._clock.sleep(_LOOK_S)
        return ready

    def summary(self, member: Member) -> EngineSummary:
        """What the receiver's prewarm found."""
        digest = member.membership.summary_digest
        if digest not in self._summaries:
            data = self._store.get(keys.plan(digest), max_nbytes=_MAX_SUMMARY_NBYTES)
            self._summaries[digest] = decode_message(data, EngineSummary, sender=f"receiver {member.receiver}")
        return self._summaries[digest]
