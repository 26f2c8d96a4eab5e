"""Merging changes without the image equals applying them one after the other, bit for bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltarefit.canonical import TensorSpec
from deltarefit.errors import RejectedError
from deltarefit.kernels import apply_item, code_records, decode_positions
from deltarefit.payload.compose import Changes
from deltarefit.payload.locations import check_disjoint
from deltarefit.pieces import contiguous
from deltarefit.records import DeltaRecords, Encoding

DTYPES = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}


def item_of(entries: dict[int, int], encoding: Encoding, width: int, length: int):
    """An item that gives these values, as they travel, at these positions."""
    positions = np.array(sorted(entries), np.int64)
    values = np.array([entries[p] % 2 ** (8 * width) for p in sorted(entries)], f"<u{width}")
    records = DeltaRecords(TensorSpec("0", DTYPES[width], (length,)), positions, values, np.zeros_like(values))
    return code_records(records, encoding)


@st.composite
def chains(draw):
    """Word width, final length, image length, and steps of (length, items)."""
    width = draw(st.sampled_from([1, 2, 4, 8]))
    relative = draw(st.sampled_from([Encoding.DIFFERENCE, Encoding.XOR]))
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 12))
        free = draw(st.permutations(range(length)))
        items = []
        for encoding in draw(st.sampled_from([(relative,), (Encoding.OVERWRITE,), (Encoding.OVERWRITE, relative)])):
            count = draw(st.integers(0, len(free)))
            chosen, free = free[:count], free[count:]
            values = draw(st.lists(st.integers(0, 2 ** (8 * width) - 1), min_size=count, max_size=count))
            if chosen:
                items.append(item_of(dict(zip(chosen, values, strict=True)), encoding, width, length))
        steps.append((length, items))
    return width, steps, draw(st.integers(0, 12))


@given(chains(), st.randoms(use_true_random=False))
def test_merged_equals_applied_in_turn(chain, random):
    width, steps, base_length = chain
    final = steps[-1][0]
    dtype = np.dtype(f"<u{width}")
    base = np.array([random.randrange(2 ** (8 * width)) for _ in range(base_length)], dtype)
    plain = base
    for length, items in steps:
        plain = np.concatenate((plain[:length], np.zeros(max(0, length - plain.size), dtype)))
        for item in items:
            apply_item(plain, (contiguous(0, length),), item)
    changes = Changes(dtype, final, min(base_length, final))
    for length, items in steps:
        changes.resize(min(length, final))
        changes.then(items, "slice")
    merged = np.concatenate((base[:final], np.zeros(max(0, final - base_length), dtype)))
    coded = changes.coded(TensorSpec("0", DTYPES[width], (final,)))
    for item in coded:
        apply_item(merged, (contiguous(0, final),), item)
    np.testing.assert_array_equal(merged, plain)
    assert len({item.encoding for item in coded}) == len(coded)


def test_difference_and_its_opposite_leave_nothing():
    changes = Changes(np.dtype("<u2"), 8, 8)
    changes.then([item_of({3: 5}, Encoding.DIFFERENCE, 2, 8)], "slice")
    changes.then([item_of({3: -5}, Encoding.DIFFERENCE, 2, 8)], "slice")
    assert changes.coded(TensorSpec("0", "BF16", (8,))) == []


@pytest.mark.parametrize("order", [(Encoding.DIFFERENCE, Encoding.XOR), (Encoding.XOR, Encoding.DIFFERENCE)])
def test_difference_and_mask_of_one_word_are_refused(order):
    changes = Changes(np.dtype("<u2"), 8, 8)
    changes.then([item_of({3: 5}, order[0], 2, 8)], "slice")
    changes.then([item_of({2: 5}, order[1], 2, 8)], "slice")
    with pytest.raises(RejectedError, match="word 3 is changed by difference in one delta and by xor"):
        changes.then([item_of({3: 5}, order[1], 2, 8)], "slice")


def test_difference_and_mask_merge_where_the_image_is_zeros():
    changes = Changes(np.dtype("<u2"), 8, 2)
    changes.resize(8)
    changes.then([item_of({3: 5}, Encoding.DIFFERENCE, 2, 8)], "slice")
    changes.then([item_of({3: 6}, Encoding.XOR, 2, 8)], "slice")
    words = np.zeros(8, "<u2")
    for item in changes.coded(TensorSpec("0", "BF16", (8,))):
        apply_item(words, (contiguous(0, 8),), item)
    assert words.tolist() == [0, 0, 0, 3, 0, 0, 0, 0]


def test_dense_items_leave_other_words_alone():
    """A dense form would be smaller here, but it must not touch what another item or the image says."""
    rng = np.random.default_rng(0)
    for relative in (Encoding.DIFFERENCE, Encoding.XOR):
        for overwritten in (range(0), range(10), range(90, 100)):
            for image in (0, 50, 100):
                changes = Changes(np.dtype("<u1"), 100, image)
                changes.resize(100)
                some = {p: int(rng.integers(1, 256)) for p in range(100) if p % 7}
                changes.then([item_of(some, relative, 1, 100)], "slice")
                if overwritten:
                    changes.then([item_of(dict.fromkeys(overwritten, 3), Encoding.OVERWRITE, 1, 100)], "slice")
                words = np.concatenate((rng.integers(0, 256, image, dtype=np.uint8), np.zeros(100 - image, np.uint8)))
                expected = words.copy()
                for position, value in some.items():
                    before = int(expected[position])
                    expected[position] = (before + value) % 256 if relative is Encoding.DIFFERENCE else before ^ value
                expected[list(overwritten)] = 3
                items = changes.coded(TensorSpec("0", "U8", (100,)))
                last = [int(decode_positions(item)[-1]) for item in items]
                check_disjoint([item.spec for item in items], items, last, where="test")
                for item in items:
                    apply_item(words, (contiguous(0, 100),), item)
                np.testing.assert_array_equal(words, expected)


def test_difference_that_went_back_may_be_followed_by_a_mask():
    changes = Changes(np.dtype("<u2"), 8, 8)
    for value, encoding in ((5, Encoding.DIFFERENCE), (-5, Encoding.DIFFERENCE), (3, Encoding.XOR)):
        changes.then([item_of({3: value}, encoding, 2, 8)], "slice")
    (item,) = changes.coded(TensorSpec("0", "BF16", (8,)))
    assert item.encoding is Encoding.XOR


def test_difference_and_mask_merge_where_an_overwrite_lies_between():
    changes = Changes(np.dtype("<u2"), 8, 8)
    changes.then([item_of({3: 5}, Encoding.DIFFERENCE, 2, 8)], "slice")
    changes.then([item_of({3: 6}, Encoding.OVERWRITE, 2, 8)], "slice")
    changes.then([item_of({3: 1}, Encoding.XOR, 2, 8)], "slice")
    words = np.full(8, 9, "<u2")
    for item in changes.coded(TensorSpec("0", "BF16", (8,))):
        apply_item(words, (contiguous(0, 8),), item)
    assert words.tolist() == [9, 9, 9, 7, 9, 9, 9, 9]
