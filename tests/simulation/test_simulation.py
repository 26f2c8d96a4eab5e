"""A cluster on virtual time under seeded faults: it ends bit-equal and keeps its promises; planted bugs are caught.

More seeds: ``DELTAREFIT_SEEDS=5000 pytest tests/simulation`` or ``python -m deltarefit.testing.simulation --seeds 5000``.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from deltarefit.errors import DeadlineError
from deltarefit.testing.simulation import MUTANTS, ViolationError, run_seed, run_seeds, summary
from deltarefit.testing.simulation.faults import KINDS

NUM_SEEDS = int(os.environ.get("DELTAREFIT_SEEDS", "3000"))
ENOUGH = 60
"""Seeds within which a planted bug must show."""


@pytest.fixture(scope="module")
def reports():
    return list(run_seeds(range(NUM_SEEDS)))


@pytest.mark.slow
def test_every_seed_ends_bit_equal_and_its_faults_fired(reports, say):
    assert all(report.fired for report in reports)
    assert all(report.tally.commits >= 2 for report in reports)
    say(summary(reports))


@pytest.mark.slow
def test_every_kind_of_fault_fired(reports):
    fired = Counter()
    for report in reports:
        fired.update(report.fired)
    assert set(fired) == set(KINDS)


@pytest.mark.slow
def test_the_seeds_reach_what_they_are_meant_to_reach(reports):
    """Takeovers, restarts, aborts and jobs that lost the run all happen; a simulation without them proves little."""
    ends = [end for report in reports for end in report.tally.ends]
    assert any(end.startswith("CommitConflictError") for end in ends)
    assert any(end.startswith("RejectedError: the run is in use") for end in ends)
    assert sum(report.tally.takeovers for report in reports) > NUM_SEEDS / 20
    assert sum(report.tally.restarts for report in reports) > NUM_SEEDS / 20
    assert any(report.tally.attempts > report.tally.commits for report in reports)


@pytest.mark.parametrize("seed", [3, 41, 77])
def test_a_seed_replays_exactly(seed):
    assert run_seed(seed) == run_seed(seed)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_bug_is_caught(mutant, say):
    caught = {}
    for seed in range(ENOUGH):
        if len(caught) == 5:
            break
        try:
            run_seed(seed, mutant)
        except (ViolationError, DeadlineError) as error:
            caught[seed] = str(error)
    assert caught, f"no seed below {ENOUGH} notices: {mutant}"
    first = min(caught)
    say(f"planted bug '{mutant}': caught by seeds {', '.join(map(str, caught))}: {caught[first][:100]}")
