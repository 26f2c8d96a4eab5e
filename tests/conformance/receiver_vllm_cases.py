"""The shipped suite on bare vLLM models, with vLLM's own loaders, without an engine. ``test_receiver_vllm.py`` runs it.

A program of its own, because vLLM leaves settings and process groups behind:
``python -m pytest -o filterwarnings=ignore tests/conformance/receiver_vllm_cases.py``.
"""

from __future__ import annotations

import os

os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_DIST_IDENT="suite")

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from deltarefit.testing.checkpoints import load_tensors, write_tiny_checkpoint
from deltarefit.testing.receiver_suite import ReceiverTests


def configured(directory):
    return EngineArgs(
        model=str(directory), skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, dtype="bfloat16"
    ).create_engine_config()


@pytest.fixture(autouse=True, scope="session")
def world(tmp_path_factory):
    """One rank. vLLM wants the configuration of a mixture of experts when its groups are made."""
    directory = tmp_path_factory.mktemp("world")
    with set_current_vllm_config(configured(write_tiny_checkpoint(directory / "checkpoint", "qwen3_moe"))):
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    cleanup_dist_env_and_memory()


class _Vllm(ReceiverTests):
    architecture: str

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def written(cls, tmp_path_factory):
        directory = write_tiny_checkpoint(tmp_path_factory.mktemp("model") / cls.architecture, cls.architecture)
        cls.config, cls.sample = configured(directory), load_tensors(directory)
        yield
        del cls.config, cls.sample

    def build(self):
        self.config.compilation_config.static_forward_context.clear()
        dtype = set_default_torch_dtype(self.config.model_config.dtype)
        with set_current_vllm_config(self.config), dtype, torch.device("cpu"):
            return initialize_model(vllm_config=self.config).eval()

    def load(self, model, weights):
        with set_current_vllm_config(self.config):
            return model.load_weights(weights)

    def checkpoint(self):
        return self.sample


class TestQwen3Moe(_Vllm):
    architecture = "qwen3_moe"


class TestNemotronH(_Vllm):
    """Computes one tensor (``-exp``), and widens others."""

    architecture = "nemotron_h"
