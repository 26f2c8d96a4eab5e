"""The CPU switch: matrices get torch's plain product, everything else vLLM's own treatment."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deltarefit.integrations.vllm.plain_linears import plain_for_matrices

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("shape", "is_plain"), [((4, 6), True), ((4, 1, 4), False), ((2, 4, 6), False)])
def test_linear_layers_get_the_plain_product(shape: tuple[int, ...], is_plain: bool) -> None:
    asked = []
    layer = SimpleNamespace(weight=torch.zeros(shape))
    plain_for_matrices(lambda layer, remove_weight: asked.append((layer, remove_weight)))(layer, remove_weight=True)
    assert (getattr(layer, "cpu_linear", None) is torch.nn.functional.linear) == is_plain
    assert asked == ([] if is_plain else [(layer, True)])
    assert tuple(layer.weight.shape) == shape
