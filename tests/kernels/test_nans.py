"""NaN elements are counted while they are committed, by the same rule as torch has, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import COMPILED

from deltarefit import kernels
from deltarefit.canonical import DTYPE_NBYTES, word_dtype
from deltarefit.errors import RejectedError
from deltarefit.kernels import Isa
from deltarefit.kernels.nans import NAN_RULES
from deltarefit.pieces import Piece, StridedView, whole

ALL = [Isa.NUMPY, *COMPILED]
TORCH = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def special(dtype):
    """All bits of narrow dtypes; of wide ones bits around zero, infinity and the ends, and random ones."""
    words = word_dtype(dtype)
    if words.itemsize <= 2:
        return np.arange(2 ** (8 * words.itemsize), dtype=words)
    bits = 8 * words.itemsize
    infinity = NAN_RULES.get(dtype, (0, 0, 0))[2]
    edges = [
        (at + step) % 2**bits for at in (0, infinity, infinity | 1 << (bits - 1), 1 << (bits - 1)) for step in (-2, -1, 0, 1, 2)
    ]
    return np.concatenate([np.array(edges, words), np.random.default_rng(1).integers(0, 2**bits, 999, words, endpoint=False)])


@pytest.mark.torch
@pytest.mark.parametrize("dtype", sorted(NAN_RULES))
def test_the_rule_is_torchs(dtype):
    torch = pytest.importorskip("torch")
    words = special(dtype)
    signed = torch.from_numpy(words.view(f"i{words.itemsize}") if words.itemsize > 1 else words)
    expected = torch.isnan(signed.view(getattr(torch, TORCH[dtype])).to(torch.float64)).numpy()
    found = np.array([kernels.count_nans(word[None], dtype) for word in words[:: max(1, words.size // 4096)]])
    assert np.array_equal(found, expected[:: max(1, words.size // 4096)])
    assert kernels.count_nans(words, dtype) == expected.sum() > 0


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("dtype", sorted(DTYPE_NBYTES))
def test_a_commit_counts_what_it_copies(dtype, isa):
    words = np.tile(special(dtype), 1 if DTYPE_NBYTES[dtype] == 2 else 3)
    baseline = np.empty_like(words)
    table = kernels.PieceTable([Piece(whole((words.size,)), whole((words.size,)))])
    expected = kernels.count_nans(words, dtype)
    assert (expected > 0) == (dtype in NAN_RULES)
    assert kernels.commit_many([(baseline, words, table, dtype)], isa=isa) == [expected]
    assert np.array_equal(baseline, words)
    assert kernels.commit_many([(baseline, words, table, "")], isa=isa) == [0]


@pytest.mark.parametrize("isa", ALL)
def test_strided_and_several_pieces_count_their_own_elements_only(isa):
    words = np.zeros(6 * 5000, "<u2")
    words[1::6] = 0x7FC0  # column 1
    words[3::6] = 0xFFFF  # column 3
    column = lambda n: Piece(StridedView(n * 5000, (5000,), (1,)), StridedView(n, (5000,), (6,)))  # noqa: E731
    baseline = np.empty(15000, "<u2")
    table = kernels.PieceTable([column(0), column(1), column(2)])
    assert kernels.commit_many([(baseline, words, table, "BF16")], isa=isa) == [5000]
    assert np.array_equal(baseline.reshape(3, 5000), words.reshape(5000, 6).T[:3])


@pytest.mark.parametrize("isa", ALL)
def test_many_commits_are_what_each_is(isa):
    work, expected = [], []
    for dtype in ("BF16", "F8_E4M3", "I32", "F32"):
        words = np.tile(special(dtype), 2)
        for step in (1, 3):
            count = words.size // step
            pieces = kernels.PieceTable([Piece(whole((count,)), StridedView(0, (count,), (step,)))])
            work.append((np.empty(count, words.dtype), words, pieces, dtype))
            expected.append(words[::step][:count].copy())
    counted = [kernels.count_nans(words, dtype) for words, (*_, dtype) in zip(expected, work, strict=True)]
    assert kernels.commit_many(work, isa=isa) == counted
    assert sum(counted) > 0
    assert all(np.array_equal(one[0], words) for one, words in zip(work, expected, strict=True))
    assert kernels.commit_many([], isa=isa) == []


@pytest.mark.parametrize("isa", ALL)
@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F32", "F64"])
def test_long_stretches_from_anywhere_to_anywhere(isa, dtype):
    """Longer than what is copied past the caches at once, at every offset in a cache line; nothing beside it is written."""
    rng = np.random.default_rng(len(dtype))
    word = word_dtype(dtype)
    per_line = 64 // word.itemsize
    for count in (16384 // word.itemsize - 1, 16384 // word.itemsize, 70_000 // word.itemsize):
        source = rng.integers(0, 256, (count + per_line) * word.itemsize, np.uint8).view(word)
        for start in range(per_line):
            target = np.full(count + 2 * per_line, 0x5A, word)
            words = source[per_line - start - 1 :][:count]
            table = kernels.PieceTable([Piece(whole((count,)), whole((count,)))])
            counted = kernels.commit_many([(target[start : start + count], words, table, dtype)], isa=isa)
            assert counted == [kernels.count_nans(words, dtype)]
            assert np.array_equal(target[start : start + count], words)
            assert (target[:start] == 0x5A).all()
            assert (target[start + count :] == 0x5A).all()


def test_commits_that_do_not_fit_write_nothing():
    words, view = np.ones(8, "<u2"), whole((8,))
    table = kernels.PieceTable([Piece(view, view)])
    baseline = np.zeros(8, "<u2")
    for wrong in (np.zeros(7, "<u2"), np.zeros(8, "<u4")):
        with pytest.raises(RejectedError, match="expected a baseline of 8 words uint16"):
            kernels.commit_many([(baseline, words, table, ""), (wrong, words, table, "")])
    with pytest.raises(RejectedError):
        kernels.commit_many([(baseline, words, table, ""), (np.zeros(8, "<u2"), words[:5], table, "")])
    assert not baseline.any()
