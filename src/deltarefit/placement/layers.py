"""Everything that an engine does between checkpoint and serving, learnt on a model that serves nobody."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from deltarefit.canonical import Catalog
from deltarefit.errors import RejectedError
from deltarefit.placement.after_load import AfterLoad
from deltarefit.placement.alone import is_left_alone
from deltarefit.placement.digits import random_words
from deltarefit.placement.finals import UnitMap, learn_unit
from deltarefit.placement.learn import LearnedLoader
from deltarefit.placement.storages import StorageMap
from deltarefit.placement.units import Unit, UnitRig, units_of

__all__ = ["LearnedLayer", "LearnedLayers", "learn_layers", "view_of"]

_SHARED_PASSES = 2
"""Loads of random bits that a layer must pass to be taken for another of its kind; which passed all of ``learn_unit``."""


@dataclass(frozen=True, slots=True, eq=False)
class LearnedLayer:
    """One unit, what its post-load steps do, and the rig to run them again."""

    unit: Unit
    map: UnitMap
    rig: UnitRig
    views: Mapping[str, tuple[object, ...]]
    """By path, dtype, shape, stride and offset of the tensors that the last run left."""


@dataclass(slots=True)
class LearnedLayers:
    """What came of all units."""

    layers: list[LearnedLayer] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Canonical tensors of units whose post-load cannot be followed at all."""
    untouched: tuple[str, ...] = ()
    """Canonical tensors that no post-load step reads or moves."""


def learn_layers(
    model: torch.nn.Module, after_load: AfterLoad, storages: StorageMap, learned: LearnedLoader, catalog: Catalog
) -> LearnedLayers:
    """Learn the post-load steps of a model that ``after_load`` built. Its contents are overwritten."""
    result = LearnedLayers()
    known: dict[object, tuple[Unit, UnitMap]] = {}
    inside: set[str] = set()
    for unit in units_of(model, after_load.steps(model), storages, learned, catalog):
        kind = _kind(unit, learned, catalog)
        try:
            rig = UnitRig(unit, lambda pairs: after_load.load(model, pairs), learned, catalog)
            if kind in known or not is_left_alone(rig, catalog):
                inside.update(unit.names)
                result.layers.append(_layer(rig, known, kind, catalog))
            rig.release()
        except RejectedError as error:
            inside.update(unit.names)
            result.refused |= dict.fromkeys(unit.names, str(error))
    result.untouched = tuple(name for name in catalog if name in learned.homes and name not in inside)
    return result


def _layer(rig: UnitRig, known: dict[object, tuple[Unit, UnitMap]], kind: object, catalog: Catalog) -> LearnedLayer:
    """Learn a unit, unless it is as one of its kind that is known."""
    unit_map = _alike(known.get(kind), rig.unit, rig, catalog)
    if unit_map is None:
        unit_map = learn_unit(rig, catalog)
        known[kind] = (rig.unit, unit_map)
    views = {path: view_of(tensor) for path, tensor in rig.reached.tensors.items()}
    return LearnedLayer(rig.unit, unit_map, rig, views)


def view_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """How a tensor lies in its storage, comparable between two models: dtype, shape, stride, offset, bytes of the storage."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.untyped_storage().nbytes()


def _kind(unit: Unit, learned: LearnedLoader, catalog: Catalog) -> object:
    """Equal for units of the same modules, shapes and load-time placement: layers of one kind, wherever they stand."""
    order = {storage.key: number for number, storage in enumerate(unit.storages)}
    modules = tuple(
        (type(inner).__name__, type(getattr(inner, "quant_method", None)).__name__)
        for root in unit.roots.values()
        for inner in root.modules()
    )
    placed = tuple(
        (
            catalog[name].dtype,
            catalog[name].shape,
            tuple((order[home.storage.key], home.width, home.pieces) for home in learned.homes.get(name, ())),
        )
        for name in unit.names
    )
    return modules, tuple(storage.nbytes for storage in unit.storages), placed


def _alike(known: tuple[Unit, UnitMap] | None, unit: Unit, rig: UnitRig, catalog: Catalog) -> UnitMap | None:
    """The map of a unit of the same kind in this unit's names, if loads of random bits come out as it says; else None."""
    if known is None:
        return None
    other, unit_map = known
    if len(other.holders) != len(unit.holders):
        return None
    paths = dict(zip((*other.roots, *other.holders), (*unit.roots, *unit.holders), strict=True))
    names = dict(zip(other.names, unit.names, strict=True))

    def path(old: str) -> str:
        root = max((root for root in paths if old == root or old.startswith(root + ".")), key=len, default="")
        return paths[root] + old[len(root) :] if root else old

    moved = dataclasses.replace(
        unit_map,
        homes={
            names[name]: tuple(dataclasses.replace(home, path=path(home.path)) for home in homes)
            for name, homes in unit_map.homes.items()
        },
        lost={names[name]: reason for name, reason in unit_map.lost.items()},
        unseen={names[name]: reason for name, reason in unit_map.unseen.items()},
        hidden=dataclasses.replace(unit_map.hidden, path=path(unit_map.hidden.path)) if unit_map.hidden else None,
        recomputed={path(old): ranges for old, ranges in unit_map.recomputed.items()},
        nbytes={path(old): nbytes for old, nbytes in unit_map.nbytes.items()},
    )
    generator = np.random.default_rng(len(unit.names))
    for turn in range(_SHARED_PASSES):
        words = {
            name: random_words(catalog[name].dtype, catalog[name].num_elements, generator, turn=turn) for name in unit.names
        }
        outputs = rig.run(words)
        if {path: outputs[path].size for path in moved.nbytes if path in outputs} != moved.nbytes:
            return None
        if not all(home.is_held(outputs[home.path], words[name]) for name, homes in moved.homes.items() for home in homes):
            return None
    return moved
