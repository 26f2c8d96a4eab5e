"""The source adapter for plain modules, data-parallel modules and transformers models held whole by every rank."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from deltarefit.bits import DTYPES, dtype_name
from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.integrations.torch.export import Convert, Exporter, ExportMap, after, exporter_of, map_export
from deltarefit.integrations.torch.local import LocalTensor, local_tensors, unwrap
from deltarefit.integrations.torch.manifest import read_manifest
from deltarefit.integrations.torch.residual import ExportConverter
from deltarefit.pieces import Piece
from deltarefit.source import Collective, ConversionTask, LocalCollective, SourceAdapter, check_manifest, onto_view, window

_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))

__all__ = ["TorchAdapter", "source_adapter", "torch_adapter"]


class TorchAdapter:
    """Facts about a module of which every rank of the collective holds a full, equal copy.

    The catalog is in checkpoint names: what ``save_pretrained`` would write for a transformers model, else ``state_dict``.
    Tied weights appear once, under the name that the checkpoint uses.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        collective: Collective,
        manifest: Catalog | None = None,
        dtype: torch.dtype | None = None,
        export: Convert | None = None,
        export_by_layer: bool = False,
    ) -> None:
        self._model = unwrap(model)
        self._collective = collective
        self._manifest = manifest
        self._dtype = dtype
        self._user_export = export
        self._by_layer = export_by_layer

    @functools.cached_property
    def _tensors(self) -> dict[str, LocalTensor]:
        return local_tensors(self._model)

    @functools.cached_property
    def _exporter(self) -> Exporter:
        exporter = exporter_of(self._model, self._tensors, merges_adapters=self._user_export is not None)
        return exporter if self._user_export is None else after(exporter, self._user_export, by_layer=self._by_layer)

    @functools.cached_property
    def _export(self) -> ExportMap:
        exporter = self._exporter
        export = map_export(exporter, self._tensors, exporter.kept)
        if self._manifest is not None and exporter.aliases:
            tied = map_export(exporter, self._tensors, tuple(exporter.aliases))
            export = _named_as_in(self._manifest, export, tied, exporter.aliases)
        export = ExportMap(
            {name: self._cast(spec) for name, spec in export.specs.items()}, export.placements, export.opaque, export.groups
        )
        if self._manifest is not None:
            check_manifest(Catalog(export.specs.values()), self._manifest)
        return export

    def _cast(self, spec: TensorSpec) -> TensorSpec:
        """The spec in the dtype that is published: the checkpoint's where it has the tensor, else ``dtype``.

        A floating-point cast rounds each element by itself, so bits are compared after it (checklist D23).
        """
        wanted = dtype_name(self._dtype) if self._dtype is not None else spec.dtype
        if self._manifest is not None and spec.name in self._manifest:
            wanted = self._manifest[spec.name].dtype
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
            spec = self._export.specs[name]
            for source, pieces in parts:
                key = name if len(parts) == 1 else f"{name}<{source}"
                tasks.append(self._task(key, spec, self._tensors[source], pieces))
        return tasks

    def residual(self) -> ExportConverter | None:
        """See ResidualSource."""
        if not self._export.opaque:
            return None
        return ExportConverter(self._exporter, self._export, self._tensors, self._collective)

    def barrier(self) -> None:
        """See SourceAdapter. Waits for this rank's accelerators, then for the other ranks."""
        for device in {tensor.live().device for tensor in self._tensors.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self._collective.barrier()

    def _task(self, key: str, spec: TensorSpec, local: LocalTensor, pieces: Sequence[Piece]) -> ConversionTask:
        first, count, moved = window(onto_view(pieces, local.view))
        replicas = tuple(range(self._collective.world_size))
        words = functools.partial(local.words, first, count, DTYPES[spec.dtype])
        return ConversionTask(key, spec, moved, words, replicas)


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
        manifest: The checkpoint that receivers load, or its directory. If given, the model must produce exactly its names and
            shapes; floating-point parameters are cast to its dtypes, as 32-bit master weights are for a 16-bit checkpoint.
        dtype: Cast floating-point tensors to this where no manifest says otherwise.
        export: What the checkpoint holds instead, computed from what it would hold: takes and returns tensors by name. It is
            watched with probes; what it merely rearranges is sent directly, what it computes is converted at each refit. It
            must depend on nothing but its input. A model with adapters attached needs one that merges them.
        export_by_layer: Whether ``export`` may be called with the tensors of one layer alone, which saves memory and time.
    """
    catalog = read_manifest(manifest) if isinstance(manifest, Path) else manifest
    return TorchAdapter(
        model,
        collective=collective or LocalCollective(),
        manifest=catalog,
        dtype=dtype,
        export=export,
        export_by_layer=export_by_layer,
    )


source_adapter = torch_adapter
"""The name under which the publisher finds the adapter of whichever integration fits the model."""
