"""Learn where an engine's loader puts every canonical tensor, writing nothing (paper 6.1, prewarm).

One survey call shows which views of canonical tensors are copied where; those view pairs are the placement. Where a copy's
source is a temporary, the loader is run again on shadows with digits that say which element each is (``resolve``), and random
bits must then arrive where the digits arrived. What fits neither is opaque: values are computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from deltarefit.canonical import DTYPE_NBYTES, Catalog, TensorSpec
from deltarefit.pieces import Cast, Piece, StridedView
from deltarefit.placement.fit import split_ascending
from deltarefit.placement.inputs import LoadWeights
from deltarefit.placement.overlap import Claim, colliding
from deltarefit.placement.resolve import resolve_by_probing
from deltarefit.placement.run import Home, OpaqueWrites, Run, group_homes, run_loader
from deltarefit.placement.storages import ModelStorage, StorageMap
from deltarefit.placement.watch import Write, WriteKind

__all__ = ["LearnedLoader", "learn_loader"]

_MAX_REFUSALS = 20
"""A wrong catalog fails for every name; the first few say why."""


@dataclass(slots=True)
class LearnedLoader:
    """What a loader does with each canonical tensor."""

    homes: dict[str, tuple[Home, ...]] = field(default_factory=dict)
    indirect: dict[str, OpaqueWrites] = field(default_factory=dict)
    """Those of ``homes`` whose copies do not come straight from the canonical tensor, or overlap: masks cannot pass there."""
    opaque: dict[str, OpaqueWrites] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    fills: list[Write] = field(default_factory=list)
    """Constants written outside every canonical element, such as vocabulary padding."""
    writes: dict[str, list[Write]] = field(default_factory=dict)
    """Every write that was seen for a tensor, constants aside."""
    reported: frozenset[str] = frozenset()
    """What the loader returned. Never trusted."""


def learn_loader(load_weights: LoadWeights, storages: StorageMap, catalog: Catalog, *, seed: int = 0) -> LearnedLoader:
    """Watch the loader place every tensor of the catalog. What it refuses is noted, not raised."""
    learned = LearnedLoader()
    survey = _survey(load_weights, storages, catalog, learned)
    learned.reported = survey.reported
    by_name, learned.fills = _sort_writes(survey, learned)
    learned.writes = by_name
    doubtful = _doubtful(survey, by_name, learned.fills, catalog)
    for name, writes in by_name.items():
        if name not in doubtful and name not in learned.refused:
            learned.homes[name] = _homes_of_views(writes, catalog[name])
            if any(write.source is not None and write.source.dtype != catalog[name].dtype for write in writes):
                learned.indirect[name] = OpaqueWrites(tuple(writes), "it is copied as another dtype of the same bits")
    names = [name for name in catalog if name in doubtful and name not in learned.refused]
    resolved = resolve_by_probing(load_weights, storages, catalog, names, by_name, seed=seed)
    learned.homes.update(resolved.homes)
    learned.opaque.update(resolved.opaque)
    learned.fills += resolved.constants
    for name in resolved.homes:
        learned.indirect[name] = OpaqueWrites(tuple(by_name.get(name, ())), "it is copied through a temporary")
    return learned


def _survey(load_weights: LoadWeights, storages: StorageMap, catalog: Catalog, learned: LearnedLoader) -> Run:
    """Give the loader every tensor; a tensor that it refuses is noted, and the survey goes on behind it."""
    specs = list(catalog.values())
    total: Run | None = None
    while specs and len(learned.refused) < _MAX_REFUSALS:
        run = run_loader(load_weights, storages, specs)
        if run.is_collecting and len(specs) > 1 and (run.failure is not None or _has_ownerless(run)):
            return _one_by_one(load_weights, storages, catalog, learned, run)
        total = run if total is None else _joined(total, run)
        if run.failure is None:
            break
        culprit = run.last or specs[0].name
        learned.refused[culprit] = f"the loader refuses it: {run.failure}"
        specs = specs[[spec.name for spec in specs].index(culprit) + 1 :]
    return total if total is not None else run_loader(load_weights, storages, ())


def _has_ownerless(run: Run) -> bool:
    """Whether some writes do not say by their source which tensor they belong to."""
    return any(write.source is None for write in run.writes)


def _one_by_one(load_weights: LoadWeights, storages: StorageMap, catalog: Catalog, learned: LearnedLoader, whole: Run) -> Run:
    """The loader takes every tensor before it writes: only calls with one tensor tell what belongs to which."""
    owners: dict[object, str] = {}
    for spec in catalog.values():
        run = run_loader(load_weights, storages, [spec])
        if run.failure is not None and whole.failure is not None and len(learned.refused) < _MAX_REFUSALS:
            learned.refused[spec.name] = f"the loader refuses it: {run.failure}"
        owners.update((write.key, spec.name) for write in run.writes)
    writes = [dataclasses.replace(write, current=owners.get(write.key, write.current)) for write in whole.writes]
    return dataclasses.replace(whole, writes=writes, failure=None)


def _joined(first: Run, second: Run) -> Run:
    return dataclasses.replace(
        second,
        writes=first.writes + second.writes,
        changed_inputs=first.changed_inputs | second.changed_inputs,
        read_inputs=first.read_inputs | second.read_inputs,
        reported=first.reported | second.reported,
    )


def _sort_writes(survey: Run, learned: LearnedLoader) -> tuple[dict[str, list[Write]], list[Write]]:
    """Copies by the tensor they belong to, and constants. Other operations refuse their tensor."""
    by_name: dict[str, list[Write]] = {}
    constants: list[Write] = []
    for write in survey.writes:
        name = write.source.name if write.source is not None else write.current
        if not write.view.num_elements:
            continue
        if name is None:
            learned.refused[write.storage.key] = f"written by {write.operation} before any tensor was asked for"
        elif write.kind is WriteKind.OTHER:
            learned.refused[name] = (
                f"the loader writes {write.storage.key} with {write.operation}; only aten.copy_ and constant fills are followed"
            )
        elif write.kind is WriteKind.FILL and name not in survey.read_inputs:
            constants.append(write)
        else:
            by_name.setdefault(name, []).append(write)
    return by_name, constants


def _doubtful(survey: Run, by_name: dict[str, list[Write]], constants: list[Write], catalog: Catalog) -> set[str]:
    """Tensors whose placement the survey alone does not tell."""
    doubtful = {name for name in survey.changed_inputs if name in by_name}
    claims: list[Claim] = []
    for name, writes in by_name.items():
        if any(_straight(write, catalog[name]) is None for write in writes):
            doubtful.add(name)
        claims += [Claim(name, write.storage.key, write.view, DTYPE_NBYTES[write.dtype]) for write in _distinct(writes)]
    claims += [Claim(f"\0{write.current}", write.storage.key, write.view, DTYPE_NBYTES[write.dtype]) for write in constants]
    for pair in colliding(claims):
        owners = {name.removeprefix("\0") for name in pair}
        if len(owners) == 1 and owners <= set(by_name):
            doubtful |= owners
    return doubtful


def _distinct(writes: Iterable[Write]) -> list[Write]:
    """Without writes that repeat one another exactly."""
    return list({(write.key, write.source): write for write in writes}.values())


def _straight(write: Write, spec: TensorSpec) -> Piece | None:
    """A copy straight from a canonical view as a piece; None if there is no such source, or if values change.

    A copy of equal dtypes moves bits, whatever it takes them for: views as bytes or as wider integers are counted in elements
    of the canonical dtype.
    """
    if write.kind is not WriteKind.COPY or write.source is None:
        return None
    if write.source.dtype == write.dtype:
        source = in_units(write.source.view, DTYPE_NBYTES[write.dtype], spec.element_nbytes)
        target = in_units(write.view, DTYPE_NBYTES[write.dtype], spec.element_nbytes)
        return None if source is None or target is None else Piece(source, target)
    if (spec.dtype, write.source.dtype, write.dtype) == ("BF16", "BF16", "F32"):
        return Piece(write.source.view, write.view, Cast.WIDEN)
    return None


def _homes_of_views(writes: list[Write], spec: TensorSpec) -> tuple[Home, ...]:
    grouped: dict[tuple[str, int], tuple[ModelStorage, list[Piece]]] = {}
    for write in _distinct(writes):
        piece = _straight(write, spec)
        if piece is None:
            raise LookupError(f"{spec.name}: a copy that is not straight")
        width = DTYPE_NBYTES[write.dtype] if piece.cast is Cast.WIDEN else spec.element_nbytes
        grouped.setdefault((write.storage.key, width), (write.storage, []))[1].extend(split_ascending(piece))
    return group_homes(grouped)


def in_units(view: StridedView, width: int, unit: int) -> StridedView | None:
    """A view of elements of ``width`` bytes as one of elements of ``unit`` bytes; None if it cuts them."""
    if width == unit:
        return view
    if width > unit:
        ratio = width // unit
        return StridedView(view.offset * ratio, (*view.shape, ratio), (*(step * ratio for step in view.stride), 1))
    ratio = unit // width
    steps = view.stride[:-1]
    is_whole = bool(view.shape) and view.stride[-1] == 1 and not any(n % ratio for n in (view.offset, view.shape[-1], *steps))
    if not is_whole:
        return None
    shape = (*view.shape[:-1], view.shape[-1] // ratio)
    return StridedView(view.offset // ratio, shape, (*(step // ratio for step in steps), 1))
