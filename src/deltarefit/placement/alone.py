"""Units that post-load leaves as they were loaded: nearly all of an engine that packs its experts only.

They need no learning, which takes many loads and several times their memory: their tensors lie where the loader put them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltarefit.canonical import Catalog, Words
from deltarefit.placement.digits import random_words
from deltarefit.placement.overlap import colliding
from deltarefit.placement.reach import Reached
from deltarefit.placement.units import RawBytes, UnitRig, raw_bytes

__all__ = ["is_left_alone"]

_PASSES = 2
"""Loads of random bits that must lie in storage afterwards, and change nothing else: for what is read behind the hook."""


class _TouchWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its dispatch modes untyped
    """Notes whether any operation but a view takes a tensor of certain storages."""

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._addresses = {raw.data_ptr() for raw in storages if raw.nbytes()}
        self.is_touched = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping the hook for its compiler: nothing here is compiled, and importing that takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func.is_view and any(self._is_inside(value) for value in tree_leaves((args, kwargs))):
            self.is_touched = True
        return func(*args, **kwargs)

    def _is_inside(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self._addresses


def is_left_alone(rig: UnitRig, catalog: Catalog) -> bool:
    """Whether a unit's post-load steps neither read nor move any bit that the loader places.

    Raises:
        RejectedError: the loader or a step failed.
    """
    if rig.computed or colliding(rig.claims()):  # of what one tensor overwrites of another, nothing is left
        return False
    rig.make_ready()
    places = _places(rig, rig.unit.reach())
    generator = np.random.default_rng(3)
    beside: dict[str, RawBytes] = {}
    for turn in range(_PASSES):
        specs = [catalog[name] for name in rig.placed]
        words = {spec.name: random_words(spec.dtype, spec.num_elements, generator, turn=turn) for spec in specs}
        watch = _TouchWatch(storage.raw for storage in rig.unit.storages)
        outputs = rig.run(words, during=lambda watch=watch: watch)  # type: ignore[misc]
        now = _places(rig, rig.reached)
        is_moved = any(now.get(path) != place for path, place in places.items())
        if watch.is_touched or rig.reached.opaque or is_moved or not _is_as_loaded(rig, words):
            return False
        others = {path: raw for path, raw in outputs.items() if path not in now}
        if turn and not _are_equal(beside, others):
            return False
        beside = others
    return True


def _places(rig: UnitRig, reached: Reached) -> dict[str, tuple[object, ...]]:
    """By path, where tensors lie that share storage with loaded ones."""
    mine = {storage.raw.data_ptr() for storage in rig.unit.storages}
    return {
        path: (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        for path, tensor in reached.tensors.items()
        if tensor.untyped_storage().data_ptr() in mine
    }


def _is_as_loaded(rig: UnitRig, words: Mapping[str, Words]) -> bool:
    return all(np.array_equal(raw_bytes(storage.words(1)), rig.content(storage, words)) for storage in rig.unit.storages)


def _are_equal(first: Mapping[str, RawBytes], second: Mapping[str, RawBytes]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(raw, second[path]) for path, raw in first.items())
