"""The CPU switch's parts: what stays as loaded is packed on use, by the engine's own functions, and only then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deltarefit.integrations.vllm.unpacked import _convolve_packed, _pack_on_use, _use_plain_product

pytestmark = pytest.mark.torch


class Experts:
    isa = "vec"

    def __init__(self, width: int) -> None:
        self.moe_config = SimpleNamespace(intermediate_size_per_partition=width)
        self.seen: tuple = ()
        self._use_zentorch = True

    @staticmethod
    def _padded_intermediate_size(config) -> int:
        return -(-config.intermediate_size_per_partition // 32) * 32

    def apply(self, output, hidden_states, w1, w2, top=None) -> None:
        self.seen = (output, hidden_states, w1, w2, top)


def test_experts_keep_their_weights_and_pack_them_in_each_forward_pass() -> None:
    packed_for_good = []
    keep = _pack_on_use(lambda experts, layer: packed_for_good.append(layer), lambda weight, isa: ("packed", weight, isa))
    experts = Experts(64)
    keep(experts, "layer")
    assert packed_for_good == []
    for _ in range(2):
        experts.apply("out", "in", "w13", w2="w2", top=3)
        assert experts.seen == ("out", "in", ("packed", "w13", "vec"), ("packed", "w2", "vec"), 3)
    experts.process_weights_after_loading("layer")  # as a reload does
    assert packed_for_good == []


def test_experts_that_need_padding_are_packed_as_vllm_does_and_so_refused_later() -> None:
    packed_for_good = []
    keep = _pack_on_use(lambda experts, layer: packed_for_good.append(layer), lambda weight, isa: weight)
    keep(Experts(48), "layer")
    assert packed_for_good == ["layer"]


def test_a_convolution_packs_weights_that_are_not() -> None:
    def convolve(x, weight, bias, is_weight_packed):
        return x, weight, bias, is_weight_packed

    convolve_packed = _convolve_packed(convolve, lambda weight: weight + 100)
    loaded = torch.arange(8.0).reshape(2, 1, 4)
    assert torch.equal(convolve_packed(x=1, weight=loaded, bias=None, is_weight_packed=True)[1], loaded[:, 0] + 100)
    assert convolve_packed(1, loaded, None, False)[1] is loaded
    packed = torch.zeros(2, 4)
    assert convolve_packed(1, packed, None, True)[1] is packed
    assert _convolve_packed(convolve_packed, lambda weight: weight) is convolve_packed


def test_linear_layers_get_the_plain_product() -> None:
    layer = SimpleNamespace()
    _use_plain_product(layer, remove_weight=True)
    assert layer.cpu_linear is torch.nn.functional.linear
