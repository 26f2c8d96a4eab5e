"""Plain torch: transformers models behind a loader that fuses and stacks as engines do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deltarefit.cli.conformance.judge import Subject, Weights

__all__ = ["GROUPS", "subjects"]

GROUPS: Sequence[tuple[str, Sequence[str]]] = (("", ("qwen3", "qwen3_tied", "qwen3_moe")),)
"""Which kernels are selected, and the models; each group runs in a process of its own."""


def subjects(kernels: str, names: Sequence[str], work: Path) -> Iterator[Subject]:
    """The cases of one group."""
    del kernels
    import torch

    from deltarefit.testing.checkpoints import load_tensors, three_versions, write_tiny_checkpoint

    for name in names:
        checkpoint = write_tiny_checkpoint(work / name, name)
        yield Subject(
            engine=f"torch {torch.__version__.partition('+')[0]}",
            model=name,
            quantisation="none",
            versions=three_versions(load_tensors(checkpoint)),
            served=lambda weights, at=checkpoint: _loaded(at, weights),  # type: ignore[misc]
            receiver=_receiver,
            state=_state,
        )


def _loaded(checkpoint: Path, weights: Weights) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from deltarefit.cli.demo.torch_engine import FusingLoader

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint), dtype=torch.bfloat16)
    FusingLoader(model)(weights.items())
    return model


def _receiver(model: Any) -> Any:
    from deltarefit.cli.demo.torch_engine import FusingLoader
    from deltarefit.receiver import RankReceiver, ReceiverSettings

    return RankReceiver(model, FusingLoader(model), settings=ReceiverSettings(verify_writes=True))


def _state(model: Any) -> dict[str, bytes]:
    from deltarefit.testing.oracle import raw_state

    return raw_state(model)
