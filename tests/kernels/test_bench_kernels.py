"""The kernel benchmark measures what it says: its rows are complete, and what it times gives the right bits."""

from __future__ import annotations

import numpy as np
import pytest

from deltarefit import kernels, payload
from deltarefit.canonical import Catalog
from deltarefit.testing import bench_kernels


def test_rows_are_complete_on_a_small_shard():
    result = bench_kernels.run(nbytes=4 * bench_kernels._TENSOR_ELEMENTS, change_rates=(0.03,), rounds=1)
    names = {(row["name"], row["isa"]) for row in result["rows"]}
    assert {name for name, _ in names} == {"memcpy", "read", "scan", "owner", "receiver", "apply", "digest", "commit"}
    assert {isa for name, isa in names if name == "scan"} == {
        isa.name.lower() for isa in kernels.available_isas() if isa is not kernels.Isa.NUMPY
    }
    assert all(row["ratio_to_memcpy"] > 0 and row["ratio_to_read"] > 0 for row in result["rows"])


@pytest.mark.parametrize("change_rate", [0.01, 0.05])
def test_what_is_timed_turns_the_old_shard_into_the_new_one(change_rate):
    shard = bench_kernels._shard(2 * bench_kernels._TENSOR_ELEMENTS, change_rate, seed=1)
    found = np.count_nonzero(shard.before != shard.after) / shard.before.size
    assert found == pytest.approx(change_rate, rel=0.03)
    resident = shard.before.copy()
    tensors = shard.tensors()
    data = bench_kernels._owner(tensors)
    assert len(payload.decode(data).items) == 2
    catalog = Catalog(tensor.spec for tensor in tensors)
    bench_kernels._receiver(bench_kernels._bind(resident, shard, None), data, catalog)
    assert np.array_equal(resident, shard.after)
