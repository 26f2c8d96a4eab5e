"""The position-keyed digest: its definition, what it must catch, and that every instruction set computes it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    COMPILED,
    Guarded,
    box_pieces,
    contiguous,
    flat_indices,
    random_words,
    shards,
    special_words,
    storage_indices,
)

from deltarefit import kernels
from deltarefit.canonical import WORDS, TensorDigest
from deltarefit.errors import BaseMismatchError
from deltarefit.kernels import Isa
from deltarefit.kernels.mix import digit_keys
from deltarefit.pieces import Cast, Piece, StridedView, whole

ALL = [Isa.NUMPY, *COMPILED]
LANE = 2**64
HALF = 2**32
LANES = (
    (0x7FEB352D, 15, 0x846CA68B, 16, 0x64656C7461726566, 0xA0761D6478BD642F, 0x8EBC6AF09C88C6E3),
    (0x21F0AAAD, 15, 0xD35A2D97, 15, 0x69742D6469676974, 0xE7037ED1A0B428DB, 0x589965CC75374CC3),
)


def defined_key(digit: int, lane: int) -> int:
    first, shift, second, last_shift, seed, _, _ = LANES[lane]
    z = (seed + (digit // HALF + 1) * 0x9E3779B97F4A7C15) % LANE
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % LANE
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % LANE
    h = (digit % HALF * first + ((z ^ (z >> 31)) >> 32)) % HALF
    h = ((h ^ (h >> shift)) * second) % HALF
    return (h ^ (h >> last_shift)) | 1


def defined(flat: list[int], bits: list[int], width: int) -> TensorDigest:
    """Design note 0004, in whole numbers of Python."""
    totals = []
    for lane in (0, 1):
        step, base = LANES[lane][5:]
        total = 0
        for index, word in zip(flat, bits, strict=True):
            if width == 8:
                parts = [(2 * index, word % HALF), (2 * index + 1, word // HALF)]
            else:
                byte = index * width
                parts = [(byte // 4, word << (8 * (byte % 4)))]
            total += sum(value * defined_key(digit, lane) for digit, value in parts) + step * index + base
        totals.append(total % LANE)
    return TensorDigest(*totals)


def digest_of(words: np.ndarray, isa: Isa, start: int = 0) -> TensorDigest:
    piece = Piece(StridedView(start, (words.size,), (1,)), whole((words.size,)))
    return kernels.digest(words, (piece,), isa=isa)


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("start", [0, 1, 2, 3, 1021, 4095, 2**40 + 5, 2**31 - 9, 2**32 - 9, 2**33 - 9, 2**34 - 9])
def test_definition(isa, width, start):
    words = special_words(np.random.default_rng(start % 97), 3001 if start == 4095 else 37, width)
    flat = np.arange(start, start + words.size, dtype=np.int64)
    expected = defined(flat.tolist(), words.tolist(), width)
    assert digest_of(words, isa, start) == expected
    assert kernels.digest_records(flat, words, isa=isa) == expected
    order = np.random.default_rng(1).permutation(words.size)
    assert kernels.digest_records(flat[order], words[order], isa=isa) == expected


@pytest.mark.parametrize("isa", ALL)
def test_pinned(isa):
    """A change of the definition breaks audits between releases; it needs a new format version."""
    words = np.arange(5000, dtype=np.uint16) * np.uint16(40503)
    assert digest_of(words, isa).hex() == "da740e691e7270b4dfc10c0849a194fc"
    assert digest_of(words.view(np.uint8), isa).hex() == "7fc6e60eecbbb4f009200c006f85a908"
    assert digest_of(words.view(np.uint64), isa).hex() == "ec6a74069666da7d2f3d13977d7b7021"


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_shards_of_every_shape(isa, width):
    rng = np.random.default_rng(width)
    for shard in shards(width):
        storage = random_words(rng, shard.storage_elements, width)
        expected = kernels.digest_records(flat_indices(shard.pieces), storage[storage_indices(shard.pieces)], isa=Isa.NUMPY)
        guarded = Guarded.of(storage, 3)
        assert kernels.digest(guarded.words, shard.pieces, isa=isa) == expected
        assert guarded.intact()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_parts_add_up_to_the_whole(width, seed, data):
    rng = np.random.default_rng(seed)
    shape = tuple(data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=3)))
    shard, _ = box_pieces(rng, shape, width, Cast.SAME)
    storage = special_words(rng, shard.storage_elements, width)
    expected = kernels.digest_records(flat_indices(shard.pieces), storage[storage_indices(shard.pieces)], isa=Isa.NUMPY)
    for isa in ALL:
        parts = [kernels.digest(storage, (piece,), isa=isa) for piece in shard.pieces]
        assert sum(parts, TensorDigest()) == kernels.digest(storage, shard.pieces, isa=isa) == expected


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_single_bit_flip_is_seen_in_both_lanes(width):
    rng = np.random.default_rng(width)
    flat = np.array([0, 1, 2, 3, 1023, 1024, 4095, 4096, 2**33 + 1, 2**61], np.int64)
    for word in special_words(rng, 6, width):
        for index in flat:
            one = np.array([index])
            before = kernels.digest_records(one, np.array([word]))
            for bit in range(8 * width):
                after = kernels.digest_records(one, np.array([word ^ WORDS[width].type(1 << bit)]))
                assert before.lane0 != after.lane0
                assert before.lane1 != after.lane1


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), near=st.booleans())
def test_swapped_elements_are_seen_in_both_lanes(width, seed, near):
    rng = np.random.default_rng(seed)
    flat = np.array([rng.integers(0, 2**40), 0], np.int64)
    flat[1] = flat[0] + 1 + (rng.integers(0, 5) if near else rng.integers(0, 2**30))
    bits = special_words(rng, 2, width)
    if bits[0] == bits[1]:
        bits[1] ^= WORDS[width].type(1 << (8 * width - 1))  # the hardest pair: they differ in the sign alone
    before, after = kernels.digest_records(flat, bits), kernels.digest_records(flat, bits[::-1].copy())
    assert before.lane0 != after.lane0
    assert before.lane1 != after.lane1


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_two_sign_flips_do_not_cancel(width):
    """2^63 times any odd key is the same number, so an 8-byte element must not be multiplied whole."""
    words = np.zeros(512, WORDS[width])
    flipped = words.copy()
    flipped[[17, 401]] = 1 << (8 * width - 1)
    assert digest_of(words, Isa.NUMPY) != digest_of(flipped, Isa.NUMPY)


def test_zero_bits_at_index_zero_count():
    """A part of zeros is not the same as no part, wherever it lies."""
    seen = {kernels.digest_records(np.array([index]), np.zeros(1, np.uint16)).hex() for index in range(4096)}
    assert len(seen) == 4096
    assert TensorDigest().hex() not in seen


def test_keys_are_odd_and_seldom_equal():
    """What the guarantees of design note 0004 rest on: a key is odd, and no two digits share both of their keys."""
    digits = np.arange(200_000, dtype=np.uint64)
    keys = [digit_keys(lane, digits) for lane in (0, 1)]
    for one in keys:
        assert (one % 2 == 1).all()
        assert one.max() < 2**32
        assert abs(one.mean() / 2**31 - 1) < 0.01
    assert np.unique(keys[0] + (keys[1] << np.uint64(32))).size == digits.size


@pytest.mark.parametrize("log2_distance", range(0, 31, 3))
def test_errors_on_the_corners_of_a_rectangle_do_not_cancel(log2_distance):
    """+1 and -1 in two places, -1 and +1 a power of two further on: what weak keys would let through."""
    rng = np.random.default_rng(log2_distance)
    places = np.unique(rng.integers(0, 2**31, 20_000)).astype(np.uint64)
    steps = [digit_keys(lane, places + np.uint64(1 << log2_distance)) - digit_keys(lane, places) for lane in (0, 1)]
    both = np.stack(steps, axis=1)
    assert np.unique(both, axis=0).shape[0] == places.size


@pytest.mark.parametrize("isa", ALL)
def test_widened_elements_count_as_their_upper_half(isa):
    rng = np.random.default_rng(2)
    narrow = random_words(rng, 5000, 2)
    storage = narrow.astype(np.uint32) << 16
    piece = Piece(StridedView(11, (50, 100), (300, 1)), StridedView(0, (50, 100), (1, 50)), Cast.WIDEN)
    expected = kernels.digest_records(flat_indices((piece,)), narrow[storage_indices((piece,))])
    assert kernels.digest(storage, (piece,), isa=isa) == expected
    storage[50 * 7 + 3] |= 0x40
    with pytest.raises(BaseMismatchError, match=f"flat index {11 + 300 * 3 + 7}:"):
        kernels.digest(storage, (piece,), isa=isa)


@pytest.mark.parametrize("isa", ALL)
def test_long_runs(isa):
    shard = contiguous(2, 300_001)
    words = random_words(np.random.default_rng(9), 300_001, 2)
    assert kernels.digest(words, shard.pieces, isa=isa) == kernels.digest(words, shard.pieces, isa=Isa.NUMPY)
