"""Sources in Megatron: any mixture of tensor, expert, pipeline, context and data parallelism, through Megatron Bridge's tasks.

May import everything below ``runtime``, torch and the plain torch integration. Megatron itself is imported only where the
caller gives no bridge; everything else is read from objects that the caller made.
"""

from __future__ import annotations

from deltarefit.integrations.megatron.adapter import MegatronAdapter, megatron_adapter, source_adapter
from deltarefit.integrations.megatron.facts import TaskFacts, facts_of
from deltarefit.integrations.megatron.geometry import Geometry, geometry_of
from deltarefit.integrations.torch.collective import TorchCollective, default_collective

SOURCE_OPTIONS = ("manifest", "bridge")
"""Arguments of Publisher that ``source_adapter`` takes."""

__all__ = [
    "SOURCE_OPTIONS",
    "Geometry",
    "MegatronAdapter",
    "TaskFacts",
    "TorchCollective",
    "default_collective",
    "facts_of",
    "geometry_of",
    "megatron_adapter",
    "source_adapter",
]
