"""Residual conversion: canonical tensors that are computed rather than rearranged (paper 4.3, A.1).

Merged adapters, block scales and what is divided by them, sums and user export hooks belong here. An adapter says what the
sources are and what depends on what; the stage in ``residual`` decides what must be converted, and when.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from deltarefit.canonical import TensorSpec, Words
from deltarefit.errors import RejectedError
from deltarefit.pieces import StridedView
from deltarefit.source.ownership import stable_hash
from deltarefit.source.task import ConversionTask

__all__ = ["ExplainedConverter", "ResidualConverter", "ResidualPart", "assembler_of", "check_dependencies", "required_tensors"]


@dataclass(frozen=True, slots=True, eq=False)
class ResidualPart:
    """Elements of one residual tensor that one rank converted."""

    spec: TensorSpec
    views: tuple[StridedView, ...]
    """The flat indices it covers."""
    words: Words
    """Their bits, view after view, each in row-major order."""


class ResidualConverter(Protocol):
    """How an adapter computes residual tensors. Every call is made on all training ranks, in the same order."""

    def groups(self) -> Sequence[Sequence[TensorSpec]]:
        """The residual tensors, in groups that one conversion gives together; equal on every rank.

        Tensors of one group are asked for in one call; as many groups as there are ranks, so that each may convert some.
        """
        ...

    def sources(self) -> Sequence[ConversionTask]:
        """Every shard that this rank holds of the tensors that conversions read.

        Such a task's spec is the source tensor itself, under the framework's name for it, and its pieces count in that tensor.
        """
        ...

    def dependencies(self) -> Mapping[str, frozenset[str]]:
        """Per residual tensor the names of the sources it reads, and of other tensors or intermediates in this mapping.

        A residual tensor that is left out has unknown dependencies: any change selects it.
        """
        ...

    def convert(self, specs: Sequence[TensorSpec]) -> Iterable[ResidualPart]:
        """This rank's parts of these tensors, from the parameters as they are now. The same bits give the same parts.

        Parts of all ranks together must cover each tensor; where they overlap, bits must be equal. It may use the training
        job's collectives. What every rank can compute alone is best given by ``assembler_of`` only.
        """
        ...


@runtime_checkable
class ExplainedConverter(Protocol):
    """A ResidualConverter that says why it is needed."""

    def reasons(self) -> Mapping[str, str]:
        """Per residual tensor, for people."""
        ...


def assembler_of(name: str, world_size: int) -> int:
    """The training rank that assembles a residual tensor and keeps its baseline.

    It need not hold any of the sources.
    """
    return stable_hash(name) % world_size


def check_dependencies(names: AbstractSet[str], sources: AbstractSet[str], dependencies: Mapping[str, frozenset[str]]) -> None:
    """Hold the declared dependencies against the declared names.

    Raises:
        RejectedError: a dependency is no source and no node, or a source is read by no tensor though all dependencies are
            known.
    """
    read = {name for listed in dependencies.values() for name in listed}
    if unknown := sorted(read - sources - dependencies.keys() - names):
        raise RejectedError(f"residual dependencies name {unknown[:3]}, which are neither sources nor residual tensors")
    if (unread := sorted(sources - read)) and not names - dependencies.keys():
        raise RejectedError(
            f"residual sources {unread[:3]} are read by no residual tensor; leave them out or say what reads them"
        )


def required_tensors(
    changed: AbstractSet[str], names: Iterable[str], dependencies: Mapping[str, frozenset[str]]
) -> frozenset[str]:
    """The residual tensors that must be converted because these sources changed, directly or through others (paper A.1)."""
    if not changed:
        return frozenset()
    reached = set(changed)
    waiting = dict(dependencies)
    while touched := [node for node, reads in waiting.items() if not reads.isdisjoint(reached)]:
        reached.update(touched)
        for node in touched:
            del waiting[node]
    return frozenset(name for name in names if name in reached or name not in dependencies)
