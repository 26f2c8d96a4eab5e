"""Several modules that one commit refits together: a policy and its speculative draft, or a multi-token-prediction head."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from deltarefit.errors import RejectedError

__all__ = ["JointModel", "Target"]

Weights = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Target:
    """One module of a ``JointModel``, with its own loader."""

    module: torch.nn.Module
    load_weights: Callable[[Weights], object]
    prefix: str = ""
    """Canonical names that begin with it are this target's, and reach its loader without it. Targets with the empty prefix
    share a checkpoint: each is offered all names that no other prefix claims, and takes what it knows."""


class JointModel(torch.nn.Module):
    """A module for ``Receiver.attach(joint, load_weights=joint.load_weights, ...)`` that hands each target its tensors.

    Storage that targets share, such as an embedding, is one storage here too, and changed once.
    """

    def __init__(self, targets: Mapping[str, Target]) -> None:
        """``targets``: by a name for people; parameters are reported as ``name.parameter``.

        Raises:
            RejectedError: there is no target, a prefix begins with another, or a name cannot be a module's.
        """
        super().__init__()
        if not targets or any(not name.isidentifier() for name in targets):
            raise RejectedError(f"joint model of targets {sorted(targets)}: expected one or more, named like variables")
        prefixes = sorted({target.prefix for target in targets.values()} - {""})
        for short, long in itertools.pairwise(prefixes):
            if long.startswith(short):
                raise RejectedError(f"joint model: prefix {long!r} begins with prefix {short!r}; no name may have two owners")
        self._targets = dict(targets)
        self._prefixes = tuple(prefixes)
        for name, target in targets.items():
            self.add_module(name, target.module)

    def load_weights(self, weights: Weights) -> set[str]:
        """Load canonical tensors, each through the loader of every target that it belongs to.

        Returns the canonical names that loaders reported as loaded, where they report any.
        """
        pairs = list(weights)
        loaded: set[str] = set()
        for target in self._targets.values():
            own = [(name[len(target.prefix) :], tensor) for name, tensor in pairs if self._prefix_of(name) == target.prefix]
            if not own:
                continue
            reported = target.load_weights(own)
            if isinstance(reported, set | frozenset | list | tuple):
                loaded.update(f"{target.prefix}{name}" for name in reported)
        return loaded

    def _prefix_of(self, name: str) -> str:
        return next((prefix for prefix in self._prefixes if name.startswith(prefix)), "")
