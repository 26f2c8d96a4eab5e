"""What Megatron Bridge says about one parameter, as plain values.

Facts are read from a ``WeightConversionTask`` by attribute, so that nothing here imports Megatron, and recorded facts of real
jobs can be tested anywhere. Mappings are told by their exact class: a subclass may change values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from deltarefit.bits import dtype_name
from deltarefit.errors import RejectedError

__all__ = ["TaskFacts", "facts_of"]

_EXPERT = re.compile(r"\.local_experts\.(\d+)\.|\.(?:weight|bias)(\d+)$")
_RESOLVED = {"column": "ColumnParallelMapping", "row": "RowParallelMapping", "replicated": "ReplicatedMapping"}


class TaskFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter or persistent buffer that a rank holds, and what its mapping does to it."""

    name: str
    """Of the parameter in the whole model: equal on all ranks that hold it or a shard of it."""
    local_name: str
    """In this rank's model chunk, without wrappers."""
    chunk: int = 0
    """Which of this rank's model chunks holds it."""
    kind: str
    """Class of the mapping; of an AutoMapping, the one that it resolves to for its module."""
    targets: dict[str, str]
    """Checkpoint tensors by their role in the mapping; the role is empty if there is one only."""
    shape: tuple[int, ...]
    """Of this rank's part."""
    dtype: str
    tp_rank: int = 0
    tp_size: int = 1
    """Of the mapping's own tensor-parallel group: the expert one for experts."""
    heads: int = 0
    groups: int = 0
    head_size: int = 0
    """Attention heads, query groups and head size, where query, key and value are fused."""
    has_output_gate: bool = False
    """Whether each query head brings a gate of its own size, behind the group's queries here and behind the head there."""
    components: tuple[int, ...] = ()
    """Rows of the parts that are laid end to end in the whole tensor, each of which is sharded by itself."""
    permutation: tuple[int, ...] = ()
    """The checkpoint's dimension ``i`` is this one of the gathered parameter; empty if they are the same."""
    is_row: bool = False
    """Whether a stacked expert is sharded along its columns, as row-parallel layers are."""
    expert: int = -1
    """Number of the expert, where the checkpoint stacks all experts in one tensor."""
    may_transpose: bool = False
    """Whether the last two dimensions are exchanged if the checkpoint's shape says so."""
    refusal: str = ""
    """Why this parameter cannot be sent directly; empty if it can."""


Geometry = dict[str, Any]
_Reader = Callable[[Any, Any], Geometry]
"""From mapping and model configuration to the facts that this class of mapping needs."""


def facts_of(task: Any) -> TaskFacts:
    """Facts of a WeightConversionTask whose parameter this rank holds.

    Raises:
        RejectedError: its tensor has no fixed-width dtype, or is a DTensor.
    """
    mapping, tensor = task.mapping, task.param_weight
    if hasattr(tensor, "placements") and hasattr(tensor, "device_mesh"):
        raise RejectedError(
            f"parameter {task.global_param_name} is a DTensor: Megatron-FSDP shards are not mapped. Train with Megatron's own "
            "data parallelism, or write conversion tasks by hand"
        )
    kind, geometry, refusal = _geometry(task)
    targets = mapping.hf_param
    return TaskFacts(
        name=task.global_param_name,
        local_name=task.param_name,
        chunk=task.vp_stage or 0,
        kind=kind,
        targets=dict(targets) if isinstance(targets, Mapping) else {"": str(targets)},
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        tp_rank=int(mapping.tp_rank),
        tp_size=int(mapping.tp_size),
        refusal=refusal,
        **geometry,
    )


def _geometry(task: Any) -> tuple[str, Geometry, str]:
    """Class of the mapping, what it needs to know, and why it cannot be used."""
    mapping, module = task.mapping, task.megatron_module
    kind = type(mapping).__name__
    if task.export_hook is not None:
        return kind, {}, "an export hook may change it"
    reader = _READERS.get(kind)
    if reader is None:
        return kind, {}, f"{kind} is not a rearrangement of bits that is known here"
    geometry = reader(mapping, module.config)
    if kind == "AutoMapping":
        permutation = tuple(mapping.permute_dims or ())
        return _resolved(mapping, module), {"permutation": permutation}, ""
    if kind in _EXPERT_KINDS and (geometry["expert"] < 0 or mapping.permute_dims):
        return kind, {}, "its name has no expert number, or its dimensions are permuted"
    inner = getattr(mapping, "_tp_mapping", None)
    if type(inner).__name__ == "AutoMapping" and _resolved(inner, module) != "ColumnParallelMapping":
        return kind, {}, f"it is fused over ranks as {_resolved(inner, module)}, expected rows"
    if kind == "FusedExpertMapping":
        geometry["is_row"] = _resolved(mapping, module) == "RowParallelMapping"
    return kind, geometry, ""


def _resolved(mapping: Any, module: Any) -> str:
    """What an AutoMapping does to this module: Bridge itself decides, by the module's class and attributes."""
    return _RESOLVED[mapping._detect_parallelism_type(module)]


def _plain(mapping: Any, config: Any) -> Geometry:
    del mapping, config
    return {}


def _attention(mapping: Any, config: Any) -> Geometry:
    del mapping
    heads = int(config.num_attention_heads)
    return {
        "heads": heads,
        "groups": int(config.num_query_groups or heads),
        "head_size": int(config.kv_channels or config.hidden_size // heads),
        "has_output_gate": bool(getattr(config, "attention_output_gate", False)),
    }


def _state_space(config: Any) -> tuple[int, int]:
    """Inner width and width of all states of a Mamba layer."""
    inner = int(config.mamba_num_heads * config.mamba_head_dim)
    return inner, int(config.mamba_state_dim * config.mamba_num_groups)


def _mamba_projection(mapping: Any, config: Any) -> Geometry:
    del mapping
    inner, states = _state_space(config)
    return {"components": (inner, inner, states, states, int(config.mamba_num_heads))}


def _mamba_convolution(mapping: Any, config: Any) -> Geometry:
    del mapping
    inner, states = _state_space(config)
    return {"components": (inner, states, states)}


def _delta_net_convolution(mapping: Any, config: Any) -> Geometry:
    del mapping
    keys = int(config.linear_key_head_dim * config.linear_num_key_heads)
    return {"components": (keys, keys, int(config.linear_value_head_dim * config.linear_num_value_heads))}


def _stacked_expert(mapping: Any, config: Any) -> Geometry:
    del config
    found = _EXPERT.search(mapping.megatron_param)
    return {
        "expert": int(found[1] or found[2]) if found else -1,
        "may_transpose": bool(mapping.transpose_on_export),
    }


_EXPERT_KINDS = frozenset(("FusedExpertMapping", "FusedGatedExpertMapping"))
_READERS: Mapping[str, _Reader] = {
    "DirectMapping": _plain,
    "ReplicatedMapping": _plain,
    "ColumnParallelMapping": _plain,
    "RowParallelMapping": _plain,
    "AutoMapping": _plain,
    "GatedMLPMapping": _plain,
    "QKVMapping": _attention,
    "KVMapping": _attention,
    "ConcatenatedQKVMapping": _attention,
    "MambaInProjMapping": _mamba_projection,
    "MambaConv1dMapping": _mamba_convolution,
    "GDNConv1dMapping": _delta_net_convolution,
    "FusedExpertMapping": _stacked_expert,
    "FusedGatedExpertMapping": _stacked_expert,
}
"""Classes of Megatron Bridge 0.6 that only rearrange bits."""
