"""vLLM models without an engine: built and loaded by vLLM's own code in milliseconds, for tests and benchmarks on a CPU.

Import ``vllm`` happens inside; ``ENVIRONMENT`` must be set before. ``build`` packs nothing after loading; ``served``
does what an engine does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from deltarefit.placement.reach import reach

__all__ = ["ENVIRONMENT", "BareVllm", "allow_ungated_experts", "everything", "missing_kernels", "select_kernels"]

ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_DIST_IDENT": "bare",
}
"""What vLLM reads when it is imported."""


def select_kernels(selection: str) -> None:
    """Have vLLM select kernels, in this process, that this machine need not have. None may then be run: only layouts count.

    ``plain``: as on a CPU without AMX tiles. ``amx``: as on one with them; packing works without. ``cuda``: also classes made
    for CUDA whose post-load step is plain torch. Linear layers stay off oneDNN, whose handles nobody can look into.
    """
    import vllm._custom_ops as ops

    ops._supports_onednn = False
    cpu: Any = torch.cpu
    cpu._is_amx_tile_supported = lambda: selection == "amx"
    if selection != "cuda":
        return
    import vllm.model_executor.kernels.linear as kernels
    from vllm.platforms import PlatformEnum

    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    kernels.register_linear_kernel(_on_cpu(kernels.CutlassNvFp4LinearKernel), PlatformEnum.CPU, "nvfp4")
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, _on_cpu(kernels.TritonFp8BlockScaledMMKernel))
    kernels._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU].insert(0, _on_cpu(kernels.CutlassFP8ScaledMMLinearKernel))


def missing_kernels(selection: str) -> str:
    """Why what ``select_kernels`` selects cannot be built on this machine; empty if it can."""
    import vllm._custom_ops  # noqa: F401  registers the operators

    if selection != "amx" or hasattr(torch.ops._C, "convert_weight_packed"):
        return ""
    return "vLLM's operators that pack for AMX tiles are in its library for CPUs with AVX-512 and bfloat16 instructions only"


def _on_cpu(kernel: Any) -> Any:
    allowed = {
        "is_supported": classmethod(lambda cls, capability=None: (True, None)),
        "can_implement": classmethod(lambda cls, config: (True, None)),
    }
    return type("Cpu" + kernel.__name__, (kernel,), allowed)


class _BuildsUngated:
    """A platform that vLLM lets have experts without a gate. Only classes and loaders count here; nothing is computed."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_xpu(self) -> bool:
        return True


def allow_ungated_experts() -> None:
    """Have vLLM build mixtures whose experts have no gate. It refuses them on a CPU, having no kernel for them there."""
    import vllm.model_executor.layers.fused_moe.config as config
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    module: Any = config
    module.current_platform = _BuildsUngated(module.current_platform)
    kernel: Any = CPUUnquantizedExperts
    activation = kernel._supports_activation
    kernel._supports_no_act_and_mul = staticmethod(lambda: True)
    kernel._supports_activation = staticmethod(lambda wanted: not wanted.is_gated or activation(wanted))


def everything(model: torch.nn.Module) -> dict[str, bytes]:
    """The bytes of every storage that hangs on a model, plain attributes and closures included."""
    return {
        path: torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()
        for path, tensor in reach({"": model}).tensors.items()
    }


class BareVllm:
    """Builds models of checkpoint directories on one tensor-parallel rank."""

    def __init__(self, rendezvous: Path, *, rank: int = 0, world: int = 1, expert_parallel: bool = False) -> None:
        """``rendezvous``: a file that does not exist yet, the same for all ranks."""
        self._rendezvous = rendezvous
        self._rank = rank
        self._world = world
        self._expert_parallel = expert_parallel
        self._is_ready = False

    def configure(self, checkpoint: Path) -> Any:
        """vLLM's configuration of a checkpoint. The first must be a mixture of experts, or vLLM makes no expert group."""
        from vllm.config import set_current_vllm_config
        from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
        from vllm.engine.arg_utils import EngineArgs

        config = EngineArgs(
            model=str(checkpoint),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            dtype="bfloat16",
            tensor_parallel_size=self._world,
            distributed_executor_backend="mp" if self._world > 1 else "uni",
            enable_expert_parallel=self._expert_parallel,
        ).create_engine_config()
        if not self._is_ready:
            with set_current_vllm_config(config):
                init_distributed_environment(self._world, self._rank, f"file://{self._rendezvous}", self._rank, "gloo")
                ensure_model_parallel_initialized(self._world, 1)
            self._is_ready = True
        return config

    def build(self, config: Any, weights: Mapping[str, torch.Tensor]) -> Any:
        """A model that vLLM's own loader filled."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        config.compilation_config.static_forward_context.clear()  # layers register by name, once per configuration
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
            model = initialize_model(vllm_config=config)
            with torch.no_grad():
                model.load_weights(list(weights.items()))
        return model.eval()

    def served(self, config: Any, weights: Mapping[str, torch.Tensor]) -> Any:
        """A model as an engine serves it: loaded and finished by vLLM."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import process_weights_after_loading
        from vllm.utils.torch_utils import set_default_torch_dtype

        model, device = self.build(config, weights), torch.device("cpu")
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype), device:
            process_weights_after_loading(model, config.model_config, device)
        return model

    @staticmethod
    def load(config: Any, model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """The model's own loader, under its configuration."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(config):
            return model.load_weights(weights)
