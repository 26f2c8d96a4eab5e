"""Bare vLLM models, finished by vLLM's post-load steps: packed, swizzled and quantised as an engine would serve them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltarefit.cli.conformance.judge import GroupLeftOutError, Subject

if TYPE_CHECKING:
    from deltarefit.testing.bare_vllm import BareVllm

__all__ = ["GROUPS", "subjects"]

GROUPS: Sequence[tuple[str, Sequence[str]]] = (
    (
        "",
        (
            "qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next", "nemotron_h", "granite_hybrid",
            "fp8_channel-dense", "int4_group-dense", "gptq-dense", "awq-dense", "int8_channel-dense",
        ),
    ),
    (
        "AMX",
        (
            "fp8_block-dense", "fp8_block-moe", "fp8_block-mla", "int8_channel-moe", "int4_group-moe", "gptq-moe", "awq-moe",
            "mxfp4-gpt_oss", "fp8_block_router-moe",
        ),
    ),
    ("CUDA", ("fp8_block-dense", "fp8_channel-dense", "nvfp4-dense")),
)  # fmt: skip
"""Which kernels are selected, and the models: an architecture, or a quantisation and a kind of model."""
_MODELS = {"dense": "qwen3", "moe": "qwen3_moe", "mla": "deepseek_v3", "gpt_oss": "gpt_oss"}


def subjects(kernels: str, names: Sequence[str], work: Path) -> Iterator[Subject]:
    """The cases of one group.

    Raises:
        GroupLeftOutError: this machine cannot build them.
    """
    from deltarefit.testing.bare_vllm import BareVllm, missing_kernels, select_kernels
    from deltarefit.testing.checkpoints import write_tiny_checkpoint

    if missing := missing_kernels(kernels.lower()):
        raise GroupLeftOutError(missing)
    select_kernels(kernels.lower() or "plain")
    bare = BareVllm(work / "rendezvous")
    bare.configure(write_tiny_checkpoint(work / "first", "qwen3_moe"))
    for name in names:
        yield _subject(bare, name, kernels, work)


def _subject(bare: BareVllm, name: str, kernels: str, work: Path) -> Subject:
    import torch

    import vllm
    from deltarefit.receiver import RankReceiver, ReceiverSettings
    from deltarefit.testing.bare_vllm import everything
    from deltarefit.testing.checkpoints import load_tensors, perturbed, three_versions, write_tiny_checkpoint
    from deltarefit.testing.quantised import next_codes, write_quantised_checkpoint

    scheme, _, kind = name.partition("-")
    checkpoint = write_quantised_checkpoint(work / name, scheme, kind) if kind else write_tiny_checkpoint(work / name, name)
    config, steps = bare.configure(checkpoint), _after_load()
    settings = ReceiverSettings(may_ignore=steps.IGNORED, may_lack=steps.UNFILLED, verify_writes=True)

    def receiver(model: Any) -> RankReceiver:
        after_load = steps.VllmAfterLoad(config, torch.device("cpu"))
        return RankReceiver(model, model.load_weights, settings=settings, after_load=after_load)

    return Subject(
        engine=f"vLLM {vllm.__version__.partition('+')[0]}",
        model=_MODELS[kind] if kind else name,
        quantisation=scheme if kind else "none",
        kernels=f"{kernels} kernels" if kernels else "",
        versions=three_versions(load_tensors(checkpoint), next_codes if kind else perturbed),
        served=lambda weights: bare.served(config, weights),
        receiver=receiver,
        state=everything,
    )


def _after_load() -> Any:
    """Integrations are found by name."""
    return importlib.import_module("deltarefit.integrations.vllm.after_load")
