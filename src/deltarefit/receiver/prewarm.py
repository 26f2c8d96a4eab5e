"""Prewarm: everything about a model and its loader that must be known before the first byte is sent (paper 6.1, A.2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.errors import RefitError, RejectedError
from deltarefit.placement.after_load import AfterLoad
from deltarefit.placement.inputs import LoadWeights
from deltarefit.placement.layers import learn_layers, view_of
from deltarefit.placement.learn import LearnedLoader, learn_loader
from deltarefit.placement.run import places_of, run_loader
from deltarefit.placement.storages import StorageMap, state_tensors
from deltarefit.receiver.after_load import AfterLoadAssembly, narrowed
from deltarefit.receiver.assembly import Assembly, Prewarmed, refusal
from deltarefit.receiver.guard import ModelGuard
from deltarefit.receiver.report import matches
from deltarefit.receiver.routes import aliases_and_collisions, claims_of
from deltarefit.receiver.settings import ApplyPath, ReceiverSettings
from deltarefit.receiver.trial import try_loader
from deltarefit.receiver.unreached import lacking, tensor_places, unreached_elements

__all__ = ["prewarm_after_load", "prewarm_model"]

_MAX_CULPRITS = 3


def prewarm_model(model: torch.nn.Module, load_weights: LoadWeights, catalog: Catalog, settings: ReceiverSettings) -> Prewarmed:
    """Watch the loader, learn all placements, and refuse what cannot be refit.

    Raises:
        RejectedError: each tensor that cannot be refit with its reason. The model is as it was, unless the text says otherwise.
    """
    tensors = state_tensors(model)
    _refuse_packed(tensors, settings)
    storages = StorageMap(tensors)
    guard = ModelGuard(model, storages, snapshot_nbytes=settings.snapshot_nbytes)
    try:
        learned = learn_loader(load_weights, storages, catalog)
        if settings.path is ApplyPath.SCRATCH:
            _send_through_loader(learned)
        generator = np.random.default_rng(1)
        trials = {
            name: try_loader(load_weights, storages, catalog[name], opaque, generator)
            for name, opaque in learned.opaque.items()
            if name not in learned.refused
        }
    finally:
        problems = _bypassing(guard, load_weights, storages, catalog)
    if problems:
        raise refusal(problems, "nothing was changed" if guard.can_restore else "bytes of the model may be spoilt")
    return Assembly(model, storages, catalog, settings, learned, trials).build(load_weights)


def prewarm_after_load(
    model: torch.nn.Module, after_load: AfterLoad, catalog: Catalog, settings: ReceiverSettings
) -> Prewarmed:
    """The same for a model whose weights are no longer as its loader left them. Takes a second model's memory while it runs.

    Raises:
        RejectedError: each tensor that cannot be refit with its reason. The model is as it was.
    """
    if settings.path is ApplyPath.SCRATCH:
        raise RejectedError("ApplyPath.SCRATCH goes through the loader, which no longer fits weights that post-load packed")
    twin = _second_model(after_load)
    tensors = state_tensors(twin)
    storages = StorageMap(tensors)

    def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> object:
        return after_load.load(twin, pairs)

    guard = ModelGuard(twin, storages, snapshot_nbytes=settings.snapshot_nbytes)
    try:
        learned = learn_loader(load, storages, catalog)
        aliases = take_aliases(learned)
        learned.refused |= narrowed(learned, catalog)
        generator = np.random.default_rng(1)
        for name, opaque in learned.opaque.items():
            trial = try_loader(load, storages, catalog[name], opaque, generator)
            if trial.refusal is not None and not matches(name, settings.may_ignore):
                learned.refused.setdefault(name, trial.refusal)
    finally:
        problems = _bypassing(guard, load, storages, catalog)
    claims = claims_of(learned)
    problems |= aliases_and_collisions(learned, claims, lambda name: matches(name, settings.may_ignore))[1]
    kept = {name for name, tensor in state_tensors(model).items() if tensor.numel()}
    places = tensor_places(twin, storages)
    missing = lacking(twin, places, unreached_elements(places, claims), settings.may_lack)
    problems |= {name: reason for name, reason in missing.items() if name in kept}
    if problems or learned.refused:
        raise refusal({**learned.refused, **problems})
    views = {name: view_of(tensor) for name, tensor in tensors.items()}
    layers = learn_layers(twin, after_load, storages, learned, catalog)
    return AfterLoadAssembly(model, catalog, settings, learned, layers, views).build(aliases)


def _second_model(after_load: AfterLoad) -> torch.nn.Module:
    try:
        return after_load.build()
    except RefitError:
        raise
    except Exception as error:  # the engine's code; most likely there is no memory left beside what serves
        raise RejectedError(
            "post-load changed this model's weights, and the second model on which to learn how could not be built: "
            f"{type(error).__name__}: {error}"
        ) from error


def take_aliases(learned: LearnedLoader) -> dict[str, str]:
    """Take tensors out of what was learnt that share all their places with a later one: only that one's bits remain."""
    last: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name, homes in learned.homes.items():
        places = places_of(homes)
        if (earlier := last.get(places)) is not None:
            aliases[earlier] = name
        last[places] = name
    for name in aliases:
        del learned.homes[name]
    return {name: _last_of(aliases, name) for name in aliases}


def _last_of(aliases: Mapping[str, str], name: str) -> str:
    while name in aliases:
        name = aliases[name]
    return name


def _send_through_loader(learned: LearnedLoader) -> None:
    """On the scratch path nothing takes a temporary apart: such tensors are opaque (paper A.2, Table A.2)."""
    for name, writes in learned.indirect.items():
        learned.opaque[name] = writes
        learned.homes.pop(name, None)


def _refuse_packed(tensors: Mapping[str, torch.Tensor], settings: ReceiverSettings) -> None:
    packed = {
        name: "has shape (0,): the engine packed this weight elsewhere after loading, so it cannot be refit in place; switch "
        "packing off"
        for name, tensor in tensors.items()
        if tuple(tensor.shape) == (0,) and not matches(name, settings.may_be_empty)
    }
    if packed:
        raise refusal(packed)


def _bypassing(guard: ModelGuard, load_weights: LoadWeights, storages: StorageMap, catalog: Catalog) -> dict[str, str]:
    """What changed although the hook let no write through; changes are put back where that is possible."""
    moved, changed = guard.moved(), guard.changed()
    if not moved and not changed:
        return {}
    guard.restore()
    problems = dict.fromkeys(moved, "the loader moves or replaces this tensor; its storage must stay where it is")
    after = "its bytes were put back" if guard.can_restore else "its bytes are spoilt: load the model again before it serves"
    for storage in changed:
        problems.setdefault(
            storage.key, f"the loader writes to it behind the dispatch hook (another thread, or raw memory); {after}"
        )
    if guard.can_restore:
        found: dict[str, str] = {}
        _culprits(guard, load_weights, storages, list(catalog.values()), found)
        problems.update(found)
    return problems


def _culprits(
    guard: ModelGuard, load_weights: LoadWeights, storages: StorageMap, specs: Sequence[TensorSpec], found: dict[str, str]
) -> None:
    """Which canonical tensors do it, by halving; the first few."""
    if len(found) >= _MAX_CULPRITS or not specs:
        return
    run_loader(load_weights, storages, specs)
    moved, changed = guard.moved(), guard.changed()
    if not moved and not changed:
        return
    guard.restore()
    if len(specs) == 1:
        where = ", ".join(moved[:3] or [storage.key for storage in changed[:3]])
        how = "moves or replaces" if moved else "writes behind the dispatch hook to"
        found[specs[0].name] = f"its loader {how} {where}"
        return
    half = len(specs) // 2
    _culprits(guard, load_weights, storages, specs[:half], found)
    _culprits(guard, load_weights, storages, specs[half:], found)
