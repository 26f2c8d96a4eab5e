"""Finds the integration that fits what the user hands in, by name, so that nothing below imports one.

The choice follows the module that the object's class comes from; it never looks at names of models or layers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from deltarefit.canonical import Catalog
from deltarefit.errors import RejectedError
from deltarefit.placement.after_load import AfterLoad
from deltarefit.placement.inputs import LoadWeights
from deltarefit.receiver import RankReceiver, ReceiverSettings
from deltarefit.source import Collective, JointAdapter, SourceAdapter

__all__ = [
    "TrainingSide",
    "WriteGuard",
    "catalog_of_config",
    "engine_integration",
    "rank_receiver",
    "set_options",
    "source_adapter",
    "source_integration",
    "training_side",
    "write_guard",
]

_ENGINES: Mapping[str, str] = {"vllm": "vllm", "sglang": "sglang"}
_SOURCES: Mapping[str, str] = {"megatron": "megatron"}


def _roots(target: Any) -> list[str]:
    """Top-level packages of the object's class and its bases, most derived first."""
    return [kind.__module__.partition(".")[0] for kind in type(target).__mro__]


def _integration(name: str) -> ModuleType:
    return importlib.import_module(f"deltarefit.integrations.{name}")


def engine_integration(target: Any) -> ModuleType:
    """The integration for a rollout engine.

    Raises:
        RejectedError: no integration knows such an object.
    """
    for root in _roots(target):
        if root in _ENGINES:
            return _integration(_ENGINES[root])
    raise RejectedError(
        f"Receiver.attach got a {type(target).__module__}.{type(target).__qualname__}: expected a vLLM or SGLang engine, or "
        "any torch module together with its loader: Receiver.attach(model, load_weights=model.load_weights, run=...)"
    )


def rank_receiver(
    model: Any, load_weights: LoadWeights, *, settings: ReceiverSettings | None = None, after_load: AfterLoad | None = None
) -> RankReceiver:
    """The receiver of a bare module. An engine whose models keep state that only it knows of brings its own, unless the caller
    says what was done after loading."""
    for root in _roots(model) if after_load is None else ():
        make = getattr(_integration(_ENGINES[root]), "rank_receiver", None) if root in _ENGINES else None
        if make is not None:
            receiver: RankReceiver = make(model, load_weights, settings=settings)
            return receiver
    return RankReceiver(model, load_weights, settings=settings, after_load=after_load)


def source_integration(model: Any) -> ModuleType:
    """The integration for a model in training.

    Raises:
        RejectedError: it is no model that an integration knows.
    """
    if isinstance(model, Mapping) and model:
        model = next(iter(model.values()))
    first = model[0] if isinstance(model, list) and model else model
    roots = _roots(first)
    for root in roots:
        if root in _SOURCES:
            return _integration(_SOURCES[root])
    if "torch" in roots and hasattr(first, "parameters"):
        return _integration("fsdp" if _has_sharded_parameter(first) else "torch")
    raise RejectedError(
        f"Publisher got a {type(model).__module__}.{type(model).__qualname__}: expected a torch module (plain, DDP, FSDP2), "
        "a list of Megatron model chunks, or several such by the prefix of their names; other sources implement "
        "deltarefit.source.SourceAdapter"
    )


def set_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a caller set."""
    return {name: value for name, value in options.items() if value is not None and value is not False}


def source_adapter(integration: ModuleType, model: Any, collective: Collective, options: Mapping[str, Any]) -> SourceAdapter:
    """The integration's adapter for the model, with those of the caller's options that are set.

    Raises:
        RejectedError: the integration knows no such option, or the model cannot be mapped.
    """
    given = set_options(options)
    if isinstance(model, Mapping):
        if given:
            raise RejectedError(
                f"Publisher got {', '.join(given)} for several models; make an adapter of each and give "
                "adapter=deltarefit.source.JointAdapter({prefix: adapter, ...})"
            )
        return JointAdapter({prefix: source_adapter(source_integration(m), m, collective, {}) for prefix, m in model.items()})
    if unknown := sorted(given.keys() - set(integration.SOURCE_OPTIONS)):
        raise RejectedError(
            f"Publisher got {', '.join(unknown)} for a {type(model).__module__}.{type(model).__qualname__}: its integration "
            f"({integration.__name__}) takes {', '.join(integration.SOURCE_OPTIONS)}"
        )
    if isinstance(given.get("manifest"), str):
        given["manifest"] = Path(given["manifest"])
    return integration.source_adapter(model, collective=collective, **given)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class TrainingSide:
    """What one training rank refits from."""

    adapter: SourceAdapter
    collective: Collective
    own_collective: Any
    """The collective, if it was made here: the caller's to close. Else None."""


def training_side(
    model: Any,
    adapter: SourceAdapter | None,
    collective: Collective | None,
    options: Mapping[str, Any],
    *,
    group_timeout_s: float,
) -> TrainingSide:
    """The caller's adapter and collective, or those of the integration that knows the model.

    Raises:
        RejectedError: no integration knows it, it cannot be mapped, or the caller gives both an adapter and options for one.
    """
    own_collective = None
    if adapter is None or collective is None:
        integration = source_integration(model)
        if collective is None:
            collective = own_collective = integration.default_collective(timeout_s=group_timeout_s)
    if adapter is None:
        adapter = source_adapter(integration, model, collective, options)
    elif given := set_options(options):
        raise RejectedError(f"Publisher got an adapter and {', '.join(given)}; give these to the adapter itself")
    return TrainingSide(adapter, collective, own_collective)


def catalog_of_config(path: Path) -> Catalog:
    """The catalog of a model from its configuration alone.

    Raises:
        RejectedError: transformers is not installed, or cannot build the model.
    """
    return _integration("torch").catalog_of_config(path)  # type: ignore[no-any-return]


def _has_sharded_parameter(model: Any) -> bool:
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


class WriteGuard(Protocol):
    """Keeps a model from being changed while it is published in the background."""

    count_writes: Callable[[], object] | None
    """Tells two moments apart if the framework wrote to a parameter between them; None: it does not count."""

    def refuse(self, why: str) -> None:
        """Until ``allow``, let optimizer steps over the model fail."""

    def allow(self) -> None:
        """Let them go on. May be called again."""


class _NoGuard:
    """For frameworks that offer no hook: changes are found by comparing, at the commit."""

    count_writes: Callable[[], object] | None = None

    def refuse(self, why: str) -> None: ...

    def allow(self) -> None: ...


def write_guard(model: Any) -> WriteGuard:
    """The guard of the integration that knows the model, if there is one."""
    if isinstance(model, Mapping):
        model = [module for part in model.values() for module in (part if isinstance(part, list) else [part])]
    try:
        make = getattr(source_integration(model), "write_guard", None)
    except RejectedError:
        make = None
    if make is None:
        return _NoGuard()
    guard: WriteGuard = make(model)
    return guard
