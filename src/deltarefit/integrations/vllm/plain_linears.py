"""The CPU switch: linear layers that compute with the weights that vLLM's loader wrote.

On CPU, vLLM's post-load step moves linear weights into oneDNN or zentorch handles, which nobody can look into, leaves empty
parameters behind, and keeps a second packed copy of the embeddings' weights. There is no setting that turns this off (vLLM
0.32), hence this module: while a model is loaded for our backend, its unquantised linear layers and embeddings get torch's
plain matrix product. Everything else is packed as vLLM packs it. On other platforms this module does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["plain_linears"]

_log = logging.getLogger(__name__)

Dispatch = Callable[[Any, bool], None]


@contextmanager
def plain_linears() -> Iterator[None]:
    """While open, vLLM's post-load step leaves the weights of linear layers where they are on CPU."""
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    original: Dispatch | None = getattr(utils, "dispatch_cpu_unquantized_gemm", None)
    if not current_platform.is_cpu():
        yield
    elif original is None:
        _log.warning("this vLLM packs CPU weights by means unknown here; refits may be refused")
        yield
    else:
        utils.dispatch_cpu_unquantized_gemm = plain_for_matrices(original)
        try:
            yield
        finally:
            utils.dispatch_cpu_unquantized_gemm = original


def plain_for_matrices(original: Dispatch) -> Dispatch:
    """vLLM's choice of a matrix product, for all layers that have a matrix replaced by torch's."""

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:  # a convolution: its packed weights lie in the open
            original(layer, remove_weight)

    return dispatch
