"""The catalog of a transformers model from its configuration alone: no weights are made."""

from __future__ import annotations

from pathlib import Path

import torch

from deltarefit.canonical import Catalog
from deltarefit.errors import RejectedError
from deltarefit.integrations.torch.export import exporter_of, map_export
from deltarefit.integrations.torch.local import local_tensors

__all__ = ["catalog_of_config"]


def catalog_of_config(path: Path) -> Catalog:
    """What ``save_pretrained`` of a model with this ``config.json`` (or its directory) would write.

    Raises:
        RejectedError: transformers is not installed, or cannot build the model.
    """
    try:
        import transformers
    except ImportError as error:
        raise RejectedError(
            "reading a model's configuration needs transformers: pip install 'deltarefit[transformers]'"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        kind = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
        dtype = getattr(config, "dtype", None) or torch.bfloat16
        with torch.device("meta"):
            model = kind(config) if kind is not None else transformers.AutoModelForCausalLM.from_config(config)
        model = model.to(dtype)
    except (ValueError, OSError, ImportError, KeyError, TypeError) as error:
        raise RejectedError(f"{path}: transformers cannot build a model from it: {error}") from error
    tensors = local_tensors(model, needs_data=False)
    exporter = exporter_of(model, tensors)
    return Catalog(map_export(exporter, tensors, exporter.kept, check=False).specs.values())
