"""What a caller gives as a source's manifest."""

from __future__ import annotations

from pathlib import Path

from deltarefit.canonical import Catalog
from deltarefit.offline import catalog_of_checkpoint

__all__ = ["as_catalog"]


def as_catalog(manifest: Catalog | Path | None) -> Catalog | None:
    """The manifest, read if it is a checkpoint's path. Raises RejectedError."""
    return catalog_of_checkpoint(manifest) if isinstance(manifest, Path) else manifest
