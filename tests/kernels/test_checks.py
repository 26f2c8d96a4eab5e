"""Whatever does not fit is refused with words, before anything is written."""

import numpy as np
import pytest

from deltarefit import kernels
from deltarefit.canonical import TensorSpec
from deltarefit.errors import PayloadInvalidError, RejectedError
from deltarefit.pieces import Cast, Piece, StridedView, whole
from deltarefit.records import CodedItem, Encoding, LocationForm

SPEC = TensorSpec("t", "BF16", (10, 10))
PIECES = (Piece(whole((10, 10)), whole((10, 10))),)


def words(count=100, dtype=np.uint16):
    return np.zeros(count, dtype)


def scan(candidate=None, baseline=None, pieces=PIECES, spec=SPEC):
    candidate = words() if candidate is None else candidate
    baseline = words() if baseline is None else baseline
    return kernels.scan(spec, candidate, baseline, pieces, Encoding.XOR)


def piece(offset, shape, stride, at=0, cast=Cast.SAME):
    return Piece(StridedView(offset, shape, stride), StridedView(at, shape, stride), cast)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"candidate": words(dtype=np.int16)}, "flat array of unsigned words"),
        ({"candidate": words(dtype=np.float32)}, "flat array of unsigned words"),
        ({"candidate": words(dtype=">u2")}, "flat array of unsigned words"),
        ({"candidate": words().reshape(10, 10)}, "flat array of unsigned words"),
        ({"candidate": [0] * 100}, "flat array of unsigned words"),
        ({"candidate": words(200)[::2]}, "contiguous"),
        ({"candidate": words(dtype=np.uint32)}, "uint16 words in the candidate"),
        ({"baseline": words(dtype=np.uint32)}, "uint16 words in the baseline"),
        ({"baseline": words(99)}, "baseline of 100 words, got 99"),
        ({"candidate": words(99)}, "reaches element 99"),
        ({"pieces": (piece(1, (100,), (1,)),), "candidate": words(200)}, "reaches flat index 100"),
        ({"pieces": (piece(0, (10,), (1,)), piece(5, (10,), (1,))), "baseline": words(20)}, "out of order"),
        ({"pieces": (piece(50, (10,), (1,)), piece(0, (10,), (1,))), "baseline": words(20)}, "out of order"),
        ({"pieces": (piece(0, (5, 5), (2, 3)),), "baseline": words(25)}, "out of order"),
        ({"pieces": (Piece(*[whole((10, 10))] * 2, Cast.WIDEN),)}, "keep the stored bits"),
    ],
)
def test_scan_refuses(arguments, text):
    with pytest.raises(RejectedError, match=text):
        scan(**arguments)


ITEM = CodedItem(SPEC, Encoding.XOR, LocationForm.RUN, 0, 100, (), (np.ones(100, np.uint8), np.ones(100, np.uint8)))


def read_only():
    frozen = words()
    frozen.flags.writeable = False
    return frozen


@pytest.mark.parametrize(
    ("storage", "pieces", "text"),
    [
        (words(99), PIECES, "reaches element 99"),
        (words(dtype=np.uint32), PIECES, "cannot go to storage words uint32 with cast SAME"),
        (words(), (Piece(*[whole((10, 10))] * 2, Cast.WIDEN),), "widened pieces need 4-byte"),
        (words(), (*PIECES, Piece(*[whole((1,))] * 2, Cast.WIDEN)), "expected one cast"),
        (read_only(), PIECES, "writeable"),
        (words(200), (piece(1, (100,), (1,)),), "reaches flat index 100"),
        (words(), (piece(0, (5, 5), (2, 3)),), "out of order"),
        (words(), (Piece(StridedView(0, (4, 4), (4, 1)), StridedView(0, (4, 4), (0, 1))),), "one storage element for several"),
    ],
)
def test_apply_refuses(storage, pieces, text):
    with pytest.raises(RejectedError, match=text):
        kernels.apply_item(storage, pieces, ITEM)
    assert not storage.any()
    if "flat index 100" not in text:
        with pytest.raises(RejectedError, match=text):
            kernels.apply(storage, pieces, np.arange(16, dtype=np.int64), np.ones(16, np.uint16), Encoding.XOR)
        assert not storage.any()


def test_apply_refuses_positions_that_do_not_match_the_values():
    for positions in (np.arange(3, dtype=np.int64), np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int64).reshape(2, 2)):
        with pytest.raises(PayloadInvalidError, match="expected 4 int64 positions"):
            kernels.apply(words(), PIECES, positions, np.ones(4, np.uint16), Encoding.XOR)


def test_commit_and_gather_refuse():
    table = kernels.PieceTable(PIECES)
    with pytest.raises(RejectedError, match="baseline of 100 words"):
        kernels.commit_many([(words(99), words(), table, "")])
    with pytest.raises(RejectedError, match="baseline of 100 words"):
        kernels.commit_many([(words(dtype=np.uint32), words(), table, "")])
    with pytest.raises(RejectedError, match="writeable"):
        kernels.commit_many([(read_only(), words(), table, "")])
    with pytest.raises(RejectedError, match="reaches element"):
        kernels.gather(words(99), PIECES)
    with pytest.raises(RejectedError, match="reaches element"):
        kernels.digest(words(99), PIECES)


def test_digest_of_records_refuses():
    with pytest.raises(RejectedError, match="flat indices from 0"):
        kernels.digest_records(np.array([-1], np.int64), np.zeros(1, np.uint16))
    with pytest.raises(RejectedError, match="flat indices from 0"):
        kernels.digest_records(np.array([1, 2], np.int64), np.zeros(1, np.uint16))


def test_more_axes_than_the_compiled_walkers_hold():
    deep = piece(0, (2,) * 65, tuple(1 << (2 * axis) for axis in range(64, -1, -1)))
    with pytest.raises(RejectedError, match="axes"):
        kernels.digest(words(), (deep,))
