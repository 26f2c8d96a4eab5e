"""Finds the integration that fits what the user hands in, by name, so that nothing below imports one.

The choice follows the module that the object's class comes from; it never looks at names of models or layers.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from deltarefit.errors import RejectedError

__all__ = ["engine_integration", "source_integration"]

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
        f"Receiver.attach got a {type(target).__module__}.{type(target).__qualname__}: expected a vLLM engine, or any torch "
        "module together with its loader: Receiver.attach(model, load_weights=model.load_weights, run=...)"
    )


def source_integration(model: Any) -> ModuleType:
    """The integration for a model in training.

    Raises:
        RejectedError: it is no model that an integration knows.
    """
    first = model[0] if isinstance(model, list) and model else model
    roots = _roots(first)
    for root in roots:
        if root in _SOURCES:
            return _integration(_SOURCES[root])
    if "torch" in roots:
        return _integration("fsdp" if _has_sharded_parameter(first) else "torch")
    raise RejectedError(
        f"Publisher got a {type(model).__module__}.{type(model).__qualname__}: expected a torch module (plain, DDP, FSDP2) or "
        "a list of Megatron model chunks; other sources implement deltarefit.source.SourceAdapter"
    )


def _has_sharded_parameter(model: Any) -> bool:
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
