"""Prints what ``/weight_checker`` of a fresh one-rank server would say of a checkpoint, from a bare model packed as a server's.

A program of its own: ``python bare_checksums.py CHECKPOINT WORK``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from deltarefit.testing.bare_vllm import ENVIRONMENT, BareVllm
from deltarefit.testing.checkpoints import load_tensors


def main(checkpoint: Path, work: Path) -> None:
    from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests

    from deltarefit.integrations.vllm.plain_linears import plain_linears

    bare = BareVllm(work / "checksums-rendezvous")
    with plain_linears():
        model = bare.served(bare.configure(checkpoint), load_tensors(checkpoint))
    digests = {f"dp0:pp0:pcp0:tp0:{name}": digest for name, digest in compute_tensor_digests(model).items()}
    sys.stdout.write(json.dumps(digests))


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
