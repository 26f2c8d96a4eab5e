"""Compare with vLLM's own sparse weight patches: the same changes, the same loaders, and what each leaves behind.

vLLM fills the unchanged positions of a checkpoint tensor with NaN, patches ``torch.Tensor.copy_`` and calls ``load_weights``.
Loaders that compose, assign through ``setitem`` or copy on another way are outside its contract, and nothing notices.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deltarefit.bits import logical_words, spec_of
from deltarefit.canonical import Catalog
from deltarefit.receiver import RankReceiver
from deltarefit.testing.bare_vllm import ENVIRONMENT, BareVllm
from deltarefit.testing.checkpoints import load_tensors, perturbed, write_tiny_checkpoint
from deltarefit.testing.oracle import delta_payload, differing, plan_for, raw_state

__all__ = ["ARCHITECTURES", "run"]

ARCHITECTURES = ("qwen3_moe", "deepseek_v3", "nemotron_h", "granite_hybrid", "qwen3_next", "jamba")
"""A mixture of experts first: vLLM makes its expert group for the first configuration only."""
_CHANGE_SHARE = 0.03


def run(architectures: Sequence[str] = ARCHITECTURES) -> dict[str, Any]:
    """Refit tiny models both ways.

    Returns:
        ``{"rows": [...]}`` with architecture, path (``deltarefit`` or ``vllm sparse``), bit_equal, and wrong: parameters and
        buffers that differ from a dense reload.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        bare = BareVllm(Path(work) / "rendezvous")
        for architecture in architectures:
            checkpoint = write_tiny_checkpoint(Path(work) / architecture, architecture)
            old = load_tensors(checkpoint)
            new = perturbed(old, _CHANGE_SHARE, seed=7)
            config = bare.configure(checkpoint)
            fresh = raw_state(bare.build(config, new))
            for path, refit in (("deltarefit", _ours), ("vllm sparse", _theirs)):
                model = bare.build(config, old)
                refit(config, model, old, new)
                wrong = differing(raw_state(model), fresh)
                rows.append({"architecture": architecture, "path": path, "bit_equal": not wrong, "wrong": wrong})
    return {"rows": rows}


def _ours(config: Any, model: Any, old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> None:
    catalog = Catalog(spec_of(name, tensor) for name, tensor in old.items())
    receiver = RankReceiver(model, lambda weights: BareVllm.load(config, model, weights))
    plan = plan_for([receiver.prewarm(catalog)], catalog)
    receiver.prepare(plan)
    payload = delta_payload(plan, old, new)
    if payload is not None:
        receiver.apply(payload)
    receiver.synchronize()


def _theirs(config: Any, model: Any, old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    patches = []
    for name, tensor in new.items():
        changed = torch.from_numpy((logical_words(tensor) != logical_words(old[name])).nonzero()[0])
        if changed.numel():
            values = tensor.reshape(-1)[changed]
            patches.append(CheckpointWeightPatch(name, tuple(tensor.shape), tensor.dtype, values, changed))
    with set_current_vllm_config(config):
        load_checkpoint_weight_patches(model, patches)
