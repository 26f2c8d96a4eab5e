"""A cluster on virtual time: the real machines, the real codec and real small tensors, and everything that can go wrong.

Owners, receivers, coordinators and the control record run in one thread over a network that loses, doubles, delays, disorders
and parts; nodes crash, freeze and restart at any message and between any two effects, as the seed says. The end state is
compared bit for bit with the dense result, invariants are checked at every step, and a seed replays exactly. Half of the seeds
deliver synchronously, half asynchronously.
"""

from deltarefit.testing.simulation.cluster import Cluster, ViolationError
from deltarefit.testing.simulation.runs import MUTANTS, SeedReport, run_seed, run_seeds, summary

__all__ = ["MUTANTS", "Cluster", "SeedReport", "ViolationError", "run_seed", "run_seeds", "summary"]
