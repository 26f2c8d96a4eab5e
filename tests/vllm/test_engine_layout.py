"""What the post-load step moved, packed, copied or hid is found and named; untouched weights are not."""

from __future__ import annotations

import pytest
import torch

from deltarefit.integrations.exchange import PostLoadWatch, changed_after_load

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


def changes(change, *, everywhere: bool = False) -> tuple[str, ...] | None:
    model = Model()
    watch = PostLoadWatch(model, everywhere=everywhere)
    change(model)
    watch.finish()
    return changed_after_load(model)


@pytest.mark.parametrize("everywhere", [False, True])
def test_untouched_weights_pass(everywhere: bool) -> None:
    assert changes(lambda model: None, everywhere=everywhere) == ()


def test_weights_moved_to_other_storage_with_the_same_bits_pass() -> None:
    def move(model: Model) -> None:
        model.w13.data = model.w13.data.clone()

    assert changes(move) == ()


def test_a_view_of_a_loaded_weight_under_a_new_name_passes() -> None:
    assert changes(lambda model: model.register_buffer("view", model.w13.data[0].t(), persistent=False)) == ()


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
def test_changed_weights_are_named(change, name: str, reason: str) -> None:
    (found,) = changes(change)
    assert found.startswith(f"{name}: ")
    assert reason in found


class Helper:
    """Anything that a layer keeps beside its parameters."""


def kept_in_a_closure(model: Model) -> None:
    packed = model.head.weight.data.clone()
    model.head.cpu_linear = lambda x: x @ packed


def kept_in_a_helper(model: Model) -> None:
    model.helper = Helper()
    model.helper.packed = [model.w13.data.clone()]


def kept_as_bytes(model: Model) -> None:
    model.helper = Helper()
    model.helper.packed = bytearray(8)


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        (kept_in_a_closure, "head.cpu_linear.<packed>", "derived"),
        (kept_in_a_helper, "helper.packed[0]", "derived"),
        (kept_as_bytes, "helper.packed", "a bytearray was made after loading"),
    ],
)
def test_copies_outside_parameters_are_found_where_that_is_asked_for(change, name: str, reason: str) -> None:
    assert changes(change) == ()
    (found,) = changes(change, everywhere=True)
    assert found.startswith(f"{name}: ")
    assert reason in found


def made_anew(model: Model) -> None:
    model.plain = model.plain.clone()
    del model.passing


def test_plain_attributes_that_were_there_before_count_only_if_they_changed() -> None:
    def built() -> Model:
        model = Model()
        model.plain, model.passing = torch.ones(3), torch.zeros(3)
        return model

    model = built()
    watch = PostLoadWatch(model, everywhere=True)
    made_anew(model)
    watch.finish()
    assert changed_after_load(model) == ()
    model = built()
    watch = PostLoadWatch(model, everywhere=True)
    model.plain = model.plain + 1
    watch.finish()
    (found,) = changed_after_load(model)
    assert found.startswith("plain: its bits were rearranged or recomputed")


def test_a_model_whose_loading_nobody_watched_is_told_apart() -> None:
    assert changed_after_load(Model()) is None
