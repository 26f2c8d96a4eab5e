"""vLLM's post-load steps, run on fresh layers beside the model that serves, so that what they do to weights can be learnt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from deltarefit.placement.after_load import PostLoadStep

__all__ = ["IGNORED", "UNFILLED", "VllmAfterLoad"]

IGNORED = ("*.weight_shape", "*.g_idx", "*.qzeros")
"""Canonical tensors that vLLM's post-load steps drop for some formats: shapes that it knows anyway, group indices in order, and
zero points of symmetric codes. Formats that use them keep them, and then these patterns are not asked (vLLM 0.32)."""

UNFILLED = ("*.w13_bias", "*.w2_bias")
"""Parameters that vLLM makes, as zeros, for experts whether or not a checkpoint has biases (vLLM 0.32, GPTQ)."""


class VllmAfterLoad:
    """Builds, loads and finishes models as the engine of this configuration did."""

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        *,
        model_config: Any = None,
        prefix: str = "",
        finishing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """What vLLM's ``initialize_model`` was given for the model that serves; ``finishing``: open around post-load steps."""
        self._config = vllm_config
        self._model_config = vllm_config.model_config if model_config is None else model_config
        self._prefix = prefix
        self._device = device
        self._finishing = finishing

    def build(self) -> torch.nn.Module:
        """A second model of the engine's configuration. Memory is taken only as it is written to."""
        from vllm.model_executor.model_loader.utils import initialize_model

        with self._loading(), self._device, _registers_apart(self._config.compilation_config):
            model: torch.nn.Module = initialize_model(
                vllm_config=self._config, model_config=self._model_config, prefix=self._prefix
            )
        return model.eval()

    def load(self, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """vLLM's own loader of the model."""
        with self._loading():
            return model.load_weights(weights)  # type: ignore[operator]

    def steps(self, model: torch.nn.Module) -> Sequence[PostLoadStep]:
        """One step for each outermost module with work to do; modules inside it are finished by the same call, as in vLLM."""
        busy = [module for module in model.modules() if _has_work(module)]
        inside = {id(child) for module in busy for child in module.modules() if child is not module}
        roots = [module for module in busy if id(module) not in inside]
        roots.sort(key=_is_late)
        steps = [PostLoadStep(module, lambda module=module: self._finish(module)) for module in roots]  # type: ignore[misc]
        if (whole := getattr(model, "process_weights_after_loading", None)) is not None:
            steps.append(PostLoadStep(model, lambda: self._finish_whole(whole)))
        return steps

    def _finish(self, module: torch.nn.Module) -> None:
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        holder = torch.nn.Module()  # what vLLM is given counts as the model, which has a post-load hook of another kind
        holder.layer = module
        with self._loading(), self._finishing():
            process_weights_after_loading(holder, self._model_config, self._device)

    def _finish_whole(self, hook: Callable[[], None]) -> None:
        with self._loading(), self._finishing():
            hook()

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """What vLLM's model loaders have around them. The device is the default only while they build: what loads and post-load
        steps make without naming one lies in host memory."""
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        with ExitStack() as stack:
            stack.enter_context(set_current_vllm_config(self._config))
            stack.enter_context(set_default_torch_dtype(self._model_config.dtype))
            yield


def _has_work(module: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    return isinstance(getattr(module, "quant_method", None), QuantizeMethodBase) or _is_late(module)


def _is_late(module: torch.nn.Module) -> bool:
    """Attention layers come after all others, for they read what those have unpacked."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return bool(is_deferred_attention_layer(module))


@contextmanager
def _registers_apart(compilation: Any) -> Iterator[None]:
    """Layers register themselves by name while they are made; a second model must not meet the first, nor replace it."""
    layers, experts = compilation.static_forward_context, list(compilation.static_all_moe_layers)
    compilation.static_forward_context = {}
    try:
        yield
    finally:
        compilation.static_forward_context = layers
        compilation.static_all_moe_layers[:] = experts
