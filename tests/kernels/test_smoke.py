"""A scanned difference, applied to the old shard, gives the new one."""

import numpy as np

from deltarefit import kernels
from deltarefit.canonical import TensorSpec
from deltarefit.pieces import Piece, whole
from deltarefit.records import Encoding


def test_scan_then_apply_gives_the_candidate():
    rng = np.random.default_rng(1)
    spec = TensorSpec("t", "BF16", (40, 50))
    old = rng.integers(0, 2**16, spec.num_elements).astype(np.uint16)
    new = old.copy()
    new[::37] += 3
    pieces = (Piece(whole(spec.shape), whole(spec.shape)),)
    result = kernels.scan(spec, new, kernels.gather(old, pieces), pieces, Encoding.DIFFERENCE)
    got = old.copy()
    assert kernels.apply_item(got, pieces, result.item) == np.count_nonzero(old != new)
    assert np.array_equal(got, new)
