"""Layouts that are tested with real Megatron and recorded for machines without it, and their checkpoints."""

import hashlib
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from deltarefit.canonical import Catalog, TensorSpec

RECORDED = Path(__file__).parent / "recorded"


@dataclass(frozen=True)
class Case:
    """A tiny model on so many ranks."""

    architecture: str
    world_size: int
    sizes: dict = field(default_factory=dict)
    is_hybrid: bool = False
    settings: dict = field(default_factory=dict)


def _sizes(*, tp=1, pp=1, ep=1, etp=1):
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    }


CASES = {
    "dense_tp2_pp2_padded": Case(
        "qwen3", 4, _sizes(tp=2, pp=2), settings={"should_pad_vocab": True, "make_vocab_size_divisible_by": 64}
    ),
    "tied_pp2": Case("qwen3_tied", 2, _sizes(pp=2)),
    "biases_tp2": Case("qwen2", 2, _sizes(tp=2)),
    "hook_tp2": Case("llama", 2, _sizes(tp=2)),
    "experts_tp2_ep2_etp2_dp2": Case("qwen3_moe", 4, _sizes(tp=2, ep=2, etp=2)),
    "experts_ep2_dp2": Case("qwen3_moe", 2, _sizes(ep=2)),
    "hybrid_tp2": Case("nemotron_h", 2, _sizes(tp=2), is_hybrid=True),
    "hybrid_experts": Case("nemotron_h_moe", 1, is_hybrid=True),
    "converted_tp2_ep2": Case("gpt_oss", 2, _sizes(tp=2, ep=2)),
}


def canonical_words(spec, generation=0):
    """Finite bfloat16 numbers that tell the elements of all tensors apart as well as 16 bits can."""
    rng = np.random.default_rng([zlib.crc32(spec.name.encode()), generation])
    return (rng.integers(0, 2**15, spec.num_elements) % 0x0700 + 0x3C00 + (rng.integers(0, 2, spec.num_elements) << 15)).astype(
        np.uint16
    )


def digest(words):
    return hashlib.blake2b(np.ascontiguousarray(words).tobytes(), digest_size=12).hexdigest()


def read_recorded(name):
    data = json.loads((RECORDED / f"{name}.json").read_text())
    manifest = Catalog(TensorSpec(tensor, dtype, tuple(shape)) for tensor, (dtype, shape) in data["manifest"].items())
    return manifest, data["ranks"]


def write_case_checkpoint(case, directory):
    """The architecture's tiny checkpoint with canonical words in it, and a configuration that older transformers read too."""
    import torch
    from safetensors.torch import load_file, save_file

    from deltarefit.bits import tensor_from_words
    from deltarefit.testing.checkpoints import write_tiny_checkpoint

    write_tiny_checkpoint(directory, case.architecture)
    path = directory / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        assert tensor.dtype is torch.bfloat16
        name = name.replace("backbone.embedding.", "backbone.embeddings.")  # as published checkpoints and Bridge have it
        spec = TensorSpec(name, "BF16", tuple(tensor.shape))
        tensors[name] = tensor_from_words(canonical_words(spec), spec)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    kinds = {"full_attention": "attention", "linear_attention": "mamba"}
    for key in ("layers_block_type", "mtp_layers_block_type"):
        if key in config:
            config[key] = [kinds.get(kind, kind) for kind in config[key]]
    (directory / "config.json").write_text(json.dumps(config))
