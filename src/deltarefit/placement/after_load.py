"""What an engine does to weights after its loader wrote them, as the engine's adapter hands it in.

Only the adapter knows how its engine finishes a load. What this room needs of it is a fresh model, the loader, and the steps
between loading and serving, each with the modules that it works on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["AfterLoad", "PostLoadStep"]


@dataclass(frozen=True, slots=True, eq=False)
class PostLoadStep:
    """One step of an engine's post-load work on a model that was just loaded."""

    module: torch.nn.Module
    """Everything that the step reads and changes hangs on this module: its tensors, its children, its helper objects."""
    run: Callable[[], None]
    """Carries the step out. Must give the same result each time the module is back in the state that a load leaves."""


class AfterLoad(Protocol):
    """An engine's way from a checkpoint to a model that serves. Run in the serving process, never on serving weights."""

    def build(self) -> torch.nn.Module:
        """A fresh model, laid out as the loader expects it, on which nothing was loaded. Serves nobody.

        Its modules and their helper objects must not be shared with the model that serves.
        """

    def load(self, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """The engine's own loader, on a model that ``build`` made."""

    def steps(self, model: torch.nn.Module) -> Sequence[PostLoadStep]:
        """All post-load steps of a model that ``build`` made, in the engine's order. Modules in no step stay as loaded."""
