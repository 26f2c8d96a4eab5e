"""The source adapter for Megatron models: any tensor, expert, pipeline and data parallelism, by Megatron Bridge's own tasks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deltarefit.canonical import Catalog
from deltarefit.errors import RejectedError
from deltarefit.integrations.megatron.reading import LocalTasks, read_tasks, unwrapped
from deltarefit.integrations.megatron.residual import BridgeConverter, Converting
from deltarefit.integrations.torch.collective import default_collective
from deltarefit.integrations.torch.local import LocalTensor, Shard, local_tensors
from deltarefit.integrations.torch.manifest import as_catalog
from deltarefit.integrations.torch.tasks import tasks_of
from deltarefit.source import Collective, ConversionTask, SourceAdapter, together

__all__ = ["MegatronAdapter", "megatron_adapter", "source_adapter"]

_LOG = logging.getLogger(__name__)


class MegatronAdapter:
    """Facts about one rank's chunks of a Megatron model, in the names of the checkpoint that its bridge knows.

    Ranks that hold the same part of a parameter are taken to hold copies: over data, context and expert-data parallelism, and
    of replicated parameters over tensor and expert parallelism. The audit of replicas proves it.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], bridge: Any, collective: Collective, manifest: Catalog) -> None:
        """Read Bridge's tasks. Every rank must make its adapter together with the others.

        Raises:
            RejectedError: a parameter cannot be mapped, on any rank.
        """
        self._chunks = tuple(chunks)
        self._bridge = bridge
        self._collective = collective
        self._manifest = manifest
        self._read: LocalTasks = together(
            collective, "reading Megatron Bridge's conversion tasks", lambda: read_tasks(bridge, self._chunks, manifest)
        )
        self._converting = Converting.agree(self._read, collective, manifest)
        self._tensors = together(collective, "reading the model's tensors", self._local_tensors)
        if self.unmapped:
            _LOG.warning(
                "%d parameters of rank %d are in no tensor of the checkpoint and are never sent: %s",
                len(self.unmapped),
                collective.rank,
                ", ".join(sorted(self.unmapped)[:5]),
            )

    @property
    def unmapped(self) -> Mapping[str, str]:
        """Parameters and persistent buffers of this rank that no checkpoint tensor comes from, with the reason.

        A dense reload of the checkpoint would lose them just the same.
        """
        return self._read.unmapped

    def catalog(self) -> Catalog:
        """See SourceAdapter."""
        return self._manifest

    def tasks(self) -> Sequence[ConversionTask]:
        """See SourceAdapter."""
        found: dict[str, ConversionTask] = {}
        for place, held in self._read.held.items():
            if place in self._converting.places:
                continue
            local = self._tensors[held.facts.chunk, held.facts.local_name]
            for name, pieces in ((name, pieces) for geometry in held.mapped for name, pieces in geometry.pieces.items()):
                key = f"{name}<{held.facts.name}"
                tasks = tasks_of(key, self._manifest[name], local, pieces, self._collective.world_size)
                found.update((task.key, task) for task in tasks)
        return tuple(found.values())

    def residual(self) -> BridgeConverter | None:
        """See ResidualSource."""
        if not self._converting.names:
            return None
        return BridgeConverter(
            self._bridge, self._chunks, self._read, self._converting, self._tensors, self._collective, self._manifest
        )

    def barrier(self) -> None:
        """See SourceAdapter. Finishes parameter gathers that Megatron overlaps with the next forward pass."""
        for chunk in self._chunks:
            if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
                wrapper: Any = chunk
                wrapper.start_param_sync(force_sync=True)
        together(self._collective, "reading the model", self._settle)

    def _settle(self) -> None:
        for device in {tensor.live().device for tensor in self._tensors.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def _local_tensors(self) -> dict[tuple[int, str], LocalTensor]:
        """The tensors of all tasks, by chunk and name, each with the part of the gathered parameter that this rank holds."""
        found: dict[tuple[int, str], LocalTensor] = {}
        for chunk, model in enumerate(self._chunks):
            shards = {
                held.facts.local_name: Shard(held.mapped[0].shape, held.mapped[0].held)
                for held in self._read.held.values()
                if held.facts.chunk == chunk and held.mapped
            }
            tensors = local_tensors(model, functools.partial(_shard, shards))
            found.update(((chunk, unwrapped(name)), tensor) for name, tensor in tensors.items())
        return found


def _shard(shards: Mapping[str, Shard], name: str, tensor: torch.Tensor) -> Shard | None:
    del tensor
    return shards.get(unwrapped(name))


def megatron_adapter(
    model: Any,
    *,
    bridge: Any = None,
    collective: Collective | None = None,
    manifest: Catalog | Path | None = None,
) -> SourceAdapter:
    """The adapter for this rank's chunks of a Megatron model.

    Args:
        model: A chunk, or the list of chunks that Megatron's virtual pipeline gives; wrapped or not.
        bridge: The AutoBridge that made or loaded the model; if None, one is made from the checkpoint that the model's own
            configuration names.
        collective: The training ranks; default: the default process group.
        manifest: The checkpoint that receivers load, or its directory; if None, the one that the bridge was made from. Names
            that it does not list are never sent: leave out what should stay as it is on the receivers.

    Raises:
        RejectedError: Bridge is not installed, no checkpoint is known, or a parameter cannot be mapped.
    """
    chunks = list(model) if isinstance(model, list | tuple) else [model]
    if not chunks or not all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
        raise RejectedError(f"Megatron source: got {type(model).__qualname__}; expected a model chunk or a list of them")
    bridge = bridge if bridge is not None else _bridge_of(chunks[0])
    found = as_catalog(manifest if manifest is not None else _checkpoint_of(bridge))
    if found is None:
        raise RejectedError(
            "Megatron source: its bridge was made from a configuration alone; give the checkpoint that receivers load as "
            "manifest"
        )
    return MegatronAdapter(chunks, bridge, collective or default_collective(), found)


def _bridge_of(chunk: torch.nn.Module) -> Any:
    """A bridge for the checkpoint that the model's configuration names."""
    inner: Any = chunk
    while isinstance(getattr(inner, "module", None), torch.nn.Module):
        inner = inner.module
    path = getattr(getattr(inner, "config", None), "hf_model_id", None)
    if not path:
        raise RejectedError(
            "Megatron source: the model's configuration names no Hugging Face checkpoint; give the AutoBridge it belongs to as "
            "bridge"
        )
    try:
        from megatron.bridge import AutoBridge
    except ImportError as error:
        raise RejectedError(f"Megatron source: megatron-bridge cannot be imported: {error}") from error
    return AutoBridge.from_hf_pretrained(path)


def _checkpoint_of(bridge: Any) -> Path | None:
    """Where the checkpoint lies that the bridge was made from; None if that is no directory here."""
    source = getattr(getattr(bridge.hf_pretrained, "state", None), "source", None)
    path = getattr(source, "path", None) or getattr(bridge.hf_pretrained, "model_name_or_path", None)
    return Path(path) if path and Path(path).exists() else None


source_adapter = megatron_adapter
"""The name under which the publisher finds the adapter of whichever integration fits the model."""
