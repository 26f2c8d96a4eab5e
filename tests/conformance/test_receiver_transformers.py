"""Transformers models whose tensors an engine fused and stacked, loaded by checkpoint names, pass the shipped suite."""

from __future__ import annotations

import pytest
import torch

from deltarefit.cli.demo.torch_engine import FusingLoader
from deltarefit.testing.receiver_suite import ReceiverTests

pytest.importorskip("transformers")

pytestmark = pytest.mark.torch

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


class FusedModel(torch.nn.Module):
    """The parameters of a transformers causal model, as an engine holds them: query, key and value in one, gate and up in one,
    the vocabulary padded to a multiple of 64."""

    def __init__(self, model):
        super().__init__()
        self.homes = {}
        shapes = {}
        for name, tensor in model.state_dict().items():
            home, piece = self.place_of(name)
            rows = shapes.setdefault(home, {})
            rows[piece] = tuple(tensor.shape)
        for home, pieces in shapes.items():
            self.add_home(home, pieces)

    @staticmethod
    def place_of(name):
        parts = name.split(".")
        for part in parts:
            if part in _FUSED:
                return name.replace(part, _FUSED[part]), part
        return name, ""

    def add_home(self, home, pieces):
        num_rows = sum(shape[0] for shape in pieces.values())
        is_vocabulary = "embed_tokens" in home or "lm_head" in home
        padded = -(-num_rows // 64) * 64 if is_vocabulary else num_rows
        rest = next(iter(pieces.values()))[1:]
        own = home.replace(".", "_")
        self.register_parameter(own, torch.nn.Parameter(torch.zeros(padded, *rest, dtype=torch.bfloat16), requires_grad=False))
        start = 0
        for piece in sorted(pieces):
            self.homes[home, piece] = (own, start, start + pieces[piece][0], padded)
            start += pieces[piece][0]

    def load_weights(self, weights):
        loaded = set()
        for name, tensor in weights:
            own, start, end, padded = self.homes[self.place_of(name)]
            parameter = getattr(self, own).data
            parameter[start:end].copy_(tensor)
            if padded > end and "proj" not in own:
                parameter[end:].zero_()
            loaded.add(own)
        return loaded


class TestFusedProjections(ReceiverTests):
    """Qwen3, in a module of our own."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def made(cls):
        from deltarefit.testing.checkpoints import tiny_model

        cls.made_from = tiny_model("qwen3")
        yield
        del cls.made_from

    def build(self):
        return FusedModel(self.made_from)

    def checkpoint(self):
        return {name: tensor.detach() for name, tensor in self.made_from.state_dict().items()}


class TestStackedExperts(ReceiverTests):
    """Qwen3-MoE as transformers runs it, behind the loader of the demo: a tensor per expert into stacked parameters."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def written(cls, tmp_path_factory):
        from deltarefit.testing.checkpoints import load_tensors, write_tiny_checkpoint

        directory = write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen3_moe", "qwen3_moe")
        cls.directory, cls.sample = directory, load_tensors(directory)
        yield
        del cls.sample

    def build(self):
        from transformers import AutoConfig, AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.directory), dtype=torch.bfloat16)

    def load(self, model, weights):
        return FusingLoader(model)(weights)

    def checkpoint(self):
        return self.sample
