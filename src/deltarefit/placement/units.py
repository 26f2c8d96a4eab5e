"""Layers of a freshly loaded model that can be loaded and finished alone, again and again, without the model that serves.

A unit is the smallest set of post-load steps that share no tensor with any other. On it the engine's own load and post-load
steps run on any content, so that what they do to stored bits can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deltarefit.bits import tensor_from_words
from deltarefit.canonical import WORDS, Catalog, Words
from deltarefit.errors import RejectedError
from deltarefit.pieces import Cast, strided
from deltarefit.placement.after_load import PostLoadStep
from deltarefit.placement.hollow import HollowTensors
from deltarefit.placement.inputs import LoadWeights
from deltarefit.placement.learn import LearnedLoader
from deltarefit.placement.overlap import Claim
from deltarefit.placement.reach import Reached, StateUndo, reach
from deltarefit.placement.run import Home, claims_of_homes
from deltarefit.placement.storages import ModelStorage, StorageMap, state_tensors

__all__ = ["RawBytes", "Unit", "UnitRig", "raw_bytes", "units_of"]

RawBytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Steps that belong together, and what they work on."""

    roots: Mapping[str, torch.nn.Module]
    """The outermost modules of the steps, by name."""
    runs: tuple[Callable[[], None], ...]
    storages: tuple[ModelStorage, ...]
    """Load-time storages of the roots' parameters and buffers."""
    names: tuple[str, ...]
    """Canonical tensors that are loaded into these, in the catalog's order."""
    holders: Mapping[str, torch.nn.Module]
    """Modules around the roots that hold further views of these storages, by name."""

    def reach(self) -> Reached:
        """Everything that hangs on the unit."""
        return reach(self.roots, self.holders)


def units_of(
    model: torch.nn.Module, steps: Sequence[PostLoadStep], storages: StorageMap, learned: LearnedLoader, catalog: Catalog
) -> tuple[Unit, ...]:
    """Group steps by what they share. Steps on modules that hold nothing of any canonical tensor are left out."""
    groups = _Groups()
    module_names = {id(module): name for name, module in model.named_modules()}
    modules = [(step.module, *_neighbours(step.module, module_names)) for step in steps]
    for number, mine in enumerate(modules):
        groups.join(f"step {number}", *(key for module in mine for key in _storages_below(module, storages)))
    held_by_name = {name: [home.storage.key for home in homes] for name, homes in learned.homes.items()}
    held_by_name |= {name: [write.storage.key for write in opaque.writes] for name, opaque in learned.opaque.items()}
    for name, keys in held_by_name.items():
        groups.join(f"name {name}", *keys)
    units: list[Unit] = []
    for members in groups.all():
        numbers = sorted(int(member[5:]) for member in members if member.startswith("step "))
        names = tuple(name for name in catalog if f"name {name}" in members)
        held = tuple(storage for storage in storages.storages if storage.key in members)
        roots = [module for number in numbers for module in modules[number]]
        if not numbers and any(name in learned.opaque for name in names):
            roots = [module for _, module in _owners(model, held)]  # no step works on it, but its loader computes
        if roots and names:
            found = {module_names[id(module)]: module for module in _outermost(roots)}
            inside = {id(inner) for root in roots for inner in root.modules()}
            holders = {name: module for name, module in _owners(model, held) if id(module) not in inside}
            units.append(Unit(found, tuple(steps[number].run for number in numbers), held, names, holders))
    return tuple(units)


def _neighbours(module: torch.nn.Module, names: Mapping[int, str]) -> list[torch.nn.Module]:
    """Other modules of the model that a step's helper objects refer to, such as a projection that an attention layer absorbs.

    Modules around it are left out: what refers to the whole model does not change all of it.
    """
    mine = {id(inner) for inner in module.modules()}
    others = reach({"": module}).neighbours
    return [other for other in others if id(other) in names and not any(id(inner) in mine for inner in other.modules())]


def _owners(model: torch.nn.Module, storages: Iterable[ModelStorage]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules that hold a tensor in one of these storages, by name."""
    names = {name.rpartition(".")[0]: None for storage in storages for name in storage.names}
    return ((name, model.get_submodule(name)) for name in names)


def _storages_below(module: torch.nn.Module, storages: StorageMap) -> dict[str, ModelStorage]:
    found = (storages.find(tensor) for tensor in state_tensors(module).values() if tensor.numel())
    return {place[0].key: place[0] for place in found if place is not None}


def _outermost(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return list({id(module): module for module in modules if id(module) not in inner}.values())


class _Groups:
    """Union-find over labels, in the order in which they were first seen."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def join(self, first: str, *others: str) -> None:
        top = self._top(first)
        for other in others:
            self._parent[self._top(other)] = top

    def all(self) -> Iterable[set[str]]:
        groups: dict[str, set[str]] = {}
        for label in self._parent:
            groups.setdefault(self._top(label), set()).add(label)
        return groups.values()

    def _top(self, label: str) -> str:
        self._parent.setdefault(label, label)
        while self._parent[label] != label:
            self._parent[label] = label = self._parent[self._parent[label]]
        return label


class UnitRig:
    """Loads and finishes one unit of a model that serves nobody, with any content. Between runs the unit takes no memory."""

    def __init__(self, unit: Unit, load_weights: LoadWeights, learned: LearnedLoader, catalog: Catalog) -> None:
        """Loads zeros once, so that constants which the loader writes beside the tensors are in place."""
        self.unit = unit
        self._load_weights = load_weights
        self._homes = {name: learned.homes[name] for name in unit.names if name in learned.homes}
        self._specs = {name: catalog[name] for name in unit.names}
        self._undo: StateUndo | None = StateUndo(unit.reach())
        """Puts back what the last run changed; None once it did."""
        self._hollow: HollowTensors | None = None
        self._load((name, np.zeros(spec.num_elements, spec.word_dtype)) for name, spec in self._specs.items())
        bases = {storage.key: raw_bytes(storage.words(1)) for storage in unit.storages}
        self._base = {key: base for key, base in bases.items() if base.any()}
        self.reached = Reached()
        """What hung on the unit after the last run."""

    @property
    def placed(self) -> tuple[str, ...]:
        """Tensors whose elements the loader moves without changing them."""
        return tuple(self._homes)

    @property
    def computed(self) -> tuple[str, ...]:
        """Tensors whose values the loader computes with."""
        return tuple(name for name in self.unit.names if name not in self._homes)

    def claims(self) -> list[Claim]:
        """What each placed tensor takes of load-time storages."""
        return claims_of_homes(self._homes)

    def held(self, name: str) -> NDArray[np.bool_]:
        """Which elements of a placed tensor are loaded on this rank, shape [elements]."""
        held = np.zeros(self._specs[name].num_elements, bool)
        for home in self._homes[name]:
            for piece in home.pieces:
                strided(held, piece.canonical)[...] = True
        return held

    def run(
        self, words: Mapping[str, Words], *, during: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> dict[str, RawBytes]:
        """Load these canonical words (zeros where there are none), run the post-load steps, and read every storage.

        Args:
            words: by name.
            during: open while the steps run.

        Returns:
            The bytes of each storage that hangs on the unit, by the path of the first tensor that lies in it.

        Raises:
            RejectedError: the loader or a step failed.
        """
        self.make_ready()
        for storage in self.unit.storages:
            storage.words(1).copy_(torch.from_numpy(self.content(storage, words)))
        self._load((name, words[name]) for name in self.computed if name in words)
        try:
            with torch.no_grad(), during():
                for step in self.unit.runs:
                    step()
        except Exception as error:  # the engine's code
            raise RejectedError(f"the post-load step fails on a probe: {type(error).__name__}: {error}") from error
        self.reached = self.unit.reach()
        return {path: raw_bytes(_whole_storage(tensor)) for path, tensor in _first_of_storage(self.reached.tensors)}

    def content(self, storage: ModelStorage, words: Mapping[str, Words]) -> RawBytes:
        """What a load of these canonical words leaves in one load-time storage, computed tensors aside."""
        base = self._base.get(storage.key)
        content = np.zeros(storage.nbytes, np.uint8) if base is None else base.copy()
        for name, homes in self._homes.items():
            if name in words:
                _scatter(content, storage, homes, words[name])
        return content

    def release(self) -> None:
        """Put the modules back, and free what they hold until the next run."""
        if self._undo is not None:
            self._undo.restore()
        self._undo, self.reached = None, Reached()
        if self._hollow is None:
            tensors = self.unit.reach().tensors.values()
            self._hollow = HollowTensors(tensors, (storage.raw for storage in self.unit.storages))

    def make_ready(self) -> None:
        """Bring the modules into the state in which a load finds them.

        What others changed since the last release, in tables that the modules share with them, stays as it is.
        """
        if self._hollow is not None:
            self._hollow.refill()
            self._hollow = None
        if self._undo is not None:
            self._undo.restore()
        else:
            self._undo = StateUndo(self.unit.reach())

    def _load(self, words: Iterable[tuple[str, Words]]) -> None:
        pairs = [(name, tensor_from_words(content.copy(), self._specs[name])) for name, content in words]
        if not pairs:
            return
        try:
            with torch.no_grad():
                self._load_weights(iter(pairs))
        except Exception as error:  # the engine's code
            raise RejectedError(
                f"the loader does not take the tensors of {', '.join(self.unit.roots)} alone: {type(error).__name__}: {error}"
            ) from error


def _first_of_storage(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for path, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        if tensor.numel() and address not in seen:
            seen.add(address)
            yield path, tensor


def _whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def raw_bytes(flat: torch.Tensor) -> RawBytes:
    """A host copy of a flat tensor of bytes, which shares no memory with numpy: torch could not free its storage then."""
    raw = np.empty(flat.numel(), np.uint8)
    torch.from_numpy(raw).copy_(flat.detach())
    return raw


def _scatter(content: RawBytes, storage: ModelStorage, homes: Sequence[Home], words: Words) -> None:
    """Write a canonical tensor's words where the loader puts them."""
    for home in homes:
        if home.storage.key != storage.key:
            continue
        flat = content[: content.size // home.width * home.width].view(WORDS[home.width])
        for piece in home.pieces:
            values = strided(words, piece.canonical)
            if piece.cast is Cast.WIDEN:
                values = values.astype(WORDS[home.width]) << WORDS[home.width].type(16)
            strided(flat, piece.storage)[...] = values
