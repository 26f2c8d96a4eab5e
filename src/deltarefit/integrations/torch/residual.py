"""Checkpoint tensors that an export computes: merged adapters, quantised weights and their scales, a user's own function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from deltarefit.bits import DTYPES, dtype_name, logical_words
from deltarefit.canonical import TensorSpec
from deltarefit.integrations.torch.export import Exporter, ExportMap
from deltarefit.integrations.torch.local import LocalTensor
from deltarefit.integrations.torch.tasks import tasks_of
from deltarefit.pieces import Piece, whole
from deltarefit.source import Collective, ConversionTask, ResidualPart

__all__ = ["ExportConverter"]


class ExportConverter:
    """Runs the exporter on what it needs, on one rank per group, for a model that every rank holds whole."""

    def __init__(
        self, exporter: Exporter, export: ExportMap, tensors: Mapping[str, LocalTensor], collective: Collective
    ) -> None:
        self._exporter = exporter
        self._export = export
        self._tensors = tensors
        self._collective = collective

    def groups(self) -> Sequence[Sequence[TensorSpec]]:
        """See ResidualConverter."""
        found: dict[tuple[str, ...], list[TensorSpec]] = {}
        for name in sorted(self._export.groups):
            found.setdefault(self._export.groups[name], []).append(self._export.specs[name])
        return list(found.values())

    def sources(self) -> Sequence[ConversionTask]:
        """See ResidualConverter."""
        names = {source for group in self._export.groups.values() for source in group}
        found: list[ConversionTask] = []
        for name in sorted(names):
            local = self._tensors[name]
            spec = TensorSpec(name, dtype_name(local.dtype), local.shape)
            view = whole(spec.shape)
            found += tasks_of(f"source of {name}", spec, local, [Piece(view, view)], self._collective.world_size)
        return found

    def dependencies(self) -> Mapping[str, frozenset[str]]:
        """See ResidualConverter. What is traced together is taken to depend on all of it."""
        return {name: frozenset(group) for name, group in self._export.groups.items()}

    def reasons(self) -> Mapping[str, str]:
        """Why each residual tensor is one."""
        return self._export.opaque

    def convert(self, specs: Sequence[TensorSpec]) -> Iterator[ResidualPart]:
        """See ResidualConverter."""
        wanted: dict[tuple[str, ...], list[TensorSpec]] = {}
        for spec in specs:
            wanted.setdefault(self._export.groups[spec.name], []).append(spec)
        for place, (group, listed) in enumerate(wanted.items()):
            is_mine = place % self._collective.world_size == self._collective.rank
            if not is_mine and all(self._tensors[name].shard is None for name in group):
                continue
            inputs = {name: self._tensors[name].whole_tensor() for name in group}
            if not is_mine:
                continue  # it only took part in gathering the shards
            with torch.no_grad():
                outputs = self._exporter.convert(inputs)
            for spec in listed:
                tensor = outputs[spec.name].to(DTYPES[spec.dtype])
                yield ResidualPart(spec, (whole(spec.shape),), logical_words(tensor))
