"""Codec tables as JSON: ``python benchmarks/bench_codec.py``. The same as ``deltarefit bench codec --json``."""

import json
import sys

from deltarefit.testing import bench_codec

if __name__ == "__main__":
    print(json.dumps(bench_codec.run(progress=lambda text: print(text, file=sys.stderr)), indent=1))
