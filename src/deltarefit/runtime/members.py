"""The receivers of a run as the coordinator sees them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from deltarefit.errors import DeadlineError, RejectedError, TransportError
from deltarefit.ids import ReceiverId
from deltarefit.protocol import LeaseSettings, LeaseVerdict, LeaseWatch
from deltarefit.run_key import key_trouble
from deltarefit.runtime.clock import Clock, Deadline
from deltarefit.runtime.messages import EngineSummary, Membership, decode_message
from deltarefit.transport import BeaconReading, RunStore, keys, read_beacons

__all__ = ["Member", "Members"]

_LOG = logging.getLogger(__name__)
_MAX_SUMMARY_NBYTES = 64 * 2**20  # 200,000 tensors of 60-byte names need about 15 MB
_LOOK_S = 0.05
_GONE_LEASES = 20  # a receiver that was only frozen writes its beacon anew, but would be left out of a refit meanwhile


@dataclass(frozen=True, slots=True)
class Member:
    """A receiver that shows signs of life."""

    receiver: ReceiverId
    membership: Membership

    @property
    def identity(self) -> tuple[str, str]:
        """The receiver's name and incarnation: one that restarted, or registered anew, is another member."""
        return self.receiver, self.membership.incarnation


@dataclass(slots=True)
class _Watched:
    watch: LeaseWatch
    is_fresh: bool
    """It appeared while we were looking, so it need not move to prove that it lives."""
    member: Member
    moved_s: float
    """When its beacon was last seen to move, or first seen."""
    beat: str = ""
    verdict: LeaseVerdict = LeaseVerdict.UNDECIDED


class Members:
    """Watches the beacons under a run. Used by one thread at a time."""

    def __init__(self, store: RunStore, clock: Clock, lease: LeaseSettings, *, key_print: str = "") -> None:
        """``key_print``: of the coordinator's run key."""
        self._key_print = key_print
        self._store = store
        self._clock = clock
        self._lease = lease
        self._watched: dict[ReceiverId, _Watched] = {}
        self._looked_s: float | None = None
        self._summaries: dict[str, EngineSummary] = {}
        self._refusals: dict[ReceiverId, str] = {}

    # --- who is there -----------------------------------------------------------------------------------------------

    def alive(self, *, max_age_s: float = 0.0) -> dict[ReceiverId, Member]:
        """Receivers that are not proven dead, by name, as they were at most ``max_age_s`` ago."""
        if self._looked_s is None or self._clock.monotonic_s() - self._looked_s > max_age_s:
            self._look()
        return {name: one.member for name, one in self._watched.items() if one.verdict is not LeaseVerdict.EXPIRED}

    def long_gone(self) -> frozenset[ReceiverId]:
        """Receivers whose beacon stood still for so many leases that nobody expects them back soon; at the last look."""
        now_s, span_s = self._clock.monotonic_s(), _GONE_LEASES * self._lease.lease_s
        return frozenset(name for name, one in self._watched.items() if now_s - one.moved_s > span_s)

    def ready(self, catalog_digest: str, *, max_age_s: float = 0.0) -> dict[ReceiverId, Member]:
        """Receivers that live for certain and prewarmed for this catalog, as they were at most ``max_age_s`` ago."""
        self.alive(max_age_s=max_age_s)
        self._refusals = {}
        ready = {}
        for receiver, one in self._watched.items():
            shown = one.member.membership
            if one.verdict is LeaseVerdict.EXPIRED:
                continue
            trouble = self.key_trouble(one.member)
            if shown.refusal or trouble:
                if _lives(one):  # else it may be what a dead one left
                    text = f"receiver {receiver} ({shown.engine}) refuses to take part: {shown.refusal}"
                    self._refusals[receiver] = trouble or text
            elif self._is_ready(one, catalog_digest):
                ready[receiver] = one.member
        return ready

    def wait_ready(
        self, catalog_digest: str, count: int, deadline: Deadline, *, waiting: Callable[[str], None] = lambda _: None
    ) -> dict[ReceiverId, Member]:
        """Wait until at least ``count`` receivers are ready, and none is there of which it is not known whether it lives.

        Args:
            catalog_digest: of the catalog that they must have prewarmed for.
            count: how many are enough.
            deadline: until when.
            waiting: told, in words, what is waited for.

        Raises:
            DeadlineError: they did not come; the text says who is there and what to start.
            RejectedError: too few are ready because some refuse this model; the text is their own.
        """
        while True:
            ready = self.ready(catalog_digest)
            undecided = self._undecided(catalog_digest)
            if len(ready) >= count and not undecided:
                for text in self._refusals.values():
                    _LOG.warning("%s; it takes no part", text)
                return ready
            if self._refusals and len(ready) < count:
                raise RejectedError("; ".join(self._refusals[receiver] for receiver in sorted(self._refusals)))
            if deadline.expired:
                self._refuse(ready, count, deadline)
            waiting(f"receivers to join: {len(ready)} of {count} are ready")
            self._clock.sleep(_LOOK_S)

    def _refuse(self, ready: dict[ReceiverId, Member], count: int, deadline: Deadline) -> None:
        joining = sorted(set(self.alive(max_age_s=_LOOK_S)) - set(ready))
        raise DeadlineError(
            f"{len(ready)} of {count} receivers joined {self._store.url} within {deadline.timeout_s:.0f} s"
            f" (ready: {', '.join(sorted(ready)) or 'none'}; still preparing: {', '.join(joining) or 'none'}); start"
            " Receiver.attach(..., run=...) in each rollout process with the same run, or set min_receivers"
        )

    def _is_ready(self, one: _Watched, catalog_digest: str) -> bool:
        shown = one.member.membership
        return _lives(one) and bool(shown.summary_digest) and shown.catalog_digest == catalog_digest

    def _undecided(self, catalog_digest: str) -> bool:
        """Whether a prewarmed receiver is there of which nobody knows yet whether it lives; soon its lease tells."""
        return any(
            one.verdict is LeaseVerdict.UNDECIDED
            and not one.is_fresh
            and bool(one.member.membership.summary_digest)
            and one.member.membership.catalog_digest == catalog_digest
            for one in self._watched.values()
        )

    # --- looking ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        is_first = self._looked_s is None
        asked_s = self._clock.monotonic_s()
        readings = read_beacons(self._store)
        now_s = self._clock.monotonic_s()
        watched: dict[ReceiverId, _Watched] = {}
        for reading in readings:
            name = ReceiverId(reading.name)
            try:
                member = Member(name, decode_message(reading.info, Membership, sender=f"beacon of receiver {name}"))
            except TransportError as error:
                _LOG.warning("%s; it takes no part", error)
                continue
            one = self._watched.get(name) or _Watched(LeaseWatch(self._lease), not is_first, member, now_s)
            beat = _beat(reading)
            if beat != one.beat:
                one.beat, one.moved_s = beat, now_s
            one.member = member
            one.verdict = one.watch.observe(beat, asked_s=asked_s, now_s=now_s)
            watched[name] = one
        self._watched = watched
        self._looked_s = now_s

    def key_trouble(self, member: Member) -> str:
        """Why this receiver and the coordinator do not understand each other's messages; empty if they do."""
        return key_trouble(self._key_print, member.membership.key_print, f"receiver {member.receiver}")

    def summary(self, member: Member) -> EngineSummary:
        """What the receiver's prewarm found."""
        digest = member.membership.summary_digest
        if digest not in self._summaries:

            def decoded(data: bytes) -> EngineSummary:
                return decode_message(data, EngineSummary, sender=f"receiver {member.receiver}")

            self._summaries[digest] = self._store.get_as(keys.plan(digest), decoded, max_nbytes=_MAX_SUMMARY_NBYTES)
        return self._summaries[digest]


def _lives(one: _Watched) -> bool:
    """For certain, not only as far as nobody knows better."""
    return one.verdict is LeaseVerdict.ALIVE or one.is_fresh


def _beat(reading: BeaconReading) -> str:
    return f"{reading.nonce}/{reading.counter}"
