"""Several models in training that one commit publishes together: a policy and, say, its speculative draft."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.errors import RejectedError
from deltarefit.source.conversion import ExplainedConverter, ResidualConverter, ResidualPart
from deltarefit.source.task import ConversionTask, ResidualSource, SourceAdapter

__all__ = ["JointAdapter"]


class JointAdapter:
    """A SourceAdapter of several. Canonical names are those of each model behind its prefix, which may be empty for one."""

    def __init__(self, parts: Mapping[str, SourceAdapter]) -> None:
        """``parts``: prefix to adapter, such as ``{"": policy, "draft.": draft}``; equal on every rank.

        Raises:
            RejectedError: there is no part.
        """
        if not parts:
            raise RejectedError("joint source: expected at least one model")
        self._parts = dict(parts)

    def catalog(self) -> Catalog:
        """See SourceAdapter.

        Raises:
            RejectedError: a name occurs twice.
        """
        return Catalog(_behind(prefix, spec) for prefix, part in self._parts.items() for spec in part.catalog().values())

    def tasks(self) -> Sequence[ConversionTask]:
        """See SourceAdapter."""
        return [_task_behind(prefix, task) for prefix, part in self._parts.items() for task in part.tasks()]

    def barrier(self) -> None:
        """See SourceAdapter."""
        for part in self._parts.values():
            part.barrier()

    def residual(self) -> ResidualConverter | None:
        """See ResidualSource."""
        found = {prefix: part.residual() for prefix, part in self._parts.items() if isinstance(part, ResidualSource)}
        converters = {prefix: converter for prefix, converter in found.items() if converter is not None}
        return _JointConverter(converters) if converters else None


class _JointConverter:
    """A ResidualConverter of several."""

    def __init__(self, parts: Mapping[str, ResidualConverter]) -> None:
        self._parts = dict(parts)
        self._originals = {
            prefix: {prefix + spec.name: spec for group in part.groups() for spec in group} for prefix, part in parts.items()
        }

    def groups(self) -> Sequence[Sequence[TensorSpec]]:
        return [[_behind(prefix, spec) for spec in group] for prefix, part in self._parts.items() for group in part.groups()]

    def sources(self) -> Sequence[ConversionTask]:
        return [_task_behind(prefix, task) for prefix, part in self._parts.items() for task in part.sources()]

    def dependencies(self) -> Mapping[str, frozenset[str]]:
        return {
            prefix + name: frozenset(prefix + read for read in reads)
            for prefix, part in self._parts.items()
            for name, reads in part.dependencies().items()
        }

    def reasons(self) -> Mapping[str, str]:
        return {
            prefix + name: why
            for prefix, part in self._parts.items()
            if isinstance(part, ExplainedConverter)
            for name, why in part.reasons().items()
        }

    def convert(self, specs: Sequence[TensorSpec]) -> Iterable[ResidualPart]:
        for prefix, part in self._parts.items():
            originals = self._originals[prefix]
            if own := [originals[spec.name] for spec in specs if spec.name in originals]:
                for converted in part.convert(own):
                    yield replace(converted, spec=_behind(prefix, converted.spec))


def _behind(prefix: str, spec: TensorSpec) -> TensorSpec:
    return replace(spec, name=prefix + spec.name)


def _task_behind(prefix: str, task: ConversionTask) -> ConversionTask:
    return replace(task, key=prefix + task.key, spec=_behind(prefix, task.spec))
