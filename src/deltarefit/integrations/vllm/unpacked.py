"""The CPU switch: keep weights in the layout that the loader wrote, so that they can be changed in place.

On CPU, vLLM's post-load step moves linear weights into oneDNN, AMX or zentorch handles and leaves empty parameters behind,
keeps a second packed copy of the embeddings' weights, and replaces expert and convolution weights by packed ones. A refit in
place would then write to dead or permuted storage. There is no setting that turns this off (vLLM 0.32), hence this module.

While a model is loaded for our backend, linear layers get torch's plain matrix product, and the weights of experts and of
short convolutions are packed anew for each forward pass, by vLLM's own functions. That costs speed, on CPU only: on other
platforms this module does nothing.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
    with ExitStack() as undo:
        try:
            _switch(undo)
        except (ImportError, AttributeError) as error:
            undo.close()
            _log.warning("this vLLM packs CPU weights by means unknown here (%s); setting up refits will be refused", error)
        yield


def _switch(undo: ExitStack) -> None:
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    experts = cpu_moe.CPUUnquantizedExperts
    _replace(undo, utils, "dispatch_cpu_unquantized_gemm", _use_plain_product)
    process = _pack_on_use(experts.process_weights_after_loading, cpu_moe.cpu_prepack_moe_weight)
    _replace(undo, experts, "process_weights_after_loading", process)
    for name in ("causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu"):
        setattr(ops, name, _convolve_packed(getattr(ops, name), ops.causal_conv1d_weight_pack))
    _log.info("CPU weights are kept in load format for in-place refits; forward passes are slower than with packed weights")


def _replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


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


def _convolve_packed(convolve: Callable[..., Any], pack: Callable[..., Any]) -> Callable[..., Any]:
    """A convolution that also takes weights as loaded, [channels, 1, width], where the caller claims that they are packed.

    Stays in place after loading: packed weights have two dimensions and pass through, so other engines are not affected. Left
    out, gated delta nets (Qwen3-Next) would read unpacked bits as packed ones and answer nonsense without an error.
    """
    if getattr(convolve, "packs_for_deltarefit", False):
        return convolve
    signature = inspect.signature(convolve)

    @functools.wraps(convolve)
    def convolve_packed(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        weight = call.arguments["weight"]
        if call.arguments["is_weight_packed"] and weight.dim() == 3:
            call.arguments["weight"] = pack(weight.reshape(weight.size(0), weight.size(2)).contiguous())
        return convolve(*call.args, **call.kwargs)

    convolve_packed.packs_for_deltarefit = True  # type: ignore[attr-defined]
    return convolve_packed
