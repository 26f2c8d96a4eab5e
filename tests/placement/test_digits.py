"""Digit probes: exact in their dtype, distinct, and decoded to the ids that they spell."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltarefit.bits import DTYPES, logical_words, tensor_from_words
from deltarefit.canonical import TensorSpec
from deltarefit.placement.digits import (
    IdSpace,
    add_digit,
    base_of,
    decode_digits,
    digit_words,
    random_words,
    special_words,
)

pytestmark = pytest.mark.torch

SPELLED = [name for name in DTYPES if name not in ("C64", "U16", "U32", "U64")]


@pytest.mark.parametrize("dtype", SPELLED)
def test_digits_are_distinct_and_come_back(dtype):
    base = base_of(dtype)
    words = digit_words(dtype, 0, base, 0)
    assert np.unique(words).size == base
    assert decode_digits(dtype, words).tolist() == list(range(base))


@pytest.mark.parametrize("dtype", [name for name in SPELLED if name != "F8_E8M0"])
def test_digits_are_the_numbers_they_spell_so_that_casts_keep_them(dtype):
    base = base_of(dtype)
    tensor = tensor_from_words(digit_words(dtype, 0, base, 0), TensorSpec("w", dtype, (base,)))
    assert tensor.to(torch.float64).tolist() == list(range(base))
    if dtype in ("BF16", "F16", "F32", "F64"):
        wider = logical_words(tensor.to(torch.float32))
        assert decode_digits("F32", wider).tolist() == list(range(base))


@pytest.mark.parametrize("dtype", SPELLED)
def test_ids_come_back_from_all_passes(dtype):
    space = IdSpace.of([TensorSpec("a", dtype, (7, 11)), TensorSpec("b", dtype, (500,))])
    ids = np.zeros(500, np.int64)
    for digit in range(space.num_digits):
        add_digit(ids, dtype, space.digit("b", digit), digit)
    assert ids.tolist() == list(range(1 + 77, 1 + 577))
    assert [(name, flat.tolist()) for name, _, flat in space.split(ids[:3])] == [("b", [0, 1, 2])]


def test_patterns_that_spell_no_digit_give_no_id():
    for dtype in ("BF16", "F32", "F8_E4M3", "I64"):
        width = np.dtype(f"<u{TensorSpec('w', dtype, ()).element_nbytes}")
        junk = np.array([np.iinfo(width).max, np.iinfo(width).max // 2], width)
        assert decode_digits(dtype, junk).tolist() == [-1, -1]
        ids = np.zeros(2, np.int64)
        add_digit(ids, dtype, junk, 0)
        assert (ids < 0).all()


def test_ids_out_of_range_belong_to_no_tensor():
    space = IdSpace.of([TensorSpec("a", "BF16", (4,)), TensorSpec("empty", "BF16", (0,)), TensorSpec("b", "BF16", (2,))])
    assert [(n, p.tolist(), f.tolist()) for n, p, f in space.split(np.array([0, 1, 6, 7, -5, 5]))] == [
        ("a", [1], [0]),
        ("b", [2, 5], [1, 0]),
    ]


def test_enormous_places_need_no_enormous_powers():
    ids = np.zeros(3, np.int64)
    add_digit(ids, "BF16", digit_words("BF16", 1, 3, 40), 40)
    assert ids.tolist() == [0, 0, 0]
    add_digit(ids, "BF16", digit_words("BF16", 1, 3, 0), 40)
    assert (ids < 0).all()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_small_tensors_meet_every_special_pattern_in_turn(dtype):
    generator = np.random.default_rng(0)
    met = set()
    for turn in range(12):
        met |= set(random_words(dtype, 1, generator, turn=turn).tolist())
    assert met == set(special_words(dtype).tolist())


def test_random_bools_are_zero_or_one():
    assert set(random_words("BOOL", 100, np.random.default_rng(0)).tolist()) == {0, 1}
