"""What the hook makes of a loader's copies (paper 6.1, A.2): masks, placeholders, active masks, and every way to refuse."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from deltarefit.bits import logical_words
from deltarefit.canonical import TensorSpec
from deltarefit.errors import LoaderContractError, RejectedError
from deltarefit.placement.storages import StorageMap, state_tensors
from deltarefit.receiver.interceptor import MaskCopy, OverwriteCopy
from deltarefit.receiver.scratch import LoaderPath, ScratchBuffer, nan_words
from deltarefit.records import Encoding

pytestmark = pytest.mark.torch


class Holder(torch.nn.Module):
    def __init__(self, *shape, dtype=torch.bfloat16):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(shape).to(dtype), requires_grad=False)


def spec(*shape, dtype="BF16", name="w"):
    return TensorSpec(name, dtype, shape)


def path_for(model, rule, **settings):
    def load(weights):
        for _, w in weights:
            rule(model, w)

    return LoaderPath(load, StorageMap(state_tensors(model)), ScratchBuffer(4096), **settings)


def copy(model, w):
    model.w.data.copy_(w)


def bits(model):
    return logical_words(model.w).tolist()


def index(*places):
    return np.array(places, np.int64)


def words(*values, dtype=np.uint16):
    return np.array(values, dtype)


def set_bits(model, *values):
    model.w.data.view(torch.int16).copy_(torch.tensor(np.array(values, np.uint16).view(np.int16)).reshape(model.w.shape))


@pytest.mark.parametrize(("encoding", "value"), [(Encoding.XOR, 0x0003), (Encoding.DIFFERENCE, 0x0001)])
def test_a_mask_changes_its_element_and_zero_changes_nothing(encoding, value):
    model = Holder(12)
    resident = [0x3F01, 0x7FC1, 0x8000, 0x0001, 0xFF80, 0x7F81, 0, 0x1234, 0xFFFF, 0x7F7F, 0x0080, 0x3F80]
    set_bits(model, *resident)
    path_for(model, copy).masks(spec(12), index(0), words(value), encoding)
    assert bits(model) == [0x3F02, *resident[1:]]


def test_every_pattern_of_the_dtype_survives_a_mask_path():
    model = Holder(65536)
    every = np.arange(65536, dtype=np.uint16)
    scratch = ScratchBuffer(2 * 65536)
    path = LoaderPath(lambda ws: copy(model, next(iter(ws))[1]), StorageMap(state_tensors(model)), scratch)
    path.masks(spec(65536), np.arange(65536), every, Encoding.XOR)
    assert bits(model) == every.tolist()
    set_bits(model, *([0x3F80] * 65536))
    path.masks(spec(65536), np.arange(65536), every, Encoding.DIFFERENCE)
    np.testing.assert_array_equal(logical_words(model.w), every + np.uint16(0x3F80))


def test_nothing_of_the_item_before_survives_in_the_reused_scratch():
    model = Holder(12)
    path = path_for(model, lambda m, w: m.w.data[: w.numel()].copy_(w))
    path.masks(spec(12), index(5), words(7), Encoding.XOR)
    path.masks(spec(12), index(7), words(9), Encoding.XOR)
    path.masks(spec(4), index(1), words(1), Encoding.XOR)
    assert [place for place, value in enumerate(bits(model)) if value] == [1, 5, 7]


def test_the_loader_is_called_once_an_item_with_the_same_scratch_address():
    seen = []

    def rule(model, w):
        seen.append((w.data_ptr(), tuple(w.shape), w.dtype))
        model.w.data[: w.numel()].copy_(w.reshape(-1))

    model = Holder(12)
    path = path_for(model, rule)
    path.masks(spec(3, 4), index(0), words(1), Encoding.XOR)
    path.bits(spec(2, 2), index(0), words(1))
    assert [entry[1:] for entry in seen] == [((3, 4), torch.bfloat16), ((2, 2), torch.bfloat16)]
    assert len({entry[0] for entry in seen}) == 1


@pytest.mark.parametrize(
    "write",
    [
        lambda m, w: m.w.copy_(w),
        lambda m, w: m.w.data.__setitem__(slice(None), w),
        lambda m, w: (m.w.data[:1].copy_(w[:1]), m.w.data[1:].copy_(w[1:])),
        lambda m, w: m.w.narrow(0, 0, 3).copy_(w),
        lambda m, w: [p.copy_(w) for _, p in m.named_parameters()],
        lambda m, w: m.w.data.view(-1)[: w.numel()].view_as(w).copy_(w),
    ],
)
def test_every_spelling_of_the_final_copy_is_intercepted(write):
    model = Holder(3, 4)
    set_bits(model, *range(12))
    path_for(model, write).masks(spec(3, 4), index(5), words(0x100), Encoding.DIFFERENCE)
    assert bits(model) == [0, 1, 2, 3, 4, 0x105, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    "temporary",
    [
        torch.clone,
        lambda w: torch.cat([w[:1], w[1:]]),
        lambda w: w.t().contiguous().t(),
        lambda w: w.index_select(0, torch.arange(3)),
    ],
)
def test_a_mask_through_a_temporary_fails_and_the_destination_keeps_its_bytes(temporary):
    model = Holder(3, 4)
    set_bits(model, *range(12))
    path = path_for(model, lambda m, w: m.w.data.copy_(temporary(w)))
    with pytest.raises(LoaderContractError, match="temporary"):
        path.masks(spec(3, 4), index(5), words(1), Encoding.XOR)
    assert bits(model) == list(range(12))


def test_a_loader_that_changes_its_input_breaks_masks_and_is_noticed():
    def doubling(model, w):
        w.mul_(2)
        model.w.data.copy_(w)

    model = Holder(4)
    set_bits(model, 0x3F01, 1, 2, 3)
    with pytest.raises(LoaderContractError, match="temporary"):
        path_for(model, doubling).masks(spec(4), index(0), words(3), Encoding.XOR)
    assert bits(model) == [0x3F01, 1, 2, 3]


def test_a_mask_that_meets_another_dtype_fails_before_the_write():
    model = Holder(4, dtype=torch.float16)
    with pytest.raises(LoaderContractError, match="equal dtypes"):
        path_for(model, copy).masks(spec(4), index(0), words(3), Encoding.XOR)
    assert bits(model) == [0, 0, 0, 0]


def test_a_widening_mask_is_a_shifted_mask():
    model = Holder(2, dtype=torch.float32)
    model.w.data.copy_(torch.tensor([1.0, 2.0]))
    path_for(model, copy).masks(spec(2), index(1), words(0x0080), Encoding.DIFFERENCE)
    assert model.w.tolist() == [1.0, 4.0]


def test_two_masks_on_intersecting_bytes_fail_but_touching_ones_pass():
    model = Holder(6, 2)
    overlapping = path_for(model, lambda m, w: (m.w.data[0:4].copy_(w[0:4]), m.w.data[2:6].copy_(w[2:6])))
    with pytest.raises(LoaderContractError, match="twice within one"):
        overlapping.masks(spec(6, 2), index(0), words(1), Encoding.XOR)
    model = Holder(6, 2)
    path_for(model, lambda m, w: (m.w.data[0:3].copy_(w[0:3]), m.w.data[3:].copy_(w[3:]))).masks(
        spec(6, 2), index(0, 11), words(1, 2), Encoding.XOR
    )
    columns = path_for(model, lambda m, w: (m.w.data[:, 0].copy_(w[:, 0]), m.w.data[:, 1].copy_(w[:, 1])))
    columns.masks(spec(6, 2), index(1), words(4), Encoding.XOR)
    assert bits(model) == [1, 4, *[0] * 9, 2]


def test_nan_placeholders_leave_inactive_elements_alone():
    model = Holder(4)
    model.w.data.copy_(torch.tensor([1.0, 2, 3, 4]))
    path_for(model, copy).nan_scheme(spec(4), index(1, 3), words(0x3F00, 0))
    assert model.w.tolist() == [1.0, 0.5, 3.0, 0.0]


def test_each_destination_view_has_its_own_active_mask():
    def split(model, w):
        model.w.data[:2].copy_(w[:2])
        model.w.data[2:].copy_(w[2:] * 2)

    model = Holder(4)
    model.w.data.copy_(torch.tensor([1.0, 2, 3, 4]))
    path_for(model, split).nan_scheme(spec(4), index(0, 3), words(0x3F00, 0x3F00))
    assert model.w.tolist() == [0.5, 2.0, 3.0, 1.0]


def doubled_after(model, w):
    model.w.data.copy_(w)
    model.w.data.copy_(model.w.data * 2)


def test_a_later_write_reuses_the_first_active_mask():
    model = Holder(4)
    model.w.data.copy_(torch.tensor([2.0, 4, 6, 8]))
    path_for(model, doubled_after).nan_scheme(spec(4), index(1, 3), words(0x4040, 0x40A0))
    assert model.w.tolist() == [2.0, 6.0, 6.0, 10.0]


def test_without_the_active_mask_the_inactive_elements_would_be_transformed_twice(monkeypatch):
    original = OverwriteCopy.copy

    def forgetful(self, target, source, write):
        original(self, target, source, write)
        self._active.clear()

    monkeypatch.setattr(OverwriteCopy, "copy", forgetful)
    model = Holder(4)
    model.w.data.copy_(torch.tensor([2.0, 4, 6, 8]))
    path_for(model, doubled_after).nan_scheme(spec(4), index(1, 3), words(0x4040, 0x40A0))
    assert model.w.tolist() == [4.0, 6.0, 12.0, 10.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_active_values_go_through_the_loaders_own_cast(dtype):
    values = torch.tensor([0.1, 1e30, -0.0, 3.3e-41]).to(torch.bfloat16)
    model, dense = Holder(6, dtype=dtype), Holder(6, dtype=dtype)
    model.w.data.fill_(7)
    dense.w.data.fill_(7)
    dense.w.data[1:5].copy_(values)
    path_for(model, copy).nan_scheme(spec(6), index(1, 2, 3, 4), logical_words(values))
    assert bits(model) == bits(dense)


def test_a_value_that_looks_like_the_placeholder_fails_before_anything_is_written_and_then_goes_another_way():
    model = Holder(4)
    model.w.data.copy_(torch.tensor([1.0, 2, 3, 4]))
    before = bits(model)
    path = path_for(model, copy)
    with pytest.raises(LoaderContractError, match="flat index 2 is NaN"):
        path.nan_scheme(spec(4), index(0, 2), words(0x3F80, 0x7FC1))
    assert bits(model) == before
    path.values(spec(4), index(0, 2), words(0x4000, 0x7FC1))
    assert bits(model) == [0x4000, before[1], 0x7FC1, before[3]]


def test_a_path_that_keeps_bits_carries_every_pattern_at_once():
    model = Holder(70000)
    every = np.arange(65536, dtype=np.uint16)
    path = LoaderPath(lambda ws: copy(model, next(iter(ws))[1]), StorageMap(state_tensors(model)), ScratchBuffer(140000))
    set_bits(model, *([0x5555] * 70000))
    path.bits(spec(70000), np.arange(100, 65636), every)
    assert bits(model) == [0x5555] * 100 + every.tolist() + [0x5555] * (70000 - 65636)


def test_integers_cannot_go_through_a_computing_path():
    model = Holder(4, dtype=torch.int8)
    with pytest.raises(LoaderContractError, match="floating-point"):
        path_for(model, copy).values(spec(4, dtype="I8"), index(0), words(1, dtype=np.uint8))


def test_a_loader_that_erases_the_placeholder_would_zero_inactive_elements():
    """Why ``nan_to_num`` needs the trial at prewarm: the copy alone cannot show it."""
    model = Holder(4)
    model.w.data.copy_(torch.tensor([1.0, 2, 3, 4]))
    path_for(model, lambda m, w: m.w.data.copy_(torch.nan_to_num(w))).nan_scheme(spec(4), index(1), words(0x3F00))
    assert model.w.tolist() == [0.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    "rule",
    [
        lambda m, w: m.w.data.zero_(),
        lambda m, w: m.w.data[1:].copy_(w[1:]),
        lambda m, w: m.w.data.add_(w),
        lambda m, w: m.w.data.index_put_((torch.arange(4),), w),
    ],
)
def test_writes_that_prewarm_did_not_see_fail_the_attempt(rule):
    model = Holder(4)
    with pytest.raises(LoaderContractError, match="prewarm"):
        path_for(model, rule, expected={"w": frozenset()}).bits(spec(4), index(0), words(1))
    assert bits(model) == [0, 0, 0, 0]


def test_a_constant_made_of_the_tensors_value_is_an_overwrite_of_all_it_fills():
    model = Holder(4, dtype=torch.float32)
    path = path_for(model, lambda m, w: m.w.data[1:].fill_(w.item()))
    path.values(spec(dtype="F32"), index(0), words(0x40000000, dtype=np.uint32))
    assert model.w.tolist() == [0, 2, 2, 2]


def test_a_loader_that_swallows_the_refusal_still_fails():
    def careless(model, w):
        with contextlib.suppress(Exception):
            model.w.data.copy_(w.clone())

    with pytest.raises(LoaderContractError, match="temporary"):
        path_for(Holder(4), careless).masks(spec(4), index(0), words(1), Encoding.XOR)


def test_a_loader_that_fails_or_writes_nothing_fails_the_attempt():
    def broken(model, w):
        raise KeyError("w")

    with pytest.raises(LoaderContractError, match="KeyError"):
        path_for(Holder(4), broken).bits(spec(4), index(0), words(1))
    with pytest.raises(LoaderContractError, match="wrote nothing"):
        path_for(Holder(4), lambda m, w: None).bits(spec(4), index(0), words(1))


def test_copies_into_tensors_that_are_no_model_storage_pass_unchanged():
    def staged(model, w):
        buffer = torch.empty_like(w)
        buffer.copy_(w)
        buffer.mul_(2)
        model.w.data.copy_(w)

    model = Holder(4)
    path_for(model, staged).masks(spec(4), index(2), words(5), Encoding.XOR)
    assert bits(model) == [0, 0, 5, 0]


def test_scratch_never_grows():
    with pytest.raises(RejectedError, match="prewarm reserved"):
        path_for(Holder(4), copy).bits(spec(4096), index(0), words(1))


@pytest.mark.parametrize("flip", [False, True])
def test_the_check_after_a_mask_notices_a_flipped_bit(monkeypatch, flip):
    model = Holder(4)
    path = path_for(model, copy, verify=True)
    if flip:
        original = torch.Tensor.copy_

        def faulty(self, source, *rest):
            result = original(self, source, *rest)
            if self.dtype is torch.int16:
                self.view(-1)[2] ^= 8
            return result

        monkeypatch.setattr(torch.Tensor, "copy_", faulty)
        with pytest.raises(LoaderContractError, match="element 2"):
            path.masks(spec(4), index(1), words(5), Encoding.XOR)
    else:
        path.masks(spec(4), index(1), words(5), Encoding.XOR)
        path.masks(spec(4), index(1), words(5), Encoding.DIFFERENCE)
        assert bits(model) == [0, 10, 0, 0]


def test_the_check_after_an_overwrite_compares_transformed_values(monkeypatch):
    model = Holder(4, dtype=torch.float32)
    path = path_for(model, lambda m, w: m.w.data.copy_(-torch.exp(w)), verify=True)
    path.values(spec(4, dtype="F32"), index(1), words(0x3F800000, dtype=np.uint32))
    assert model.w[1].item() == -torch.exp(torch.tensor(1.0)).item()
    original = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, s, *r: self if self.dtype is torch.int32 else original(self, s, *r))
    with pytest.raises(LoaderContractError, match="post-apply check"):
        path.values(spec(4, dtype="F32"), index(1), words(0x40000000, dtype=np.uint32))


def test_mask_copies_count_what_they_changed():
    model = Holder(4)
    assert path_for(model, copy).masks(spec(4), index(1, 2), words(5, 6), Encoding.XOR) == 2
    assert path_for(model, copy).bits(spec(4), index(1, 2, 3), words(5, 6, 7)) == 3
    assert MaskCopy(spec(4), Encoding.XOR).written == 0


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
def test_nan_is_known_by_its_bits_in_every_float_dtype(dtype):
    from deltarefit.bits import tensor_from_words
    from deltarefit.placement.digits import random_words
    from deltarefit.receiver.interceptor import is_nan

    count = 256 if dtype.startswith("F8") else 4096
    one = TensorSpec("w", dtype, (count,))
    stored = np.arange(256, dtype=np.uint8) if count == 256 else random_words(dtype, count, np.random.default_rng(0))
    tensor = tensor_from_words(stored.copy(), one)
    expected = torch.isnan(tensor.to(torch.float64)).numpy()
    np.testing.assert_array_equal(nan_words(one, stored), expected)
    np.testing.assert_array_equal(is_nan(tensor).numpy(), expected)
    assert expected.any()
