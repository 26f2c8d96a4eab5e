"""Compare with vLLM's own sparse weight patches: the same changes, the same loaders, and what each leaves behind.

vLLM fills the unchanged positions of a checkpoint tensor with NaN, patches ``torch.Tensor.copy_`` and calls ``load_weights``.
Loaders that compose, assign through ``setitem`` or copy on another way are outside its contract, and nothing notices.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltarefit.bits import logical_words, spec_of
from deltarefit.canonical import Catalog, Words
from deltarefit.errors import RejectedError
from deltarefit.receiver import RankReceiver
from deltarefit.runtime.clock import Clock, SystemClock
from deltarefit.testing.bare_vllm import ENVIRONMENT, BareVllm
from deltarefit.testing.checkpoints import load_tensors, perturbed, write_tiny_checkpoint
from deltarefit.testing.oracle import delta_payload, plan_for

__all__ = ["ARCHITECTURES", "run"]

ARCHITECTURES = ("qwen3_moe", "deepseek_v3", "nemotron_h", "granite_hybrid", "qwen3_next", "jamba")
"""A mixture of experts first: vLLM makes its expert group for the first configuration only."""
_CHANGE_SHARE = 0.03
_Weights = Mapping[str, torch.Tensor]
_Refit = Callable[[Any, Any, _Weights, _Weights], Callable[[], None]]
"""Configuration, model, old and new weights; returns what applies the changes."""


def run(architectures: Sequence[str] = ARCHITECTURES, *, rounds: int = 3, clock: Clock | None = None) -> dict[str, Any]:
    """Refit tiny models both ways.

    Args:
        architectures: names that ``testing.checkpoints`` knows, a mixture of experts first.
        rounds: how often each refit is timed, each time on a fresh model.
        clock: time; default: the machine's.

    Returns:
        ``{"rows": [...]}`` with architecture, path (``deltarefit`` or ``vllm sparse``), bit_equal, wrong (parameters and
        buffers that differ from a dense reload), wrong_elements (of these, what differs), changed (elements of the checkpoint)
        and median_s (applying what arrived; deltarefit's prewarm is not in it).

    Raises:
        RejectedError: vLLM is not installed, or too old.
    """
    if importlib.util.find_spec("vllm") is None:
        raise RejectedError("bench peers: expected vLLM 0.32 or later in this environment")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        bare = BareVllm(Path(work) / "rendezvous")
        for architecture in architectures:
            checkpoint = write_tiny_checkpoint(Path(work) / architecture, architecture)
            old = load_tensors(checkpoint)
            bench = _Bench(bare, bare.configure(checkpoint), old, perturbed(old, _CHANGE_SHARE, seed=7), clock or SystemClock())
            for path, refit in (("deltarefit", _ours), ("vllm sparse", _theirs)):
                rows.append({"architecture": architecture, "path": path, **bench.measure(refit, rounds)})
    return {"rows": rows}


class _Bench:
    """One architecture, and what a dense reload of the new weights leaves."""

    def __init__(self, bare: BareVllm, config: Any, old: _Weights, new: _Weights, clock: Clock) -> None:
        self._bare = bare
        self._config = config
        self._old = old
        self._new = new
        self._clock = clock
        self._fresh = _words(bare.build(config, new))

    def measure(self, refit: _Refit, rounds: int) -> dict[str, Any]:
        seconds = []
        for _ in range(rounds):
            model = self._bare.build(self._config, self._old)
            apply = refit(self._config, model, self._old, self._new)
            start_s = self._clock.monotonic_s()
            apply()
            seconds.append(self._clock.monotonic_s() - start_s)
        got = _words(model)
        counts = {name: int(np.count_nonzero(got[name] != words)) for name, words in self._fresh.items()}
        wrong = sorted(name for name, count in counts.items() if count)
        return {
            "bit_equal": not wrong,
            "wrong": wrong,
            "wrong_elements": sum(counts.values()),
            "changed": sum(int((logical_words(t) != logical_words(self._old[n])).sum()) for n, t in self._new.items()),
            "median_s": statistics.median(seconds),
        }


def _words(model: Any) -> dict[str, Words]:
    """Stored bits of every parameter and buffer, each storage under its first name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: logical_words(tensor).copy() for name, tensor in named}


def _ours(config: Any, model: Any, old: _Weights, new: _Weights) -> Callable[[], None]:
    catalog = Catalog(spec_of(name, tensor) for name, tensor in old.items())
    receiver = RankReceiver(model, lambda weights: BareVllm.load(config, model, weights))
    plan = plan_for([receiver.prewarm(catalog)], catalog)
    receiver.prepare(plan)
    payload = delta_payload(plan, old, new)

    def apply() -> None:
        if payload is not None:
            receiver.apply(payload)
        receiver.synchronize()

    return apply


def _theirs(config: Any, model: Any, old: _Weights, new: _Weights) -> Callable[[], None]:
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

    def apply() -> None:
        with set_current_vllm_config(config):
            load_checkpoint_weight_patches(model, patches)

    return apply
