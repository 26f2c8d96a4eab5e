"""``python benchmarks/bench_kernels.py``: the same as ``deltarefit bench kernels --json``."""

from __future__ import annotations

import json

from deltarefit.testing.bench_kernels import run

if __name__ == "__main__":
    print(json.dumps(run()))
