"""Layouts of transformers models over meshes, on any rank of a job, in one process.

torch's fake process group places shards without communicating, so each rank's model is made in turn.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from deltarefit.testing.checkpoints import tiny_model

ARCHITECTURE = {"fsdp_columns": "qwen3", "tp": "qwen3", "tp_fsdp": "qwen3", "tied_fsdp": "qwen3_tied"}
"""Of layouts that do not stand for a mixture of experts."""
PLAN = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1, "embed_tokens": 0}


@contextlib.contextmanager
def rank_of(world_size, rank):
    """This process as one rank of a job."""
    _clear_sharding_prop_cache()  # it remembers another rank's mesh, which compares equal
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def blocks(model):
    return [*model.model.layers, model]


def fsdp(model, mesh):
    for block in blocks(model):
        fully_shard(block, mesh=mesh)


def shard_by(model, mesh, placements_of):
    """Replace parameters by DTensors, cut locally."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = placements_of(module, name, parameter)
            if placements is not None:
                made = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
                setattr(module, name, nn.Parameter(made))
    return model


def tensor_parallel(model, mesh):
    names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}

    def placements(module, name, parameter):
        dim = PLAN.get(names[module])
        return None if dim is None or name != "weight" else [Shard(dim)]

    return shard_by(model, mesh, placements)


def expert_parallel(model, mesh):
    return shard_by(model, mesh, lambda module, name, parameter: [Shard(0)] if parameter.ndim == 3 else None)


def fused_tensor_parallel(model, mesh):
    """What transformers' own plans do with stacked experts: gate and up rows of every rank, inner columns of down."""

    def placements(module, name, parameter):
        return {"gate_up_proj": [_StridedShard(1, split_factor=2)], "down_proj": [Shard(2)]}.get(name)

    return shard_by(model, mesh, placements)


def make(layout, world_size, model=None):
    """A model in a layout, on the rank that this process is; the layout's own tiny model if none is given."""
    mesh = init_device_mesh
    model = model if model is not None else tiny_model(ARCHITECTURE.get(layout, "qwen3_moe"))
    match layout:
        case "fsdp" | "tied_fsdp":
            fsdp(model, mesh("cpu", (world_size,)))
        case "fsdp_wrapped":
            for place, block in enumerate(model.model.layers):
                model.model.layers[place] = torch.compile(checkpoint_wrapper(block), backend="eager")
            fsdp(model, mesh("cpu", (world_size,)))
        case "hsdp":
            fsdp(model, mesh("cpu", (2, world_size // 2), mesh_dim_names=("copies", "shards")))
        case "fsdp_columns":
            for block in blocks(model):
                fully_shard(
                    block, mesh=mesh("cpu", (world_size,)), shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else Shard(0)
                )
        case "tp":
            tensor_parallel(model, mesh("cpu", (world_size,)))
        case "tp_fsdp":
            both = mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
            tensor_parallel(model, both["tp"])
            fsdp(model, both["dp"])
        case "ep":
            expert_parallel(model, mesh("cpu", (world_size,)))
        case "ep_fsdp":
            both = mesh("cpu", (world_size // 2, 2), mesh_dim_names=("ep", "fsdp"))
            shard_by(model, both, lambda module, name, p: [Shard(0), Shard(1)] if p.ndim == 3 else [Replicate(), Shard(0)])
        case "fused_tp":
            fused_tensor_parallel(model, mesh("cpu", (world_size,)))
    return model
