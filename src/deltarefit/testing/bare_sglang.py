"""SGLang models without an engine: built and loaded by SGLang's own code in milliseconds, for tests on a CPU.

SGLang keeps its configuration and its process groups in globals: a process can have models of one checkpoint's configuration
only, as many of them as it likes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from deltarefit.testing import sglang_cpu
from deltarefit.testing.checkpoints import write_tiny_checkpoint

__all__ = ["ARCHITECTURES", "GENERATING", "BareSglang", "write_sglang_checkpoint"]

ARCHITECTURES = (
    "qwen3", "qwen3_tied", "qwen3_moe", "deepseek_v3", "qwen3_next", "nemotron_h", "nemotron_h_moe", "granite_hybrid",
)  # fmt: skip
"""Tiny checkpoints that SGLang builds and loads on a CPU."""
GENERATING = ("qwen3", "qwen3_moe")
"""Those whose forward pass needs none of the kernels that only exist for GPUs."""


def write_sglang_checkpoint(directory: Path, architecture: str, *, seed: int = 0) -> Path:
    """A tiny checkpoint whose configuration is spelt as on the hub, which is what SGLang reads.

    Transformers 5 writes some fields under other names. With a wrong ``mamba_n_groups`` SGLang's loader would pad with zeros
    and say nothing, so these matter.
    """
    write_tiny_checkpoint(directory, architecture, seed=seed)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    _SPELLINGS.get(architecture, _keep)(config)
    path.write_text(json.dumps(config, indent=1))
    return directory


def _keep(config: dict[str, Any]) -> None:
    """Spelt alike."""


def _spell_mla(config: dict[str, Any]) -> None:
    config.pop("rope_parameters", None)
    config.update(rope_theta=10000.0, max_position_embeddings=20480, moe_layer_freq=1)
    config["rope_scaling"] = {
        "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 512,
    }  # fmt: skip


def _spell_delta_net(config: dict[str, Any]) -> None:
    config["full_attention_interval"] = 2
    for name in ("layer_types", "layers_block_type"):
        config.pop(name, None)


def _spell_hybrid(pattern: str) -> Callable[[dict[str, Any]], None]:
    def spell(config: dict[str, Any]) -> None:
        for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
            config.pop(name, None)
        config.update(hybrid_override_pattern=pattern, mamba_n_groups=2)

    return spell


_SPELLINGS: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "deepseek_v3": _spell_mla,
    "qwen3_next": _spell_delta_net,
    "nemotron_h": _spell_hybrid("M*-M"),
    "nemotron_h_moe": _spell_hybrid("M*-E"),
}


class BareSglang:
    """Builds models of one checkpoint directory, on one rank. One object a process."""

    def __init__(self, checkpoint: Path, rendezvous: Path, *, watch: Callable[[Any], object] = id) -> None:
        """``rendezvous``: a file that does not exist yet. ``watch`` is called with each model before its weights are loaded."""
        self._watch = watch
        sglang_cpu.prepare()
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
        from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
        from sglang.srt.layers.dp_attention import initialize_dp_attention
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import ServerArgs

        arguments = ServerArgs(
            model_path=str(checkpoint), device="cpu", dtype="bfloat16", skip_tokenizer_init=True, disable_overlap_schedule=True
        )
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
        self._load_config = LoadConfig()
        self._config = adjust_config_with_unaligned_cpu_tp(ModelConfig.from_server_args(arguments), self._load_config, 1)
        where = f"file://{rendezvous}"
        init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=where, backend="gloo")
        initialize_model_parallel(backend="gloo")
        initialize_dp_attention(arguments)

    def build(self) -> Any:
        """A model that nobody has loaded."""
        from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
        from sglang.srt.model_loader.utils import set_default_torch_dtype

        quantisation = _get_quantization_config(self._config, self._load_config)
        with set_default_torch_dtype(self._config.dtype), torch.device("cpu"):
            return _initialize_model(self._config, self._load_config, quantisation).eval()

    def loading(self) -> AbstractContextManager[None]:
        """What SGLang has around its own loading."""
        from sglang.srt.model_loader.utils import set_default_torch_dtype

        around: AbstractContextManager[None] = set_default_torch_dtype(self._config.dtype)
        return around

    def loaded(self, weights: Mapping[str, torch.Tensor]) -> Any:
        """A model that SGLang's own code loaded, post-load steps included: the dense reload that refits are compared with."""
        from sglang.srt.model_loader.loader import DefaultModelLoader

        model = self.build()
        self._watch(model)
        pairs = iter([(name, tensor.clone()) for name, tensor in weights.items()])
        with torch.no_grad(), self.loading():
            DefaultModelLoader.load_weights_and_postprocess(model, pairs, torch.device("cpu"))
        return model
