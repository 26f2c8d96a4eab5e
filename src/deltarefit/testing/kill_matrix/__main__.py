"""``python -m deltarefit.testing.kill_matrix [--json] [--reduced] [--only TEXT] [--jobs N]``"""

from __future__ import annotations

import argparse
import sys

import msgspec

from deltarefit.testing.kill_matrix.cases import CASES, REDUCED
from deltarefit.testing.kill_matrix.matrix import run_matrix, table
from deltarefit.testing.kill_matrix.outcome import CaseResult


def main() -> int:
    """Play the matrix; exit code 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m deltarefit.testing.kill_matrix", description="Kill and freeze processes.")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--reduced", action="store_true", help="a few cases of each kind")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--jobs", type=int, default=4, help="cases at a time")
    parser.add_argument("--lease", type=float, default=2.0, help="the run's lease in seconds")
    chosen = parser.parse_args()
    cases = [case for case in (REDUCED if chosen.reduced else CASES) if chosen.only in case.name]

    def note(result: CaseResult) -> None:
        sys.stderr.write(f"{'ok    ' if result.ok else 'FAILED'} {result.seconds:5.1f} s  {result.case.name}\n")

    done = run_matrix(cases, jobs=chosen.jobs, lease_s=chosen.lease, note=note)
    if chosen.json:
        sys.stdout.write(msgspec.json.encode(done).decode() + "\n")
    else:
        sys.stdout.write(table(done.cases) + "\n")
        if done.kept:
            sys.stdout.write(f"logs of the failed cases: {done.kept}\n")
    return 0 if done.ok else 1


if __name__ == "__main__":
    sys.exit(main())
