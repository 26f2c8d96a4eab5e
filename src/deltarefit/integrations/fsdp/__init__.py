"""Sources in PyTorch DTensors: FSDP2, hybrid sharding, tensor parallelism, expert parallelism and their combinations.

May import everything below ``runtime``, torch and the plain torch integration, whose names and exports it shares.
"""

from __future__ import annotations

from deltarefit.integrations.fsdp.adapter import FsdpAdapter, fsdp_adapter, shard_of, source_adapter
from deltarefit.integrations.fsdp.placements import MeshSplit, held_intervals
from deltarefit.integrations.torch.collective import TorchCollective, default_collective
from deltarefit.integrations.torch.steps import write_guard

SOURCE_OPTIONS = ("manifest", "export", "export_by_layer")
"""Arguments of Publisher that ``source_adapter`` takes."""

__all__ = [
    "SOURCE_OPTIONS",
    "FsdpAdapter",
    "MeshSplit",
    "TorchCollective",
    "default_collective",
    "fsdp_adapter",
    "held_intervals",
    "shard_of",
    "source_adapter",
    "write_guard",
]
