"""Runs seeds, and says what fired. ``python -m deltarefit.testing.simulation`` runs many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from deltarefit.errors import DeadlineError
from deltarefit.testing.simulation.cluster import LEASE, Cluster, Tally, ViolationError
from deltarefit.testing.simulation.faults import KINDS, FaultPlan

__all__ = ["MUTANTS", "SeedReport", "run_seed", "run_seeds", "summary"]

MUTANTS: Mapping[str, Sequence[str]] = {
    "skip the fence": ("late swap",),
    "forget deduplication": ("double",),
    "commit before the last acknowledgement": ("torn write",),
    "advance the baseline early": ("corrupt", "torn write"),
    "apply in arrival order": ("double", "delay"),
    "overwrite retry over a subset": ("corrupt", "torn write"),
}
"""Planted bugs, each with the faults that bring it to light: a simulation that does not catch them all proves nothing."""
_MAX_FAULTS = 3


@dataclass(frozen=True)
class SeedReport:
    """One run."""

    seed: int
    fired: dict[str, int]
    planned: int
    tally: Tally
    virtual_s: float
    events: int


@lru_cache(maxsize=1)
def num_messages() -> int:
    """Messages of a run without faults: where faults can strike."""
    cluster = Cluster(0, FaultPlan(Random(0), num_messages=1, lease_s=LEASE.lease_s, count=0), noise=(0.0, 0.0), audits=True)
    cluster.run()
    return cluster.network.num_messages


def run_seed(seed: int, mutant: str = "") -> SeedReport:
    """Play one run.

    Raises:
        ViolationError: an invariant does not hold, or no planned fault fired.
        DeadlineError: it does not end.
    """
    random = Random(seed * 7919 + 17)
    noise = random.choice([(0.0, 0.0), (0.0, 0.0), (0.05, 0.05), (0.15, 0.1)])
    faults = FaultPlan(
        random,
        num_messages=num_messages(),
        lease_s=LEASE.lease_s,
        count=random.randint(1, _MAX_FAULTS),
        kinds=MUTANTS.get(mutant, KINDS),
    )
    audits = random.random() < 0.5 and not mutant
    is_async = random.random() < 0.5 and mutant != "apply in arrival order"
    cluster = Cluster(seed, faults, noise=noise, audits=audits, is_async=is_async, mutant=mutant)
    cluster.run()
    if not faults.fired:
        raise ViolationError(f"seed {seed}: none of the planned faults fired: {faults.planned}")
    return SeedReport(
        seed=seed,
        fired=dict(faults.fired),
        planned=len(faults.planned),
        tally=cluster.tally,
        virtual_s=cluster.world.now_s,
        events=cluster.world.num_events,
    )


def run_seeds(seeds: Iterable[int], mutant: str = "") -> Iterator[SeedReport]:
    """Play many; the first that fails raises, with its seed in the text."""
    for seed in seeds:
        try:
            yield run_seed(seed, mutant)
        except ViolationError as error:
            raise ViolationError(f"seed {seed}: {error}") from error
        except DeadlineError as error:
            raise DeadlineError(f"seed {seed}: {error}") from error


def summary(reports: Iterable[SeedReport]) -> str:
    """Seeds and counts of faults, in words."""
    listed = list(reports)
    fired: Counter[str] = Counter()
    for report in listed:
        fired.update(report.fired)
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(fired.items()))

    def total(name: str) -> int:
        return sum(int(getattr(report.tally, name)) for report in listed)

    return (
        f"seeds {listed[0].seed} to {listed[-1].seed}: {sum(fired.values())} faults fired ({counts}); "
        f"{total('commits')} commits, "
        f"{total('attempts')} attempts, {total('takeovers')} takeovers, {total('jobs')} training jobs, {total('restarts')} "
        f"restarted receivers, {total('served')} openings of a request gate, {sum(r.events for r in listed):,} events"
    )
