"""The source adapter for modules with DTensor parameters: FSDP2, hybrid sharding, tensor and expert parallelism, combined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deltarefit.canonical import Catalog
from deltarefit.errors import RejectedError
from deltarefit.integrations.fsdp.placements import MeshSplit, held_intervals
from deltarefit.integrations.torch.adapter import ExportOptions, TorchAdapter
from deltarefit.integrations.torch.collective import default_collective
from deltarefit.integrations.torch.export import Convert
from deltarefit.integrations.torch.local import Shard, is_sharded
from deltarefit.integrations.torch.manifest import as_catalog
from deltarefit.source import Collective, SourceAdapter

__all__ = ["FsdpAdapter", "fsdp_adapter", "shard_of", "source_adapter"]


class FsdpAdapter(TorchAdapter):
    """Facts about a module whose parameters are DTensors on meshes of the collective's ranks.

    Ranks that hold the same part of a parameter are taken to hold copies, because a parameter does not mention mesh dimensions
    along which it is not sharded; plain tensors are taken to be copies on every rank. The audit of replicas proves both.
    """

    def __init__(self, model: torch.nn.Module, collective: Collective, options: ExportOptions) -> None:
        super().__init__(model, collective, options, shard_of)

    def barrier(self) -> None:
        """See SourceAdapter. Frees parameters that FSDP2 still holds gathered, which are copies of its shards."""
        for module in self._model.modules():
            reshard = getattr(module, "reshard", None)
            if callable(reshard) and hasattr(module, "unshard"):
                reshard()
        super().barrier()


def shard_of(name: str, tensor: Any) -> Shard | None:
    """The part of a tensor that this rank holds; None for a plain tensor.

    Raises:
        RejectedError: the tensor is a partial sum, its placement is unknown, or this rank is not in its mesh.
    """
    if not is_sharded(tensor):
        return None
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RejectedError(
            f"tensor {name}: this rank is not in its mesh {mesh}; expected a model on the ranks that hold it only"
        )
    splits = [
        _split(name, placement, mesh.shape[place], coordinate[place]) for place, placement in enumerate(tensor.placements)
    ]
    return Shard(shape, held_intervals(name, shape, splits))


def _split(name: str, placement: Any, num_ranks: int, coordinate: int) -> MeshSplit:
    """A placement as facts. Strided shards are told by their own attribute: the class is private to torch."""
    if placement.is_replicate():
        return MeshSplit(num_ranks, coordinate, None)
    if placement.is_partial():
        raise RejectedError(
            f"tensor {name}: is a partial sum over {num_ranks} ranks; expected parameters that are sharded or replicated. "
            "Redistribute it first"
        )
    dim = getattr(placement, "dim", None)
    if not isinstance(dim, int):
        raise RejectedError(f"tensor {name}: unknown placement {placement!r}; expected Shard, Replicate or a strided shard")
    return MeshSplit(num_ranks, coordinate, dim, int(getattr(placement, "split_factor", 1)))


def fsdp_adapter(
    model: torch.nn.Module,
    *,
    collective: Collective | None = None,
    manifest: Catalog | Path | None = None,
    dtype: torch.dtype | None = None,
    export: Convert | None = None,
    export_by_layer: bool = False,
) -> SourceAdapter:
    """The adapter for a module with DTensor parameters.

    Args:
        model: After ``fully_shard``, ``parallelize_module`` or a transformers tensor-parallel plan.
        collective: The ranks of the default process group, which every mesh is part of; default: that group.
        manifest: See ExportOptions.
        dtype: See ExportOptions.
        export: See ExportOptions. Its inputs are gathered from their shards whenever one changed.
        export_by_layer: See ExportOptions.
    """
    options = ExportOptions(as_catalog(manifest), dtype, export, export_by_layer)
    return FsdpAdapter(model, collective or default_collective(), options)


source_adapter = fsdp_adapter
"""The name under which the publisher finds the adapter of whichever integration fits the model."""
