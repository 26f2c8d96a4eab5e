"""The shipped suite on bare vLLM models, with vLLM's own loaders, without an engine. ``test_receiver_vllm.py`` runs it.

A program of its own, because vLLM leaves settings and process groups behind:
``python -m pytest -o filterwarnings=ignore tests/conformance/receiver_vllm_cases.py``.
"""

from __future__ import annotations

import os

import pytest

from deltarefit.testing.bare_vllm import ENVIRONMENT, BareVllm
from deltarefit.testing.checkpoints import load_tensors, write_tiny_checkpoint
from deltarefit.testing.receiver_suite import ReceiverTests

os.environ.update(ENVIRONMENT)


@pytest.fixture(autouse=True, scope="session")
def bare(tmp_path_factory):
    """One rank. vLLM makes its groups for the first configuration, which must be a mixture of experts."""
    directory = tmp_path_factory.mktemp("world")
    bare = BareVllm(directory / "rendezvous")
    bare.configure(write_tiny_checkpoint(directory / "checkpoint", "qwen3_moe"))
    yield bare
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


class _Vllm(ReceiverTests):
    architecture: str

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def written(cls, bare, tmp_path_factory):
        directory = write_tiny_checkpoint(tmp_path_factory.mktemp("model") / cls.architecture, cls.architecture)
        cls.bare, cls.config, cls.sample = bare, bare.configure(directory), load_tensors(directory)
        yield
        del cls.bare, cls.config, cls.sample

    def build(self):
        return self.bare.build(self.config, {})

    def load(self, model, weights):
        return self.bare.load(self.config, model, weights)

    def checkpoint(self):
        return self.sample


class TestQwen3Moe(_Vllm):
    architecture = "qwen3_moe"


class TestNemotronH(_Vllm):
    """Computes one tensor (``-exp``), and widens others."""

    architecture = "nemotron_h"
