"""Plain torch modules with loaders of every kind pass the shipped suite for receivers."""

from __future__ import annotations

import pytest
import torch

from deltarefit.testing.loaders import LOADERS, ToyCase, ToyModel, random_weights
from deltarefit.testing.receiver_suite import ReceiverTests

pytestmark = pytest.mark.torch


class _Toy(ReceiverTests):
    """One of the toy loaders."""

    loader: str

    def case(self) -> ToyCase:
        return LOADERS[self.loader]()

    def build(self):
        return self.case().build()

    def checkpoint(self):
        case = self.case()
        weights = random_weights(case.catalog, 1)
        for first, second in case.equal_pairs:
            weights[second] = weights[first].clone()
        return weights


class TestFusedQkv(_Toy):
    loader = "fused qkv"


class TestExpertsOfAnotherRank(_Toy):
    loader = "experts of another rank, reported as loaded"


class TestRedundantExperts(_Toy):
    loader = "redundant experts"


class TestTiedHead(_Toy):
    loader = "tied head loaded twice"


class TestPaddedVocabulary(_Toy):
    loader = "vocabulary padding"


class TestWidened(_Toy):
    loader = "widened by a temporary"


class TestComposed(_Toy):
    loader = "A_log composed"


class TestBuffers(_Toy):
    loader = "buffers"


class TestEveryDtype(_Toy):
    loader = "every dtype"


class TestAllPatterns(ReceiverTests):
    """Enough elements for every 8-bit and 16-bit pattern."""

    def build(self):
        def place(model, w):
            model.wide.data[:, 1:].copy_(w)

        parameters = {"wide": ("BF16", (256, 261)), "narrow": ("F8_E4M3", (17, 16))}
        return ToyModel(parameters, {"wide": place, "narrow": lambda m, w: m.narrow.data.copy_(w.t())})

    def checkpoint(self):
        specs = {"wide": ("BF16", (256, 260)), "narrow": ("F8_E4M3", (16, 17))}
        return random_weights(ToyCase(specs, self.build).catalog, 2)


class TestRowParallel(ReceiverTests):
    """A module that engines write: fused projections, a column slice, a norm in fp32, and a table of its own."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(12, 16, bias=True, dtype=torch.bfloat16)
            self.out = torch.nn.Linear(4, 12, bias=False, dtype=torch.bfloat16)
            self.norm = torch.nn.Parameter(torch.ones(12))
            self.register_buffer("inv_freq", torch.arange(6) / 7, persistent=False)

        def load_weights(self, weights):
            rows = {"q": slice(0, 8), "k": slice(8, 12), "v": slice(12, 16)}
            for name, tensor in weights:
                part, _, leaf = name.partition(".")
                if part in rows:
                    getattr(self.qkv, leaf).data[rows[part]].copy_(tensor)
                elif part == "out":
                    self.out.weight.data.copy_(tensor.narrow(1, 4, 4))
                else:
                    self.norm.data.copy_(tensor)

    def build(self):
        return self.Layer()

    def checkpoint(self):
        specs = {
            "q.weight": (8, 12), "k.weight": (4, 12), "v.weight": (4, 12), "q.bias": (8,), "k.bias": (4,), "v.bias": (4,),
            "out.weight": (12, 8), "norm": (12,),
        }  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in specs.items()}
