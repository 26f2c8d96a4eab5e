"""The CPU switch: keep weights in the layout that the loader wrote, so that they can be changed in place.

On CPU, vLLM's post-load step moves linear weights into oneDNN, AMX or zentorch handles and leaves empty parameters behind,
keeps a second packed copy of the embeddings' weights, and replaces expert and convolution weights by packed ones. A refit in
place would then write to dead or permuted storage. There is no setting that turns this off (vLLM 0.32), hence this module.

While a model is loaded for our backend, linear layers get torch's plain matrix product, convolutions stay as they are, and
experts are packed anew for each forward pass. That costs speed, on CPU only, and nothing elsewhere: on other platforms this
module does nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["KEEP_PREPACK", "load_format_kept"]

KEEP_PREPACK = "DELTAREFIT_VLLM_KEEP_PREPACK"
"""Environment variable: set to 1, it leaves vLLM's CPU packing on. The backend will then refuse to refit."""

_log = logging.getLogger(__name__)


@contextmanager
def load_format_kept() -> Iterator[None]:
    """While open, vLLM's post-load step packs nothing on CPU. Does nothing on other platforms, or with ``KEEP_PREPACK``."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or os.environ.get(KEEP_PREPACK, "") not in {"", "0"}:
        yield
        return
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    experts = cpu_moe.CPUUnquantizedExperts
    dispatch, process = utils.dispatch_cpu_unquantized_gemm, experts.process_weights_after_loading
    utils.dispatch_cpu_unquantized_gemm = _use_plain_product
    experts.process_weights_after_loading = _pack_on_use(process, cpu_moe.cpu_prepack_moe_weight)
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = dispatch
        experts.process_weights_after_loading = process
    _log.info("CPU weights are kept in load format for in-place refits; matrix products are slower than with packing")


def _use_plain_product(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _leave_alone(layer: Any) -> None:
    """The post-load step of experts whose weights stay as loaded."""


def _pack_on_use(process: Callable[..., None], pack: Callable[..., Any]) -> Callable[..., None]:
    """A replacement for the experts' post-load step that leaves the weights alone and packs copies in each forward pass."""

    def keep(experts: Any, layer: Any) -> None:
        width = experts.moe_config.intermediate_size_per_partition
        if experts._padded_intermediate_size(experts.moe_config) != width:
            process(experts, layer)  # the kernel needs padded weights: packed for good, and refused when a refit is set up
            return
        experts._use_zentorch = False
        apply = experts.apply

        def apply_packed(output: Any, hidden_states: Any, w1: Any, w2: Any, *args: Any, **kwargs: Any) -> None:
            apply(output, hidden_states, pack(w1, experts.isa), pack(w2, experts.isa), *args, **kwargs)

        experts.apply = apply_packed
        experts.process_weights_after_loading = _leave_alone  # a reload runs this step once more, outside our switch

    return keep
