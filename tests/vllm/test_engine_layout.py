"""Weights that the post-load step moved, packed or copied are found, named and refused; untouched ones are not."""

from __future__ import annotations

import pytest
import torch

from deltarefit.errors import RejectedError
from deltarefit.integrations.exchange import PostLoadWatch
from deltarefit.integrations.vllm.layout import check_layout

pytestmark = pytest.mark.torch


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.w13 = torch.nn.Parameter(torch.randn(4, 6, 8, generator=generator).bfloat16())
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.head = torch.nn.Linear(8, 5, dtype=torch.bfloat16)
        self.tied = torch.nn.Linear(8, 5, bias=False, dtype=torch.bfloat16)
        self.register_buffer("bias", torch.arange(5))
        self.register_buffer("nothing", torch.empty(0))


def watched(change) -> Model:
    model = Model()
    watch = PostLoadWatch(model)
    change(model)
    watch.finish()
    return model


def test_untouched_weights_pass() -> None:
    check_layout(watched(lambda model: None))


def test_weights_moved_to_other_storage_with_the_same_bits_pass() -> None:
    def move(model: Model) -> None:
        model.w13.data = model.w13.data.clone()

    check_layout(watched(move))


def test_a_view_of_a_loaded_weight_under_a_new_name_passes() -> None:
    check_layout(watched(lambda model: model.register_buffer("view", model.w13.data[0].t(), persistent=False)))


def swap_halves(model: Model) -> None:
    model.w13.data = torch.cat([model.w13.data[:, 3:], model.w13.data[:, :3]], 1)


def swap_two_elements(model: Model) -> None:
    flat = model.w13.data.view(-1)
    flat[[0, -1]] = flat[[-1, 0]].clone()


def flip_one_bit(model: Model) -> None:
    model.bias[0] ^= 1 << 62


def empty(model: Model) -> None:
    model.head.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16))


def transpose(model: Model) -> None:
    model.w13.data = model.w13.data.transpose(1, 2)


def remove(model: Model) -> None:
    model.w13 = None


def derive(model: Model) -> None:
    model.register_buffer("w13_plus_one", model.w13.data + 1)


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        (swap_halves, "w13", "rearranged"),
        (swap_two_elements, "w13", "rearranged"),
        (flip_one_bit, "bias", "rearranged"),
        (empty, "head.weight", "emptied"),
        (transpose, "w13", "[4, 8, 6]"),
        (remove, "w13", "removed"),
        (derive, "w13_plus_one", "derived"),
    ],
)
def test_changed_weights_are_named_and_refused(change, name: str, reason: str) -> None:
    with pytest.raises(RejectedError) as caught:
        check_layout(watched(change))
    assert f"\n  {name}: " in str(caught.value)
    assert reason in str(caught.value)
    assert "DELTAREFIT_VLLM_KEEP_PREPACK" in str(caught.value)


def test_a_layer_that_computes_with_a_packed_copy_is_refused() -> None:
    model = watched(lambda model: None)
    packed = object()
    model.head.cpu_linear = lambda x: (packed, x)
    with pytest.raises(RejectedError, match=r"head\.weight: the layer computes with a packed copy"):
        check_layout(model)
    model.head.cpu_linear = torch.nn.functional.linear
    check_layout(model)


def test_a_model_whose_loading_nobody_watched_is_refused() -> None:
    with pytest.raises(RejectedError, match="did not see"):
        check_layout(Model())
