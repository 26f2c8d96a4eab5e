"""``python -m deltarefit.testing.simulation [--seeds N] [--first N] [--jobs N] [--mutant NAME]``: runs many seeds."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from deltarefit.errors import DeadlineError
from deltarefit.testing.simulation.cluster import ViolationError
from deltarefit.testing.simulation.runs import MUTANTS, run_seeds, summary

__all__ = ["main"]


def main() -> int:
    """Play seeds; exit code 1 if one of them failed, with its number in the last line."""
    parser = argparse.ArgumentParser(
        prog="python -m deltarefit.testing.simulation", description="Simulate refits that go wrong."
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed; a seed that failed is replayed with --seeds 1")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--mutant", choices=tuple(MUTANTS), default="", help="plant a bug: some seed must fail")
    chosen = parser.parse_args()
    if chosen.jobs > 1 and chosen.seeds > 1:
        return _fan_out(chosen.first, chosen.seeds, min(chosen.jobs, chosen.seeds), chosen.mutant)
    try:
        reports = list(run_seeds(range(chosen.first, chosen.first + chosen.seeds), chosen.mutant))
    except (ViolationError, DeadlineError) as error:
        sys.stdout.write(f"FAILED: {error}\n")
        return 1
    sys.stdout.write(summary(reports) + "\n")
    return 0


def _fan_out(first: int, count: int, jobs: int, mutant: str) -> int:
    """Give each process a share of the seeds."""
    share = -(-count // jobs)
    running = []
    for start in range(first, first + count, share):
        size = min(share, first + count - start)
        command = [sys.executable, "-m", "deltarefit.testing.simulation", "--jobs", "1"]
        command += ["--first", str(start), "--seeds", str(size), *(["--mutant", mutant] if mutant else [])]
        running.append(subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}))
    return max(process.wait() for process in running)


if __name__ == "__main__":
    sys.exit(main())
