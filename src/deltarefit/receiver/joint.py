"""Several modules that one commit refits together: a policy and its speculative draft, or a multi-token-prediction head."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from deltarefit.errors import RejectedError
from deltarefit.placement.after_load import AfterLoad, PostLoadStep

__all__ = ["JointAfterLoad", "JointModel", "Target"]

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


class JointAfterLoad:
    """The post-load steps of a ``JointModel``, from those of its targets.

    What its targets share, such as an embedding that a draft took over from the policy after both were loaded, a second model
    built here shares as well.
    """

    def __init__(self, model: JointModel, targets: Mapping[str, Target], parts: Mapping[str, AfterLoad]) -> None:
        """``model`` serves, ``targets`` it was made of; ``parts``: by the same names, the engine's way to load each."""
        self._shared = _shared_paths(model)
        self._prefixes = {name: target.prefix for name, target in targets.items()}
        self._parts = dict(parts)

    def build(self) -> JointModel:
        """A second joint model."""
        targets: dict[str, Target] = {}
        for name, part in self._parts.items():
            module = part.build()
            targets[name] = Target(module, functools.partial(part.load, module), self._prefixes[name])
        model = JointModel(targets)
        for path, first in self._shared:
            _share(model, path, first)
        return model

    def load(self, model: torch.nn.Module, weights: Weights) -> object:
        """Each target's own loader."""
        return model.load_weights(weights)  # type: ignore[operator]

    def steps(self, model: torch.nn.Module) -> Sequence[PostLoadStep]:
        """Those of all targets; of a module that several share once."""
        steps = [step for name, part in self._parts.items() for step in part.steps(model.get_submodule(name))]
        return list({id(step.module): step for step in steps}.values())


def _shared_paths(model: torch.nn.Module) -> list[tuple[str, str]]:
    """Paths of modules and parameters that are there under another path already, and that path; outermost first."""
    paths: list[tuple[str, str]] = []
    named = [*model.named_modules(remove_duplicate=False), *model.named_parameters(remove_duplicate=False)]
    first: dict[int, str] = {}
    for path, thing in named:
        known = first.setdefault(id(thing), path)
        inside = any(path.startswith(f"{outer}.") for outer, _ in paths)
        if known != path and not inside:
            paths.append((path, known))
    return paths


def _share(model: torch.nn.Module, path: str, first: str) -> None:
    """Put what is at ``first`` at ``path`` too."""
    thing: object = model
    for part in first.split("."):
        thing = getattr(thing, part)
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, thing)
