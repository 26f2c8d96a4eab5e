"""The source's conversion tracer: real rearrangements become pieces, everything else is named opaque."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltarefit.bits import logical_words, spec_of, tensor_from_words
from deltarefit.errors import RejectedError
from deltarefit.placement import trace_conversion
from deltarefit.placement.digits import random_words

pytestmark = pytest.mark.torch


def rebuilt(traced, name, inputs):
    """The output's words, gathered from the inputs through the learned pieces."""
    out = np.zeros(traced.specs[name].num_elements, traced.specs[name].word_dtype)
    for source, pieces in traced.placements[name]:
        words = logical_words(inputs[source])
        for piece in pieces:
            grid = np.indices(piece.canonical.shape).reshape(len(piece.canonical.shape), -1)
            canonical = piece.canonical.offset + np.tensordot(piece.canonical.stride, grid, 1)
            storage = piece.storage.offset + np.tensordot(piece.storage.stride, grid, 1)
            out[canonical] = words[storage]
    return out


def check(convert, inputs, opaque=()):
    generator = np.random.default_rng(3)
    inputs = {
        name: tensor_from_words(random_words(spec_of(name, t).dtype, t.numel(), generator), spec_of(name, t))
        for name, t in inputs.items()
    }
    traced = trace_conversion(convert, inputs)
    want = convert({name: t.clone() for name, t in inputs.items()})
    assert set(traced.opaque) == set(opaque)
    assert set(traced.placements) | set(traced.opaque) == set(want)
    for name in traced.placements:
        np.testing.assert_array_equal(rebuilt(traced, name, inputs), logical_words(want[name]))
    return traced


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def test_stacked_experts_split_by_expert_and_half():
    def convert(state):
        stacked = state["gate_up"]
        out = {}
        for expert in range(stacked.shape[0]):
            gate, up = stacked[expert].chunk(2, dim=0)
            out[f"{expert}.gate"], out[f"{expert}.up"] = gate.contiguous(), up.clone()
        return out

    traced = check(convert, {"gate_up": bf16(3, 8, 5)})
    assert all(len(parts) == 1 and len(parts[0][1]) == 1 for parts in traced.placements.values())


def test_transposes_concatenations_and_grouped_heads_are_pieces():
    def convert(state):
        qkv = state["qkv"].view(2, 4, 3, 7)
        return {
            "q": qkv[:, :2].reshape(-1, 7),
            "k": qkv[:, 2].reshape(-1, 7),
            "v": qkv[:, 3].reshape(-1, 7),
            "t": state["w"].t(),
            "cat": torch.cat([state["w"], state["x"]], dim=1),
            "same": state["x"],
        }

    check(convert, {"qkv": bf16(24, 7), "w": bf16(4, 6), "x": bf16(4, 3)})


def test_an_output_drawn_from_two_inputs_names_both():
    traced = check(lambda s: {"out": torch.stack([s["a"], s["b"]], dim=1)}, {"a": bf16(3, 2), "b": bf16(3, 2)})
    assert [source for source, _ in traced.placements["out"]] == ["a", "b"]


@pytest.mark.parametrize("dtype", ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I16", "F16", "F32", "I64", "F64"])
def test_every_width_and_kind_of_dtype_is_traced(dtype):
    from deltarefit.bits import DTYPES

    check(lambda s: {"out": s["w"][8:].clone(), "rest": s["w"][:8].t()}, {"w": torch.zeros(40, 3).to(DTYPES[dtype])})


def test_arithmetic_casts_and_padding_are_opaque_with_a_reason():
    def convert(state):
        w = state["w"]
        return {
            "scaled": w * 2,
            "cast": w.float(),
            "padded": torch.cat([w, torch.zeros(1, 6, dtype=w.dtype)]),
            "cleaned": torch.nan_to_num(w),
            "summed": w + state["x"],
            "twice": torch.cat([w, w]),
            "kept": w.clone(),
        }

    traced = check(
        convert, {"w": bf16(5, 6), "x": bf16(5, 6)}, opaque=("scaled", "cast", "padded", "cleaned", "summed", "twice")
    )
    assert "F32" in traced.opaque["cast"]
    assert "constant" in traced.opaque["padded"]
    assert traced.unread == ("x",)


def test_a_transform_that_spares_small_integers_is_caught_by_the_second_probe():
    traced = check(lambda s: {"out": torch.clamp(s["w"], max=256.0)}, {"w": bf16(64, 64)}, opaque=("out",))
    assert "stored bits" in traced.opaque["out"]


def test_a_permutation_without_structure_is_opaque():
    order = torch.randperm(9000, generator=torch.Generator().manual_seed(1))
    traced = check(lambda s: {"out": s["w"][order]}, {"w": bf16(9000)}, opaque=("out",))
    assert "no strided way" in traced.opaque["out"]


def test_outputs_that_change_between_runs_are_refused():
    runs = iter(range(100))
    with pytest.raises(RejectedError, match="two runs"):
        trace_conversion(lambda s: {f"out{next(runs)}": s["w"]}, {"w": bf16(4)})


def test_empty_and_rank_0_tensors_pass():
    check(lambda s: dict(s), {"empty": bf16(0, 4), "scalar": bf16(), "w": bf16(2)})


def test_meta_inputs_will_do():
    inputs = {"w": torch.empty(4, 4, dtype=torch.bfloat16, device="meta")}
    assert set(trace_conversion(lambda s: {"a": s["w"][1:]}, inputs).placements) == {"a"}


def counted(convert):
    calls = []

    def run(state):
        calls.append(len(state))
        return convert(state)

    return run, calls


def halves(state):
    return {"a": state["w"][:2].clone(), "b": state["w"][2:].t(), "double": state["w"] * 2}


def test_a_guess_that_random_bits_confirm_saves_the_digits():
    inputs = {"w": bf16(4, 300)}
    first, calls = counted(halves)
    traced = trace_conversion(first, inputs)
    again, fewer = counted(halves)
    assert trace_conversion(again, inputs, guess=traced) is traced
    assert 2 <= len(fewer) < len(calls)


@pytest.mark.parametrize(
    "other",
    [
        lambda s: {**halves(s), "a": s["w"][1:3].clone()},
        lambda s: {**halves(s), "b": s["w"][2:].t() + 0},  # -0.0 and NaN payloads do not survive
        lambda s: {**halves(s), "more": s["w"]},
        lambda s: {"a": s["w"][:2].clone(), "b": s["w"][2:].t()},
        lambda s: {**halves(s), "a": s["w"][:1].clone()},
    ],
)
def test_a_guess_that_does_not_hold_counts_for_nothing(other):
    inputs = {"w": bf16(4, 300)}
    guess = trace_conversion(halves, inputs)
    assert trace_conversion(other, inputs, guess=guess) == trace_conversion(other, inputs) != guess


def test_a_guess_about_other_inputs_counts_for_nothing():
    guess = trace_conversion(halves, {"w": bf16(4, 300)})
    assert trace_conversion(lambda s: {"a": s["v"]}, {"v": bf16(4)}, guess=guess).specs.keys() == {"a"}
    small = trace_conversion(lambda s: halves({"w": s["w"].repeat(1, 300)}), {"w": bf16(4, 1)}, guess=guess)
    assert "more than once" in small.opaque["a"]
