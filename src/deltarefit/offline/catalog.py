"""Names, dtypes and shapes of a checkpoint on disk, from its headers alone."""

from __future__ import annotations

from pathlib import Path

from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.offline.checkpoint import Checkpoint

__all__ = ["catalog_of_checkpoint"]


def catalog_of_checkpoint(path: Path) -> Catalog:
    """The catalog of a safetensors file, or of a checkpoint directory with or without an index. Reads no tensor.

    Raises:
        RejectedError: no checkpoint is there, it is ambiguous, breaks the format, or has a dtype without whole-byte elements.
    """
    with Checkpoint(path, tensors_only=True) as checkpoint:
        return Catalog(TensorSpec(name, tensor.dtype, tensor.shape) for name, (_, tensor) in checkpoint.tensors.items())
