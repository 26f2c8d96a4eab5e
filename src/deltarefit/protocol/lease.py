"""Who is alive, without comparing clocks between machines.

A holder of a lease keeps writing a *beat*, any text that differs from the one before, to an object of its own. A newcomer
watches it on its **own** monotonic clock: if the beat moves, the holder lives; if it stands still for the whole lease, the
lease has expired. No clock reading ever crosses from one machine to another, so clocks need not agree; they need only run at
about the same rate, which ``DRIFT`` allows for.

The holder fences itself on its own clock (``SelfFence``), counted from *before* it sent the beat that was last known to be
written. A watcher starts counting after it first *saw* that beat, which is later. So the holder has always stopped acting
before any watcher calls the lease expired, also if it was frozen in between: after it wakes its clock has run on, and it must
ask ``may_act`` before it acts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from deltarefit.errors import RejectedError

__all__ = ["DRIFT", "LeaseSettings", "LeaseVerdict", "LeaseWatch", "SelfFence"]

DRIFT = 0.1
"""A holder gives up this fraction of the lease early. Quartz clocks differ by less than 0.001; the rest is for virtual
machines whose clocks are slewed (NTP slews at 0.0005, chrony by default at up to 0.1)."""


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """How long a lease holds and how often it is renewed."""

    lease_s: float = 15.0
    """A watcher calls the lease expired after the beat stood still for this long."""
    renew_s: float = 3.0
    """The holder writes a beat this often; several may be lost before the lease is."""

    def __post_init__(self) -> None:
        if not 0 < self.renew_s <= self.lease_s / 2:
            raise RejectedError(
                f"lease: renew_s {self.renew_s} and lease_s {self.lease_s}, expected 0 < renew_s <= lease_s / 2, so that one "
                "lost renewal does not end the lease"
            )

    @property
    def fence_s(self) -> float:
        """Seconds after the last proven renewal at which the holder must stop acting."""
        return self.lease_s * (1 - DRIFT)


class LeaseVerdict(Enum):
    """What a watcher knows about a lease."""

    UNDECIDED = "undecided"
    ALIVE = "alive"
    """The beat moved while it was watched."""
    EXPIRED = "expired"
    """The beat stood still for a whole lease."""


class LeaseWatch:
    """Watches one holder's beat. Feed it what was read; it never reads anything itself."""

    def __init__(self, settings: LeaseSettings) -> None:
        self._settings = settings
        self._beat: str | None = None
        self._since_s: float | None = None
        self._moved = False

    def observe(self, beat: str | None, *, asked_s: float, now_s: float) -> LeaseVerdict:
        """Take in what was read.

        Args:
            beat: the holder's beat; None if there is no such object, which stands still like any other value.
            asked_s: the watcher's monotonic clock before the read was sent: the beat stood like this at least until then.
            now_s: the same clock after the read returned: the beat may have moved as late as this.

        Returns:
            ALIVE from the first move of the beat until it stood still for a lease; EXPIRED after it stood still for a lease;
            UNDECIDED before either.
        """
        if self._since_s is None:
            self._beat, self._since_s = beat, now_s
        elif beat != self._beat:
            self._beat, self._since_s, self._moved = beat, now_s, True
        if asked_s - self._since_s >= self._settings.lease_s:
            return LeaseVerdict.EXPIRED
        return LeaseVerdict.ALIVE if self._moved else LeaseVerdict.UNDECIDED

    def wait_s(self, now_s: float) -> float:
        """Seconds until the lease expires if the beat stays as it is."""
        if self._since_s is None:
            return self._settings.lease_s
        return max(0.0, self._since_s + self._settings.lease_s - now_s)


class SelfFence:
    """A holder's own view of its lease: whether it may still act. Once expired it stays so until ``restore``."""

    def __init__(self, settings: LeaseSettings, *, now_s: float) -> None:
        self._settings = settings
        self._renewed_s = now_s
        self._expired = False

    def renewed(self, *, sent_s: float, now_s: float) -> None:
        """A renewal is known to be written. ``sent_s`` was read before the write was sent, ``now_s`` after its reply.

        A reply that comes after the lease ran out renews nothing: a watcher may have decided before the write took effect.
        """
        if self.may_act(now_s):
            self._renewed_s = max(self._renewed_s, sent_s)

    def may_act(self, now_s: float) -> bool:
        """Whether the lease still holds. Ask before every write and before every reopening of the request gate."""
        if now_s - self._renewed_s >= self._settings.fence_s:
            self._expired = True
        return not self._expired

    def restore(self, sent_s: float) -> None:
        """The holder was restored and registered anew; ``sent_s`` as in ``renewed``."""
        self._expired = False
        self._renewed_s = sent_s
