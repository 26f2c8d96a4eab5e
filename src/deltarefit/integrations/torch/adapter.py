"""The source adapter for plain modules, data-parallel modules and transformers models held whole by every rank."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deltarefit.bits import dtype_name
from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.integrations.torch.export import Convert, Exporter, ExportMap, after, exporter_of, map_export
from deltarefit.integrations.torch.local import (
    LocalTensor,
    ShardOf,
    check_same_tensors,
    check_same_ties,
    local_tensors,
    refuse_shards,
    unwrap,
)
from deltarefit.integrations.torch.manifest import as_catalog
from deltarefit.integrations.torch.residual import ExportConverter
from deltarefit.integrations.torch.tasks import tasks_of
from deltarefit.source import Collective, ConversionTask, LocalCollective, SourceAdapter, check_manifest, together

_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))

__all__ = ["ExportOptions", "TorchAdapter", "source_adapter", "torch_adapter"]


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What is published instead of the model's own export."""

    manifest: Catalog | None = None
    """The checkpoint that receivers load. The model must produce exactly its names and shapes; floating-point parameters are
    cast to its dtypes, as 32-bit master weights are for a 16-bit checkpoint."""
    dtype: torch.dtype | None = None
    """Floating-point tensors are cast to this where no manifest says otherwise."""
    export: Convert | None = None
    """What the checkpoint holds instead, computed from what it would hold: takes and returns tensors by name.

    It is watched with probes; what it merely rearranges is sent directly, what it computes is converted at each refit. It must
    depend on nothing but its input. A model with adapters attached needs one that merges them."""
    by_layer: bool = False
    """Whether ``export`` may be called with the tensors of one layer alone, which saves memory and time."""


class TorchAdapter:
    """Facts about a module of which every rank of the collective holds a full, equal copy, or the part that ``shard_of`` says.

    The catalog is in checkpoint names: what ``save_pretrained`` would write for a transformers model, else ``state_dict``.
    Tied weights appear once, under the name that the checkpoint uses.
    """

    def __init__(
        self, model: torch.nn.Module, collective: Collective, options: ExportOptions, shard_of: ShardOf = refuse_shards
    ) -> None:
        self._model = unwrap(model)
        self._collective = collective
        self._options = options
        self._shard_of = shard_of

    @functools.cached_property
    def _tensors(self) -> dict[str, LocalTensor]:
        return local_tensors(self._model, self._shard_of)

    @functools.cached_property
    def _exporter(self) -> Exporter:
        export = self._options.export
        exporter = exporter_of(self._model, self._tensors, merges_adapters=export is not None)
        return exporter if export is None else after(exporter, export, by_layer=self._options.by_layer)

    @functools.cached_property
    def _export(self) -> ExportMap:
        exporter, manifest = self._exporter, self._options.manifest
        export = map_export(exporter, self._tensors, exporter.kept)
        if manifest is not None and exporter.aliases:
            tied = map_export(exporter, self._tensors, tuple(exporter.aliases))
            export = _named_as_in(manifest, export, tied, exporter.aliases)
        export = ExportMap(
            {name: self._cast(spec) for name, spec in export.specs.items()}, export.placements, export.opaque, export.groups
        )
        if manifest is not None:
            check_manifest(Catalog(export.specs.values()), manifest)
        return export

    def _cast(self, spec: TensorSpec) -> TensorSpec:
        """The spec in the dtype that is published: the checkpoint's where it has the tensor, else ``dtype``.

        A floating-point cast rounds each element by itself, so bits are compared after it.
        """
        manifest, dtype = self._options.manifest, self._options.dtype
        wanted = dtype_name(dtype) if dtype is not None else spec.dtype
        if manifest is not None and spec.name in manifest:
            wanted = manifest[spec.name].dtype
        if wanted == spec.dtype or spec.dtype not in _FLOATS or wanted not in _FLOATS:
            return spec
        return TensorSpec(spec.name, wanted, spec.shape)

    @functools.cached_property
    def _catalog(self) -> Catalog:
        return Catalog(self._export.specs.values())

    def catalog(self) -> Catalog:
        """See SourceAdapter."""
        return self._catalog

    def tasks(self) -> Sequence[ConversionTask]:
        """See SourceAdapter."""
        tasks: list[ConversionTask] = []
        for name, parts in self._export.placements.items():
            for source, pieces in parts:
                key = name if len(parts) == 1 else f"{name}<{source}"
                tasks += tasks_of(key, self._export.specs[name], self._tensors[source], pieces, self._collective.world_size)
        return tasks

    def residual(self) -> ExportConverter | None:
        """See ResidualSource."""
        if not self._export.opaque:
            return None
        return ExportConverter(self._exporter, self._export, self._tensors, self._collective)

    def barrier(self) -> None:
        """See SourceAdapter. Waits for this rank's accelerators, then for the other ranks.

        Raises:
            RejectedError: on some rank, the model is not the one that was read any more.
        """
        together(self._collective, "reading the model", self._settle)

    def _settle(self) -> None:
        check_same_tensors(self._model, self._tensors)
        for device in {tensor.live().device for tensor in self._tensors.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        check_same_ties(self._tensors, self._ties)

    @functools.cached_property
    def _ties(self) -> list[tuple[str, str]]:
        """Tied names of which only the second is read."""
        export = self._export
        read = {source for parts in export.placements.values() for source, _ in parts}
        read.update(source for group in export.groups.values() for source in group)
        pairs = [pair for pair in self._exporter.aliases.items() if not read.issuperset(pair)]
        return [(name, sent) if sent in read else (sent, name) for name, sent in pairs]


def _named_as_in(manifest: Catalog, kept: ExportMap, tied: ExportMap, aliases: Mapping[str, str]) -> ExportMap:
    """The export with tied weights under the names that the manifest lists: one of them, or several."""
    wanted = {name for name in tied.placements if name in manifest}
    replaced = {aliases[source] for name in wanted for source, _ in tied.placements[name]}
    dropped = {
        name
        for name, parts in kept.placements.items()
        if name not in manifest and all(source in replaced for source, _ in parts)
    }
    specs = {name: spec for name, spec in kept.specs.items() if name not in dropped}
    placements = {name: parts for name, parts in kept.placements.items() if name not in dropped}
    for name in wanted:
        specs[name], placements[name] = tied.specs[name], tied.placements[name]
    return ExportMap(specs, placements, kept.opaque, kept.groups)


def torch_adapter(
    model: torch.nn.Module,
    *,
    collective: Collective | None = None,
    manifest: Catalog | Path | None = None,
    dtype: torch.dtype | None = None,
    export: Convert | None = None,
    export_by_layer: bool = False,
) -> SourceAdapter:
    """The adapter for a module that every training rank holds whole.

    Args:
        model: A module, bare or wrapped by DistributedDataParallel or torch.compile; a transformers model gets its checkpoint
            names.
        collective: The training ranks, all of which hold a copy; this rank alone if None.
        manifest: The checkpoint that receivers load, or its directory: see ExportOptions.
        dtype: See ExportOptions.
        export: See ExportOptions.
        export_by_layer: See ExportOptions.
    """
    options = ExportOptions(as_catalog(manifest), dtype, export, export_by_layer)
    return TorchAdapter(model, collective or LocalCollective(), options)


source_adapter = torch_adapter
"""The name under which the publisher finds the adapter of whichever integration fits the model."""
