"""Who lives, as a simulated coordinator sees it: the real ``LeaseWatch`` over beats that are read from the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deltarefit.ids import ReceiverId
from deltarefit.protocol import LeaseSettings, LeaseVerdict, LeaseWatch
from deltarefit.testing.simulation.receiver_node import Shown

__all__ = ["Member", "Roster"]


@dataclass(frozen=True, slots=True)
class Member:
    """A receiver and the incarnation that is meant."""

    receiver: ReceiverId
    incarnation: str


class Roster:
    """Takes in what was read; decides nothing."""

    def __init__(self, lease: LeaseSettings) -> None:
        self._lease = lease
        self._watches: dict[str, LeaseWatch] = {}
        self._verdicts: dict[str, LeaseVerdict] = {}
        self._shown: dict[str, Shown] = {}

    def observe(self, beats: Mapping[str, tuple[str, object]], *, asked_s: float, now_s: float) -> None:
        """The beats as they were read between two moments."""
        for name, (text, shown) in beats.items():
            if isinstance(shown, Shown):
                self._shown[name] = shown
                watch = self._watches.setdefault(name, LeaseWatch(self._lease))
                self._verdicts[name] = watch.observe(text, asked_s=asked_s, now_s=now_s)

    def alive(self) -> dict[ReceiverId, Member]:
        """Not proven dead."""
        return self._members(lambda verdict: verdict is not LeaseVerdict.EXPIRED)

    def ready(self) -> dict[ReceiverId, Member]:
        """Known to live, and joined."""
        living = self._members(lambda verdict: verdict is LeaseVerdict.ALIVE)
        return {name: member for name, member in living.items() if self._shown[name].is_joined}

    def is_decided(self) -> bool:
        """Whether of every joined receiver it is known whether it lives."""
        return all(verdict is not LeaseVerdict.UNDECIDED for verdict in self._verdicts.values())

    def _members(self, wanted: object) -> dict[ReceiverId, Member]:
        found = {}
        for name, verdict in sorted(self._verdicts.items()):
            if callable(wanted) and wanted(verdict):
                found[ReceiverId(name)] = Member(ReceiverId(name), self._shown[name].incarnation)
        return found
