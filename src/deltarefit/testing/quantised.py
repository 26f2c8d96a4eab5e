"""Tiny quantised Hugging Face checkpoints: real names, shapes, dtypes and settings, random codes.

The codes are no quantisation of anything. What engines do to them while and after loading does not depend on that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltarefit.errors import RejectedError
from deltarefit.testing.checkpoints import load_tensors

if TYPE_CHECKING:
    import torch

__all__ = ["SCHEMES", "next_codes", "write_quantised_checkpoint"]

_COMMON: Mapping[str, Any] = {
    "vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 512, "max_position_embeddings": 512, "dtype": "bfloat16", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dense": ("Qwen3Config", {}),
    "moe": ("Qwen3MoeConfig", {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2}),
    "mla": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4, "head_dim": None, "moe_intermediate_size": 256, "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 512,
            "q_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
}  # fmt: skip
"""Sizes that block scales of 128 x 128 and groups of 128 divide."""

Tensors = dict[str, "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class _Scheme:
    settings: Mapping[str, Any]
    """``quantization_config`` of the checkpoint."""
    tensors: Callable[[_Codes, int, int], Tensors]
    """What stands for a weight of [rows, columns], by the end of its name."""


class _Codes:
    """Random codes from a seed."""

    def __init__(self, seed: int) -> None:
        import torch

        self._torch = torch
        self._generator = torch.Generator().manual_seed(seed)

    def integers(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Any bits of an integer dtype."""
        info = self._torch.iinfo(getattr(self._torch, dtype))
        wide = self._torch.randint(info.min, info.max + 1, shape, generator=self._generator, dtype=self._torch.int64)
        return wide.to(getattr(self._torch, dtype))

    def fp8(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Finite e4m3 codes of either sign."""
        magnitude = self._torch.randint(0, 0x7F, shape, generator=self._generator, dtype=self._torch.uint8)
        sign = self._torch.randint(0, 2, shape, generator=self._generator, dtype=self._torch.uint8)
        return (magnitude | (sign << 7)).view(self._torch.float8_e4m3fn)

    def scales(self, shape: tuple[int, ...], dtype: str = "float32") -> torch.Tensor:
        """Small positive numbers."""
        return (self._torch.rand(shape, generator=self._generator) * 0.02 + 0.001).to(getattr(self._torch, dtype))


def _compressed(
    form: str, bits: int, kind: str, strategy: str, activations: Mapping[str, Any] | None, **more: Any
) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"], "config_groups": {"group_0": group},
    }  # fmt: skip


def _per_token(bits: int, kind: str) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True}


def _gptq(codes: _Codes, rows: int, columns: int) -> Tensors:
    import torch

    return {
        "qweight": codes.integers((columns // 8, rows), "int32"),
        "qzeros": torch.full((columns // 128, rows // 8), 0x77777777, dtype=torch.int32),
        "scales": codes.scales((columns // 128, rows), "bfloat16"),
        "g_idx": torch.arange(columns, dtype=torch.int32) // 128,
    }


def _int4(codes: _Codes, rows: int, columns: int) -> Tensors:
    import torch

    return {
        "weight_packed": codes.integers((rows, columns // 8), "int32"),
        "weight_scale": codes.scales((rows, columns // 128), "bfloat16"),
        "weight_shape": torch.tensor([rows, columns]),
    }


def _nvfp4(codes: _Codes, rows: int, columns: int) -> Tensors:
    import torch

    return {
        "weight_packed": codes.integers((rows, columns // 2), "uint8"),
        "weight_scale": codes.fp8((rows, columns // 16)).float().abs().to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([100.0]),
        "input_global_scale": torch.tensor([50.0]),
    }


SCHEMES: Mapping[str, Any] = {
    "fp8_block": _Scheme(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
         "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]},
        lambda codes, rows, columns: {
            "weight": codes.fp8((rows, columns)), "weight_scale_inv": codes.scales((-(-rows // 128), -(-columns // 128))),
        },
    ),
    "fp8_channel": _Scheme(
        _compressed("float-quantized", 8, "float", "channel", _per_token(8, "float")),
        lambda codes, rows, columns: {
            "weight": codes.fp8((rows, columns)), "weight_scale": codes.scales((rows, 1), "bfloat16"),
        },
    ),
    "int8_channel": _Scheme(
        _compressed("int-quantized", 8, "int", "channel", _per_token(8, "int")),
        lambda codes, rows, columns: {
            "weight": codes.integers((rows, columns), "int8"), "weight_scale": codes.scales((rows, 1), "bfloat16"),
        },
    ),
    "int4_group": _Scheme(_compressed("pack-quantized", 4, "int", "group", None, group_size=128), _int4),
    "gptq": _Scheme(
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False}, _gptq
    ),
    "awq": _Scheme(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        lambda codes, rows, columns: {
            "qweight": codes.integers((columns, rows // 8), "int32"),
            "qzeros": codes.integers((columns // 128, rows // 8), "int32"),
            "scales": codes.scales((columns // 128, rows), "bfloat16"),
        },
    ),
    "nvfp4": _Scheme(
        _compressed("nvfp4-pack-quantized", 4, "float", "tensor_group",
                    {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local", "group_size": 16,
                     "symmetric": True}, group_size=16),
        _nvfp4,
    ),
    "fp8_block_router": _Scheme(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        lambda codes, rows, columns: {
            "weight": codes.fp8((rows, columns)), "weight_scale_inv": codes.scales((-(-rows // 128), -(-columns // 128))),
        },
    ),
    "mxfp4": _Scheme(
        {"quant_method": "mxfp4",
         "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
        lambda codes, rows, columns: {},
    ),
}  # fmt: skip
"""What ``write_quantised_checkpoint`` knows. ``fp8_block_router`` fails to say that routers are not quantised."""


def write_quantised_checkpoint(directory: Path, scheme: str, kind: str = "dense", *, seed: int = 7) -> Path:
    """Write a checkpoint of two layers, its linear and expert weights replaced by random codes of a quantisation scheme.

    Args:
        directory: a new directory.
        scheme: one of ``SCHEMES``; ``mxfp4`` is always of kind ``gpt_oss``, with fused experts as blocks and scales.
        kind: ``dense``, ``moe``, ``mla`` or ``gpt_oss``.
        seed: of codes and of everything else.

    Raises:
        RejectedError: no such scheme or kind.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    if scheme not in SCHEMES or kind not in _KINDS:
        raise RejectedError(f"{scheme!r} of kind {kind!r}: expected one of {', '.join(SCHEMES)} and of {', '.join(_KINDS)}")
    class_name, changes = _KINDS[kind]
    config = getattr(transformers, class_name)(**{k: v for k, v in {**_COMMON, **changes}.items() if v is not None})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    codes, chosen = _Codes(seed), SCHEMES[scheme]
    replace = _fused_experts if scheme == "mxfp4" else _linear
    tensors: Tensors = {}
    for name, tensor in load_tensors(directory).items():
        tensors.update(replace(codes, chosen, name, tensor))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors", {"format": "pt"}
    )
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": dict(chosen.settings)}, indent=1))
    return directory


def _linear(codes: _Codes, scheme: _Scheme, name: str, tensor: torch.Tensor) -> Tensors:
    is_quantised = tensor.dim() == 2 and name.endswith(("_proj.weight", "_proj_with_mqa.weight"))
    if not is_quantised:
        return {name: tensor}
    rows, columns = tensor.shape
    return {
        name.removesuffix("weight") + end: codes_.contiguous() for end, codes_ in scheme.tensors(codes, rows, columns).items()
    }


def _fused_experts(codes: _Codes, scheme: _Scheme, name: str, tensor: torch.Tensor) -> Tensors:
    """Experts [experts, in, out] as blocks of 32 codes along the input, two to a byte, and a scale for each."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    count, inner, outer = tensor.shape
    return {
        f"{name}_blocks": codes.integers((count, outer, inner // 32, 16), "uint8"),
        f"{name}_scales": codes.integers((count, outer, inner // 32), "uint8"),
    }


def next_codes(tensors: Mapping[str, torch.Tensor], fraction: float, *, seed: int) -> Tensors:
    """A copy in which about ``fraction`` of each tensor's elements, at least one, have another lowest bit.

    Every quantised checkpoint stays one: no finite code becomes NaN, and index and shape tensors stay as they are.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    changed: Tensors = {}
    for name, tensor in tensors.items():
        fresh = tensor.clone()
        changed[name] = fresh
        if name.endswith(("g_idx", "weight_shape")) or not tensor.numel():
            continue
        count = max(1, int(tensor.numel() * fraction))
        flat = fresh.view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
        chosen = torch.randperm(tensor.numel(), generator=generator)[:count]
        if tensor.dtype == torch.float8_e4m3fn:
            chosen = chosen[(flat[chosen] & 0x7F) != 0x7E]
        flat[chosen] ^= 1
    return changed
