"""Which fault strikes where: chosen by the seed, counted when it fires."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

__all__ = ["KINDS", "MESSAGE_FAULTS", "PLACES", "FaultPlan", "Strike"]

MESSAGE_FAULTS = (
    "drop", "double", "delay", "crash sender", "crash target", "crash target after", "freeze sender", "freeze target", "part",
    "isolate",
)  # fmt: skip
"""Strike at the n-th message of the run."""
PLACES = {
    "crash between effects": 60,
    "coordinator dies": 20,
    "coordinator sleeps": 20,
    "late swap": 12,
    "corrupt": 8,
    "torn write": 8,
    "update fails": 4,
    "abort": 2,
}
"""Strike at the n-th passage of a place, of about so many in a run without faults: between two effects of any node; between two
commands of a coordinator (it dies, or sleeps through its lease while another one steps in); at a change of the record that
arrives after its sender has given it up; at a payload on its way; in a write to weights; in the update of a baseline; at a
refit, as an operator."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One planned fault."""

    kind: str
    at: int
    """Which message or passage, from 1."""
    span_s: float
    """How long it lasts, for those that last."""


KINDS = (*MESSAGE_FAULTS, *MESSAGE_FAULTS, *PLACES)
"""What the seed chooses from; faults of messages count twice, as they strike at every node."""


class FaultPlan:
    """The faults of one run."""

    def __init__(self, random: Random, *, num_messages: int, lease_s: float, count: int, kinds: Sequence[str] = KINDS) -> None:
        """Choose ``count`` faults among the messages and places that a run without faults has."""
        self.fired: Counter[str] = Counter()
        self.planned: list[Strike] = []
        self._passed: Counter[str] = Counter()
        for _ in range(count):
            kind = random.choice(kinds)
            at = random.randint(1, PLACES.get(kind, num_messages))
            span_s = random.choice((random.uniform(0.05, 1.0), random.uniform(1.0, 4.0))) * lease_s
            self.planned.append(Strike(kind, at, span_s))

    def strike_message(self, number: int) -> Strike | None:
        """The fault that strikes at this message, if one does."""
        for strike in self.planned:
            if strike.kind in MESSAGE_FAULTS and strike.at == number:
                self.fired[strike.kind] += 1
                return strike
        return None

    def strikes(self, kind: str) -> bool:
        """Whether a fault of this kind strikes at this passage of its place; counts the passage."""
        self._passed[kind] += 1
        struck = any(strike.kind == kind and strike.at == self._passed[kind] for strike in self.planned)
        if struck:
            self.fired[kind] += 1
        return struck

    def passed(self, kind: str) -> int:
        """Passages of a place so far."""
        return self._passed[kind]
