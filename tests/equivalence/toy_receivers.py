"""Rollout models for a small mixture of experts, laid out as engines lay them out, with loaders that take checkpoint names."""

import re

import torch
from torch import nn

from deltarefit.cli.demo.torch_engine import FusingLoader

EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
ATTENTION = re.compile(r"(.*)\.self_attn\.(q|k|v|o)_proj\.weight")


class FusedEngine(nn.Module):
    """One tensor-parallel rank.

    Queries, keys and values in one matrix, stacked experts with gate above up, a padded vocabulary, norms in 32 bits.
    """

    def __init__(self, shapes, rank, world):
        super().__init__()
        self._rank, self._world = rank, world
        self._homes = {}
        experts = 1 + max(int(match[2]) for name in shapes if (match := EXPERT.fullmatch(name)))
        for name, shape in shapes.items():
            self._make(name, shape, experts)

    def _make(self, name, shape, experts):
        if match := ATTENTION.fullmatch(name):
            self._attention(match, shape)
        elif match := EXPERT.fullmatch(name):
            self._expert(match, shape, experts)
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = -(-shape[0] // 64) * 64 // self._world
            home = self._parameter(name, (rows, shape[1]), torch.bfloat16)
            first = self._rank * rows
            count = max(0, min(rows, shape[0] - first))
            self._homes[name] = (home, (slice(0, count),), lambda w: w[first : first + count])
        else:
            dtype = torch.float32 if "norm" in name else torch.bfloat16
            self._homes[name] = (self._parameter(name, shape, dtype), (), lambda w: w)

    def _attention(self, match, shape):
        layer, part = match[1], match[2]
        if part == "o":
            home = self._parameter(f"{layer}.o", (shape[0], shape[1] // self._world), torch.bfloat16)
            self._homes[match[0]] = (home, (), lambda w: w.chunk(self._world, 1)[self._rank])
            return
        rows = shape[0] // self._world
        start = {"q": 0, "k": 2 * rows, "v": 3 * rows}[part]  # twice as many query heads as key heads
        home = self._parameter(f"{layer}.qkv", (4 * rows if part != "q" else 2 * rows, shape[1]), torch.bfloat16)
        self._homes[match[0]] = (home, (slice(start, start + rows),), lambda w: w.chunk(self._world)[self._rank])

    def _expert(self, match, shape, experts):
        number, part = int(match[2]), match[3]
        if part == "down":
            home = self._parameter(f"{match[1]}.w2", (experts, shape[0], shape[1] // self._world), torch.bfloat16)
            self._homes[match[0]] = (home, (number,), lambda w: w.chunk(self._world, 1)[self._rank])
            return
        rows = shape[0] // self._world
        home = self._parameter(f"{match[1]}.w13", (experts, 2 * rows, shape[1]), torch.bfloat16)
        start = rows if part == "up" else 0
        self._homes[match[0]] = (home, (number, slice(start, start + rows)), lambda w: w.chunk(self._world)[self._rank])

    def _parameter(self, name, shape, dtype):
        key = name.replace(".", "/")
        if key not in self._parameters:
            self.register_parameter(key, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))
        return self._parameters[key]

    def load_weights(self, weights):
        loaded = set()
        for name, tensor in weights:
            home, place, cut = self._homes[name]
            home.data[place].copy_(cut(tensor))
            loaded.add(name)
        return loaded


class StackedModel(nn.Module):
    """A transformers model behind a loader that places expert after expert."""

    def __init__(self, policies):
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(policies.directory)
        self.inner = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.load_weights = FusingLoader(self.inner)


def ranks_of(layout, policies):
    """The empty rollout models of a layout, one per rank."""
    shapes = {name: tuple(tensor.shape) for name, tensor in policies.tensors[0].items()}
    if layout == "stacked":
        return [StackedModel(policies)]
    world = {"fused": 1, "fused over 2": 2}[layout]
    return [FusedEngine(shapes, rank, world) for rank in range(world)]


LAYOUTS = ("stacked", "fused", "fused over 2")
