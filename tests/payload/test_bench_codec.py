"""The codec benchmark, on little input, and the numbers that must come out of it at full size."""

import numpy as np
import pytest
import zstandard

from deltarefit.canonical import TensorSpec
from deltarefit.testing import bench_codec
from deltarefit.testing.bench_codec import WeightChange, bound_nbytes, floor_nbytes, paper_nbytes, payload_nbytes


def test_payloads_come_near_the_floor_and_below_the_paper_s_layout():
    result = bench_codec.run(table2=False, training=False, num_items=8, item_elements=500_000, change_rates=(0.01, 0.03))
    assert [row["change_rate"] for row in result["layouts"]] == [0.01, 0.03]
    for row in result["layouts"]:
        assert row["changed"] == pytest.approx(8 * 500_000 * row["change_rate"], rel=0.02)
        assert row["nbytes"] <= 0.75 * row["paper_nbytes"]
        assert row["bound_nbytes"] < row["floor_nbytes"] < row["nbytes"] <= 1.05 * row["floor_nbytes"]
        assert row["nbytes"] < row["xor_nbytes"] < row["overwrite_nbytes"]


def test_floor_is_the_entropy():
    """Half of the elements changed by one of two differences: one bit for each place and one for each change."""
    old = np.zeros(4096, "<u2")
    new = old.copy()
    new[::4], new[1::4] = 1, 2
    assert floor_nbytes([WeightChange(TensorSpec("w", "BF16", (4096,)), old, new)]) == pytest.approx((4096 + 2048) / 8)


@pytest.mark.parametrize("mantissa", [0, 1, 64, 127])
def test_the_bound_counts_what_the_old_weight_says_about_the_step(mantissa):
    """Of words of one mantissa the entropy as drawn is the entropy as computed; the places are certain here."""
    old = np.full(400_000, (127 << 7) + mantissa, "<u2")
    new = bench_codec.changed_words(old, 1.1, np.random.default_rng(1))
    counts = np.unique(new, return_counts=True)[1]
    drawn_bits = float((counts * np.log2(old.size / counts)).sum())
    change = WeightChange(TensorSpec("w", "BF16", old.shape), old, new)
    assert bound_nbytes([change]) == pytest.approx(drawn_bits / 8, rel=2e-3)


def test_nothing_changed_costs_nothing():
    old = np.zeros(16, "<u2")
    same = [WeightChange(TensorSpec("w", "BF16", (16,)), old, old)]
    assert (payload_nbytes(same), paper_nbytes(same), floor_nbytes(same)) == (0, 0, 0)


def test_paper_s_layout_takes_the_smallest_width_per_tensor():
    old = np.zeros(100_000, "<u2")

    def nbytes(*positions):
        new = old.copy()
        new[list(positions)] = 3
        return paper_nbytes([WeightChange(TensorSpec("w", "BF16", (100_000,)), old, new)])

    # A frame of ten bytes takes 9 more than its content; masks are 2 bytes each.
    assert [nbytes(0, 256 + extra, 257 + extra) for extra in (0, 1, 65281)] == [9 + 3 + 9 + 6, 9 + 6 + 9 + 6, 9 + 12 + 9 + 6]


@pytest.mark.torch
@pytest.mark.slow
def test_table_2_of_the_paper_to_the_byte():
    rows = bench_codec.run(layouts=False, training=False)["table2"]
    assert [row["changed"] for row in rows] == [469_195, 4_487_140, 16_516_798]
    if ".".join(map(str, zstandard.ZSTD_VERSION)) != bench_codec.REFERENCE_ZSTD:
        pytest.skip(f"the bytes are those of zstd {bench_codec.REFERENCE_ZSTD}")
    assert {row["noise_std"]: (row["overwrite_nbytes"], row["xor_nbytes"]) for row in rows} == bench_codec.TABLE2_NBYTES
    assert all(row["difference_nbytes"] < 0.7 * row["xor_nbytes"] for row in rows)


@pytest.mark.torch
@pytest.mark.slow
def test_real_training_steps_change_few_elements_by_little():
    rows = bench_codec.run(table2=False, layouts=False, training_steps=2, warm_up_steps=10)["training"]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row["change_rate"] < 0.05
        assert row["floor_nbytes"] < row["nbytes"] < row["paper_nbytes"]


def test_notes_say_when_bytes_are_not_the_paper_s():
    small = bench_codec.run(table2=False, layouts=False, training=False)
    assert small["notes"] == [] or zstandard.ZSTD_VERSION != (1, 5, 7)
    assert (small["table2"], small["layouts"], small["training"]) == ([], [], [])
