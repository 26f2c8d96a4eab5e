"""Speculative drafts and multi-token-prediction heads: found as vLLM loads them, refitted with the policy in one commit.

vLLM hands a backend the policy's module alone. A draft's own names are the policy's over again, so they get a prefix, the one
that vLLM itself gives them elsewhere; a draft read from the policy's own checkpoint shares its names instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltarefit.canonical import Catalog
from deltarefit.errors import RejectedError
from deltarefit.receiver import Target

__all__ = ["DRAFT_PREFIX", "POLICY", "Making", "check_names", "making_of", "note_making", "remember", "targets_of"]

POLICY = "policy"
DRAFT_PREFIX = "draft."
"""What canonical names of a draft with a checkpoint of its own begin with, as in vLLM's own names for its parameters."""


@dataclass(frozen=True, slots=True)
class Making:
    """What vLLM made a model from."""

    vllm_config: Any
    model_config: Any
    """None for the one of ``vllm_config``."""
    prefix: str


@dataclass(frozen=True, slots=True)
class _Loaded:
    transfer_config: Any
    """The engine's own weight-transfer configuration: all its models are loaded under that one object."""
    checkpoint: str


_MAKINGS: weakref.WeakKeyDictionary[Any, Making] = weakref.WeakKeyDictionary()
_LOADED: weakref.WeakKeyDictionary[Any, _Loaded] = weakref.WeakKeyDictionary()


def note_making(model: Any, vllm_config: Any, model_config: Any, prefix: str) -> None:
    """Note what vLLM has just made a model from."""
    _MAKINGS[model] = Making(vllm_config, model_config, prefix)


def making_of(model: Any, vllm_config: Any) -> Making:
    """What a model was made from; the engine's configuration if nobody noted it."""
    return _MAKINGS.get(model) or Making(vllm_config, None, "")


def remember(model: Any, model_config: Any, transfer_config: Any) -> None:
    """Note a model that vLLM has just loaded for an engine with this backend."""
    _LOADED[model] = _Loaded(transfer_config, str(getattr(model_config, "model", "")))


def targets_of(policy: Any, checkpoint: str, transfer_config: Any) -> Mapping[str, Target]:
    """The policy, and whatever else was loaded in this process for the same engine: ``policy``, ``draft``, ``draft_2``, ...

    Without ``transfer_config`` the policy alone.
    """
    targets = {POLICY: Target(policy, policy.load_weights)}
    inside = set(policy.modules())
    for model, loaded in list(_LOADED.items()):
        if loaded.transfer_config is not transfer_config or model in inside:
            continue
        name = "draft" if len(targets) == 1 else f"draft_{len(targets)}"
        prefix = "" if loaded.checkpoint == checkpoint else DRAFT_PREFIX if name == "draft" else f"{name}."
        targets[name] = Target(model, model.load_weights, prefix)
    return targets


def check_names(targets: Mapping[str, Target], catalog: Catalog) -> None:
    """Refuse a catalog that leaves a draft out.

    Raises:
        RejectedError: no name is the draft's; the text says what to do.
    """
    for prefix in {target.prefix for target in targets.values()}:
        if not any(name.startswith(prefix) for name in catalog):
            raise RejectedError(
                f"this engine speculates with a draft of its own, and no canonical name begins with {prefix!r}: it would keep "
                f"its old weights. Publish it with the policy, Publisher({{'': policy, {prefix!r}: draft}}, ...), or leave it "
                "as it is: 'deltarefit receiver --keep-drafts', VllmEngine(..., refit_drafts=False)"
            )
