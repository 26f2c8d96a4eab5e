"""Sources in plain PyTorch: modules, data-parallel modules and transformers models; the default process group.

May import everything below ``runtime`` and torch; transformers only where the caller's process already uses it.
"""

from __future__ import annotations

from deltarefit.integrations.torch.adapter import TorchAdapter, source_adapter, torch_adapter
from deltarefit.integrations.torch.collective import TorchCollective, default_collective
from deltarefit.integrations.torch.config import catalog_of_config
from deltarefit.integrations.torch.steps import write_guard

SOURCE_OPTIONS = ("manifest", "export", "export_by_layer")
"""Arguments of Publisher that ``source_adapter`` takes."""

__all__ = [
    "SOURCE_OPTIONS",
    "TorchAdapter",
    "TorchCollective",
    "catalog_of_config",
    "default_collective",
    "source_adapter",
    "torch_adapter",
    "write_guard",
]
