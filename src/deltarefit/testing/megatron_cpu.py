"""Megatron models on the CPU, without CUDA or TransformerEngine: for tests and the demo only.

``prepare`` must be called before anything is imported from ``megatron``. It changes what other libraries see of torch in this
process, so never call it in a training job. Checked with megatron-core 0.19.2 and megatron-bridge 0.6.2 on Python 3.11 and
torch 2.13; the versions are pinned in ``requirements/megatron.txt``.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["is_installed", "make_model", "prepare"]

_NEEDS_TE = "megatron.bridge.peft.lora_layers"
"""The one module on the way to conversion that imports TransformerEngine without asking first."""


def is_installed() -> bool:
    """Whether Megatron Core and Bridge are there."""
    return all(importlib.util.find_spec(name) is not None for name in ("megatron", "megatron.core", "megatron.bridge"))


def prepare() -> None:
    """Make Megatron importable and its models constructible here. May be called again."""
    if any(isinstance(finder, _LoraFinder) for finder in sys.meta_path):
        return
    if not hasattr(typing, "override"):  # Python 3.11: one module wants 3.12's
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _LoraFinder())
    if not torch.cuda.is_available():
        _pretend_streams()


class _LoraFinder(importlib.abc.MetaPathFinder):
    """Gives one module stand-ins for TransformerEngine's classes while it runs, and only then.

    A stand-in that stayed would make Megatron Core believe that TransformerEngine is there.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        del target
        if fullname != _NEEDS_TE or importlib.util.find_spec("transformer_engine") is not None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                with _stand_ins():
                    run(module)

            loader.exec_module = exec_module
        return spec


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    never = type("NotInstalled", (), {})
    outer, inner = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    vars(inner).update(Linear=never, LayerNormLinear=never, ops=types.SimpleNamespace(Sequential=never))
    vars(outer).update(pytorch=inner)
    sys.modules.update({outer.__name__: outer, inner.__name__: inner})
    try:
        yield
    finally:
        sys.modules.pop(inner.__name__, None)
        sys.modules.pop(outer.__name__, None)


class _Stream:
    """A CUDA stream that does nothing: Megatron makes some while it constructs expert layers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        del args, options

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


def _pretend_streams() -> None:
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = _Stream
    cuda.current_stream = lambda *args, **options: _Stream()
    cuda.stream = lambda *args, **options: contextlib.nullcontext()
    tensor.cuda = lambda self, *args, **options: self


def _pretend_mamba() -> None:
    """Mamba layers refuse construction without the package of their kernels, which need CUDA."""

    class RMSNorm(torch.nn.Module):
        def __init__(self, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
            super().__init__()
            self.eps = eps
            place = {key: options.get(key) for key in ("device", "dtype")}
            self.weight = torch.nn.Parameter(torch.ones(hidden_size, **place))
            self.register_parameter("bias", None)

    def refuse(*args: Any, **options: Any) -> None:
        raise NotImplementedError("no Mamba kernels on the CPU")

    at = "mamba_ssm.ops.triton"
    modules = {name: types.ModuleType(name) for name in ("mamba_ssm", "mamba_ssm.ops", at)}
    modules |= {f"{at}.{name}": types.ModuleType(f"{at}.{name}") for name in ("layernorm_gated", "ssd_combined")}
    for module in modules.values():
        module.__path__ = []
    vars(modules[f"{at}.layernorm_gated"])["RMSNorm"] = RMSNorm
    vars(modules[f"{at}.ssd_combined"]).update(mamba_chunk_scan_combined=refuse, mamba_split_conv1d_scan_combined=refuse)
    sys.modules.update(modules)


def _hybrid_layers(config: Any = None) -> Any:
    """Core's own layers for hybrids, with torch's norms for TransformerEngine's."""
    from unittest import mock

    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.post_training.modelopt.hybrid import model_specs
    from megatron.core.tensor_parallel import random as tensor_parallel_random
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    del config
    tensor_parallel_random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    hybrid_block.TENorm = WrappedTorchNorm
    with mock.patch.object(model_specs, "Norm", WrappedTorchNorm):
        return model_specs.get_hybrid_stack_modelopt_spec(local_core_attention=True)


def make_model(
    checkpoint: Path,
    *,
    sizes: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    is_hybrid: bool = False,
    settings: Mapping[str, Any] | None = None,
    load: bool = True,
) -> tuple[Any, list[Any]]:
    """A bridge for a checkpoint directory, and this rank's model chunks in gloo process groups.

    Args:
        checkpoint: A Hugging Face checkpoint.
        sizes: Parallel degrees by Megatron's names, such as ``tensor_model_parallel_size``.
        dtype: Of the parameters.
        is_hybrid: Whether it has Mamba layers, which can be constructed here but not run.
        settings: More attributes of Bridge's model provider.
        load: Whether to load the checkpoint's weights.
    """
    prepare()
    if is_hybrid:
        _pretend_mamba()
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as tensor_parallel_random

    tensor_parallel_random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    sizes = dict(sizes or {})
    bridge = AutoBridge.from_hf_pretrained(str(checkpoint))
    provider = bridge.to_megatron_provider(load_weights=False)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**sizes)
    if is_hybrid:
        provider.hybrid_stack_spec = provider.mamba_stack_spec = _hybrid_layers
    else:
        from megatron.bridge.models.gpt_provider import local_layer_spec

        provider.transformer_layer_spec = local_layer_spec
    chosen = {**_ON_CPU, **sizes, "params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype is torch.bfloat16}
    for name, value in {**chosen, **(settings or {})}.items():
        setattr(provider, name, value)
    provider.finalize()
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    chunks = [provider.provide(pre_process=first, post_process=last)]
    if load:
        bridge.load_hf_weights(chunks)
    return bridge, chunks


_ON_CPU: Mapping[str, Any] = {
    "use_cpu_initialization": True,
    "moe_grouped_gemm": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "moe_permute_fusion": False,
    "apply_rope_fusion": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_shared_expert_overlap": False,
}
"""Fused kernels need a GPU or TransformerEngine."""
