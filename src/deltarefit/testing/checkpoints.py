"""Tiny random Hugging Face checkpoints, made offline from a seed: real architectures and real loaders, toy sizes.

They load in transformers (the trainer of the demo) and in vLLM and SGLang (the rollout side). The vocabulary has 250 tokens
on purpose: engines pad it, so padding rows and their fills are exercised. The sizes keep vLLM's CPU kernels happy: hidden
sizes are multiples of 32, and ``moe_intermediate_size`` is 64 where two tensor-parallel ranks are tested.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltarefit.errors import RejectedError

if TYPE_CHECKING:
    import torch

__all__ = [
    "ARCHITECTURES",
    "MORE_ARCHITECTURES",
    "load_tensors",
    "perturbed",
    "three_versions",
    "tiny_model",
    "write_checkpoint",
    "write_tiny_checkpoint",
]

_COMMON: Mapping[str, Any] = {
    "vocab_size": 250, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 128, "max_position_embeddings": 512, "dtype": "bfloat16", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_MOE: Mapping[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
_MAMBA2: Mapping[str, Any] = {
    "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4,
    "expand": 2, "chunk_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "n_shared_experts": 1, "mlp_hidden_act": "relu2",
}  # fmt: skip

# Head and state sizes below are the smallest that vLLM's CPU kernels take: 512 and 64 for MLA, 128 for gated delta nets.
_TABLE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3": ("Qwen3Config", {}),
    "qwen3_tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_MOE, "moe_intermediate_size": 64}),
    "nemotron_h": ("NemotronHConfig", {**_MAMBA2, "hybrid_override_pattern": "M*-M"}),
    "nemotron_h_moe": ("NemotronHConfig", {**_MAMBA2, "hybrid_override_pattern": "M*-E"}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4, "head_dim": None, "moe_intermediate_size": 32, "n_routed_experts": 8,
            "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
            "kv_lora_rank": 512, "q_lora_rank": 32, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
            "routed_scaling_factor": 1.0, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_MOE, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None, "intermediate_size": 32,
            "shared_intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
            "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
            "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16,
            "position_embedding_type": "nope",
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None, "intermediate_size": 64, "num_experts": 4,
            "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
            "expert_layer_offset": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 8,
        },
    ),
}  # fmt: skip

_MORE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3_moe_padded": ("Qwen3MoeConfig", {**_MOE, "moe_intermediate_size": 48}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": None}),
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True, "head_dim": None}),
    "gemma3": ("Gemma3TextConfig", {"tie_word_embeddings": True, "sliding_window": 64, "query_pre_attn_scalar": 32}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        },
    ),
    "phi3": ("Phi3Config", {"head_dim": None}),
}  # fmt: skip

ARCHITECTURES: tuple[str, ...] = tuple(_TABLE)
"""Names that ``tiny_model`` and ``write_tiny_checkpoint`` know and every suite runs."""
MORE_ARCHITECTURES: tuple[str, ...] = tuple(_MORE)
"""Further names that they know, for receivers: biases, other fusions, transposed experts, sliding windows."""


def tiny_model(architecture: str = "qwen3_moe", *, seed: int = 0) -> Any:
    """A transformers causal language model of a few hundred thousand bfloat16 parameters, the same for the same seed.

    Raises:
        RejectedError: the architecture is in neither ``ARCHITECTURES`` nor ``MORE_ARCHITECTURES``.
    """
    known = {**_TABLE, **_MORE}
    if architecture not in known:
        raise RejectedError(f"architecture {architecture!r}: expected one of {', '.join(known)}")
    import torch
    import transformers

    class_name, changes = known[architecture]
    values = {name: value for name, value in {**_COMMON, **changes}.items() if value is not None}
    config = getattr(transformers, class_name)(**values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    _fill(model, seed)
    return model.eval()


def _fill(model: Any, seed: int) -> None:
    """Plain initialisations are constants in places (norms, biases, A_log); here every tensor gets values that differ."""
    import torch

    generator = torch.Generator().manual_seed(seed + 1)
    named = [*model.named_parameters(), *(pair for pair in model.named_buffers() if "correction_bias" in pair[0])]
    with torch.no_grad():
        for name, tensor in named:
            noise = torch.randn(tensor.shape, generator=generator)
            if "A_log" in name:
                base = torch.arange(1, tensor.numel() + 1, dtype=torch.float32).log().reshape(tensor.shape)
                tensor.copy_(base + 0.01 * noise)
            elif "norm" in name and name.endswith("weight"):
                tensor.copy_(1 + 0.1 * noise)
            else:
                tensor.copy_(0.05 * noise)


def write_tiny_checkpoint(directory: Path, architecture: str = "qwen3_moe", *, seed: int = 0) -> Path:
    """Write ``config.json`` and ``model.safetensors`` of ``tiny_model`` into a new directory, with the hub's tensor names."""
    from transformers.utils import logging

    had_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        tiny_model(architecture, seed=seed).save_pretrained(directory)
    finally:
        if had_progress:
            logging.enable_progress_bar()
    return directory


def load_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint directory, by name, in name order."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(path))
    return dict(sorted(tensors.items()))


def write_checkpoint(directory: Path, tensors: Mapping[str, torch.Tensor], *, like: Path) -> Path:
    """Write ``tensors`` as a checkpoint directory that has the configuration files of ``like``."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    for path in like.glob("*.json"):
        if not path.name.endswith(".index.json"):
            shutil.copy(path, directory)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors", {"format": "pt"}
    )
    return directory


def perturbed(tensors: Mapping[str, torch.Tensor], fraction: float, *, seed: int) -> dict[str, torch.Tensor]:
    """A copy in which about ``fraction`` of each tensor's elements moved by some 2 %, and at least one element did.

    Small steps, as an optimizer takes them at the precision of bfloat16; the same seed gives the same bits.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in tensors.items():
        chosen = torch.rand(tensor.shape, generator=generator) < fraction
        step = 1 + 0.02 * torch.randn(tensor.shape, generator=generator)
        if not chosen.any() and chosen.numel():
            chosen.view(-1)[0] = True
            step.view(-1)[0] = 1.5
        changed[name] = torch.where(chosen, (tensor.float() * step).to(tensor.dtype), tensor)
    return changed


def three_versions(
    first: Mapping[str, torch.Tensor], change: Callable[..., Mapping[str, torch.Tensor]] = perturbed
) -> list[Mapping[str, torch.Tensor]]:
    """A checkpoint and two that follow it, each with 3 % of the one before changed by ``perturbed`` or the like."""
    second = change(first, 0.03, seed=1)
    return [first, second, change(second, 0.03, seed=2)]
