"""Bare SGLang models, loaded and finished by SGLang's own code. One configuration a process."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deltarefit.cli.conformance.judge import Subject

__all__ = ["GROUPS", "subjects"]

_NAMES = ("qwen3", "qwen3_tied", "qwen3_moe", "deepseek_v3", "qwen3_next", "nemotron_h", "nemotron_h_moe", "granite_hybrid")
GROUPS: Sequence[tuple[str, Sequence[str]]] = tuple(("", (name,)) for name in _NAMES)
"""Which kernels are selected, and the models."""


def subjects(kernels: str, names: Sequence[str], work: Path) -> Iterator[Subject]:
    """The one case of a group."""
    del kernels
    from deltarefit.receiver import ReceiverSettings
    from deltarefit.testing.bare_sglang import BareSglang, write_sglang_checkpoint
    from deltarefit.testing.checkpoints import load_tensors, three_versions

    (name,) = names
    checkpoint = write_sglang_checkpoint(work / name, name)
    room: Any = importlib.import_module("deltarefit.integrations.sglang")
    bare = BareSglang(checkpoint, work / f"rendezvous-{name}", watch=room.note_constants)
    settings = ReceiverSettings(verify_writes=True)
    import sglang

    yield Subject(
        engine=f"SGLang {sglang.__version__}",
        model=name,
        quantisation="none",
        versions=three_versions(load_tensors(checkpoint)),
        served=bare.loaded,
        receiver=lambda model: room.rank_receiver(model, model.load_weights, settings=settings),
        state=_state,
    )


def _state(model: Any) -> dict[str, bytes]:
    """Parameters, buffers, and what SGLang derives from them outside of both."""
    from deltarefit.bits import logical_words

    rank: Any = importlib.import_module("deltarefit.integrations.sglang.rank")
    return {name: logical_words(tensor).tobytes() for name, tensor in rank.whole_state(model)}
