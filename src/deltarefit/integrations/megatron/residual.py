"""Checkpoint tensors that only Megatron Bridge itself can make: values that are changed, or rearrangements not known here.

Bridge's own export runs on just these tasks, whenever a bit of their parameters changed. All ranks take part in it, in the
order of the tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import torch

from deltarefit.bits import DTYPES, logical_words
from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.errors import RejectedError
from deltarefit.integrations.megatron.facts import TaskFacts
from deltarefit.integrations.megatron.reading import Held, LocalTasks
from deltarefit.integrations.torch.local import LocalTensor
from deltarefit.integrations.torch.tasks import reading
from deltarefit.pieces import Piece, whole
from deltarefit.source import Collective, ConversionTask, ResidualPart, assembler_of, cut_into_parts, onto_view

__all__ = ["BridgeConverter", "Converting"]


class _Opening(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says first."""

    num_tasks: int
    places: tuple[int, ...]
    """Of the tasks that this rank cannot send directly."""


class _Source(msgspec.Struct, frozen=True, array_like=True):
    """A parameter of a task that some rank cannot send directly."""

    place: int
    name: str
    targets: tuple[str, ...]
    reason: str
    is_isolated: bool


@dataclass(frozen=True, slots=True)
class Converting:
    """What all ranks agree to convert."""

    places: frozenset[int]
    """Of tasks. Their parameters are sent directly by no rank, even if some could."""
    names: Mapping[str, frozenset[int]]
    """Residual checkpoint tensors, each with the tasks that it is made of."""
    reasons: Mapping[str, str]
    dependencies: Mapping[str, frozenset[str]]
    """Without tensors of which more than the tasks may decide."""

    @classmethod
    def agree(cls, read: LocalTasks, collective: Collective, manifest: Catalog) -> Self:
        """Exchange what each rank cannot send directly. Called on every rank.

        Raises:
            RejectedError: ranks have different numbers of tasks, or Bridge makes tensors that the checkpoint lacks.
        """
        mine = _Opening(len(read.tasks), tuple(place for place, held in read.held.items() if not held.mapped))
        openings = [msgspec.msgpack.decode(part, type=_Opening) for part in collective.all_gather(msgspec.msgpack.encode(mine))]
        counts = sorted({opening.num_tasks for opening in openings})
        if len(counts) > 1:
            raise RejectedError(f"Megatron source: ranks list {counts} conversion tasks; expected one model on all of them")
        places = frozenset(place for opening in openings for place in opening.places)
        listed = [_source(place, read.held[place]) for place in sorted(places) if place in read.held]
        data = collective.all_gather(msgspec.msgpack.encode(listed))
        sources = [source for part in data for source in msgspec.msgpack.decode(part, type=list[_Source])]
        return cls._of(places, sources, manifest)

    @classmethod
    def _of(cls, places: frozenset[int], sources: Sequence[_Source], manifest: Catalog) -> Self:
        names: dict[str, set[int]] = {}
        reads: dict[int, set[str]] = {}
        reasons: dict[str, str] = {}
        for source in sources:
            reads.setdefault(source.place, set()).add(source.name)
            for name in source.targets:
                names.setdefault(name, set()).add(source.place)
                reasons[name] = source.reason or reasons.get(name) or "another rank's part cannot be sent directly"
        if unknown := sorted(names.keys() - manifest.keys()):
            raise RejectedError(
                f"Megatron source: cannot map {', '.join(unknown[:3])}, which the checkpoint lacks: {reasons[unknown[0]]}"
            )
        unknown_reads = {name for source in sources if not source.is_isolated for name in source.targets}
        dependencies = {
            name: frozenset(source for place in made_of for source in reads[place])
            for name, made_of in names.items()
            if name not in unknown_reads
        }
        return cls(places, {name: frozenset(made_of) for name, made_of in names.items()}, reasons, dependencies)


def _source(place: int, held: Held) -> _Source:
    return _Source(place, _source_name(held.facts), tuple(held.facts.targets.values()), held.reason, held.is_isolated)


def _source_name(facts: TaskFacts) -> str:
    """Equal on ranks that hold the same part of a parameter, as far as tensor parallelism tells."""
    return f"{facts.name}@{facts.tp_rank}/{facts.tp_size}"


class BridgeConverter:
    """Runs Bridge's export on the tasks that tensors are made of. See ResidualConverter."""

    def __init__(
        self,
        bridge: Any,
        chunks: Sequence[torch.nn.Module],
        read: LocalTasks,
        converting: Converting,
        tensors: Mapping[tuple[int, str], LocalTensor],
        collective: Collective,
        manifest: Catalog,
    ) -> None:
        self._bridge = bridge
        self._chunks = list(chunks)
        self._read = read
        self._converting = converting
        self._tensors = tensors
        self._collective = collective
        self._manifest = manifest

    def groups(self) -> Sequence[Sequence[TensorSpec]]:
        """See ResidualConverter. Tensors that are made of the same tasks belong together."""
        by_tasks: dict[frozenset[int], list[TensorSpec]] = {}
        for name in sorted(self._converting.names):
            by_tasks.setdefault(self._converting.names[name], []).append(self._manifest[name])
        return list(by_tasks.values())

    def sources(self) -> Sequence[ConversionTask]:
        """See ResidualConverter. Each rank's part of a parameter is a source of its own."""
        found = []
        for place in sorted(self._converting.places & self._read.held.keys()):
            facts = self._read.held[place].facts
            name = _source_name(facts)
            spec = TensorSpec(name, facts.dtype, facts.shape)
            tensor = self._tensors[facts.chunk, facts.local_name]
            view = whole(spec.shape)
            for number, part in enumerate(cut_into_parts(onto_view([Piece(view, view)], tensor.view), spec.element_nbytes)):
                placed, words = reading(tensor, part, DTYPES[spec.dtype])
                found.append(ConversionTask(f"source of {name}#{number}", spec, placed, words, ()))
        return found

    def dependencies(self) -> Mapping[str, frozenset[str]]:
        """See ResidualConverter."""
        return self._converting.dependencies

    def reasons(self) -> Mapping[str, str]:
        """Why each residual tensor is one."""
        return self._converting.reasons

    def convert(self, specs: Sequence[TensorSpec]) -> Iterator[ResidualPart]:
        """See ResidualConverter. Every rank gets every tensor; its assembler keeps it."""
        wanted = {spec.name: spec for spec in specs}
        places = sorted({place for name in wanted for place in self._converting.names[name]})
        tasks = [self._read.tasks[place] for place in places]
        missing = set(wanted)
        for name, tensor in self._bridge.export_hf_weights(self._chunks, cpu=True, show_progress=False, conversion_tasks=tasks):
            if name not in wanted:
                continue
            missing.discard(name)
            spec = wanted[name]
            if tuple(tensor.shape) != spec.shape:
                raise RejectedError(f"Bridge exports {name} with shape {list(tensor.shape)}; the checkpoint has {spec}")
            if assembler_of(name, self._collective.world_size) == self._collective.rank:
                yield ResidualPart(spec, (whole(spec.shape),), logical_words(tensor.to(DTYPES[spec.dtype])).copy())
        if missing:
            raise RejectedError(f"Bridge exports no {', '.join(sorted(missing)[:3])}, which the checkpoint has")
