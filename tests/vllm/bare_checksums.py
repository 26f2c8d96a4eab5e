"""Prints what ``/weight_checker`` of a fresh one-rank server would say of a checkpoint, from a bare model.

A program of its own: ``python bare_checksums.py CHECKPOINT WORK``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_DIST_IDENT="checksums")

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests
from vllm.utils.torch_utils import set_default_torch_dtype

from deltarefit.testing.checkpoints import load_tensors


def main(checkpoint: str, work: str) -> None:
    config = EngineArgs(
        model=checkpoint, skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, dtype="bfloat16"
    ).create_engine_config()
    dtype = set_default_torch_dtype(config.model_config.dtype)
    with set_current_vllm_config(config), dtype, torch.device("cpu"), torch.no_grad():
        init_distributed_environment(1, 0, f"file://{work}/checksums-rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        model = initialize_model(vllm_config=config)
        model.load_weights(list(load_tensors(Path(checkpoint)).items()))
    digests = {f"dp0:pp0:pcp0:tp0:{name}": digest for name, digest in compute_tensor_digests(model).items()}
    sys.stdout.write(json.dumps(digests))


if __name__ == "__main__":
    main(*sys.argv[1:])
