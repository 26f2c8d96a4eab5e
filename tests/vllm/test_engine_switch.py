"""What an engine's configuration decides: the CPU switch, under which matrices get torch's plain product; moving experts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deltarefit.errors import RejectedError
from deltarefit.integrations.vllm.experts import check_experts
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


def test_an_engine_that_moves_its_experts_is_refused() -> None:
    check_experts(SimpleNamespace(enable_eplb=False))
    with pytest.raises(RejectedError, match="--enable-eplb"):
        check_experts(SimpleNamespace(enable_eplb=True))
