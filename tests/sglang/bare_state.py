"""Prints what SGLang's own load of a checkpoint leaves, as JSON.

A program of its own: ``python bare_state.py CONFIGURATION_DIRECTORY WEIGHTS_DIRECTORY WORK``.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from deltarefit.bits import dtype_name, logical_words
from deltarefit.testing.bare_sglang import BareSglang
from deltarefit.testing.checkpoints import load_tensors


def state(configuration: Path, weights: Path, work: Path) -> dict:
    bare = BareSglang(configuration, work / "rendezvous").loaded(load_tensors(weights))
    named = (*bare.named_parameters(remove_duplicate=False), *bare.named_buffers(remove_duplicate=False))
    return {
        name: [dtype_name(tensor.dtype), list(tensor.shape), hashlib.sha256(logical_words(tensor).tobytes()).hexdigest()]
        for name, tensor in named
    }


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(state(*map(Path, sys.argv[1:]))))
