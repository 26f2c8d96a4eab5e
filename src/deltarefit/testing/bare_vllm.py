"""vLLM models without an engine: built and loaded by vLLM's own code in milliseconds, for tests and benchmarks on a CPU.

Import ``vllm`` happens inside; ``ENVIRONMENT`` must be set before. Nothing is packed after loading, because
``process_weights_after_loading`` is not called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["ENVIRONMENT", "BareVllm"]

ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_DIST_IDENT": "bare",
}
"""What vLLM reads when it is imported."""


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

    @staticmethod
    def load(config: Any, model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """The model's own loader, under its configuration."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(config):
            return model.load_weights(weights)
