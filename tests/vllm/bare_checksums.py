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
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests

    from deltarefit.integrations.vllm.plain_linears import plain_linears

    bare = BareVllm(work / "checksums-rendezvous")
    config = bare.configure(checkpoint)
    model = bare.build(config, load_tensors(checkpoint))
    with set_current_vllm_config(config), plain_linears():
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    digests = {f"dp0:pp0:pcp0:tp0:{name}": digest for name, digest in compute_tensor_digests(model).items()}
    sys.stdout.write(json.dumps(digests))


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
