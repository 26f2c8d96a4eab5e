"""The apply benchmark runs, and its rows say what they should."""

from __future__ import annotations

import pytest

from deltarefit.testing.bench_apply import run

pytestmark = pytest.mark.torch


def test_rows_of_a_small_run():
    *rows, packed = run(num_tensors=24, change_rates=(0.02,), scales=(1, 2), rounds=1, packed=(2, 64, 8))["rows"]
    assert [(row["path"], row["tensors"], row["change_rate"]) for row in rows] == [
        ("scratch", 24, 0.02),
        ("compiled", 24, 0.02),
        ("compiled", 24, 0.01),
    ]
    assert rows[2]["model_nbytes"] == 2 * rows[1]["model_nbytes"]
    assert rows[2]["changed"] == rows[1]["changed"]
    assert all(row["median_s"] > 0 and row["peak_extra_nbytes"] > row["decoded_nbytes"] for row in rows)
    assert (packed["path"], packed["pieces"]) == ("packed, learnt after load", 1)
    assert packed["prewarm_s"] > packed["pack_s"] > 0
