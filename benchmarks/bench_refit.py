"""Refits over a shaped link, as JSON: ``python benchmarks/bench_refit.py``. The same as ``deltarefit bench refit --json``."""

import json
import sys

from deltarefit.testing.bench_refit import run

if __name__ == "__main__":
    print(json.dumps(run(progress=lambda text: print(text, file=sys.stderr)), indent=1))
