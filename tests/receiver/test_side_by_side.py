"""Several threads write what one would have written, and none writes on after an error was raised."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from deltarefit.canonical import TensorSpec
from deltarefit.errors import PayloadInvalidError
from deltarefit.kernels import BoundPieces, code_records
from deltarefit.pieces import Piece, StridedView
from deltarefit.receiver import side_by_side
from deltarefit.receiver.side_by_side import apply_side_by_side
from deltarefit.receiver.writers import HostTarget
from deltarefit.records import DeltaRecords, Encoding

pytestmark = pytest.mark.torch  # deltarefit.receiver imports it

ROWS, COLUMNS, TENSORS = 37, 8, 9


def interleaved(words):
    """Tensors whose elements lie beside each other in one storage: column n of each row belongs to tensor n."""
    found = {}
    for number in range(TENSORS):
        spec = TensorSpec(f"t{number}", "BF16" if words.itemsize == 2 else "F8_E4M3", (ROWS * COLUMNS,))
        place = StridedView(number, (ROWS * COLUMNS,), (TENSORS,))
        pieces = (Piece(StridedView(0, (ROWS * COLUMNS,), (1,)), place),)
        found[spec.name] = (spec, (HostTarget("storage", words, pieces, BoundPieces(words, pieces, spec)),))
    return found


def random_items(specs, encoding, dtype):
    rng = np.random.default_rng(5)
    items = {}
    for spec in specs:
        halves = np.array_split(np.flatnonzero(rng.random(spec.num_elements) < 0.4), 2)
        items[spec.name] = [
            code_records(DeltaRecords(spec, places, *(rng.integers(0, 256, places.size).astype(dtype) for _ in "no")), encoding)
            for places in halves
        ]
    return items


@pytest.mark.parametrize("dtype", ["<u2", "u1"])
@pytest.mark.parametrize("encoding", list(Encoding))
def test_threads_write_what_one_thread_writes(monkeypatch, dtype, encoding):
    monkeypatch.setattr(side_by_side, "_CHANGES", 1)
    used = set()
    apply_share = side_by_side._apply

    def counted(work):
        used.add(tuple(target for targets, _ in work for target in targets))
        assert threading.current_thread().name.startswith("deltarefit-share")
        return apply_share(work)

    monkeypatch.setattr(side_by_side, "_apply", counted)
    start = np.random.default_rng(1).integers(0, 256, ROWS * COLUMNS * TENSORS).astype(dtype)
    together, alone = start.copy(), start.copy()
    targets = interleaved(together)
    items = random_items([spec for spec, _ in targets.values()], encoding, dtype)
    places = {name: found for name, (_, found) in targets.items()}
    assert apply_side_by_side(items, places, num_threads=3) == sum(item.count for listed in items.values() for item in listed)
    assert len(used) > 3
    for name, (_, found) in interleaved(alone).items():
        for item in items[name]:
            found[0].apply(item)
    assert np.array_equal(together, alone)
    assert not np.array_equal(together, start)


def test_little_work_stays_on_the_callers_thread(monkeypatch):
    monkeypatch.setattr(side_by_side, "ThreadPoolExecutor", None)
    words = np.zeros(ROWS * COLUMNS * TENSORS, "<u2")
    targets = interleaved(words)
    items = random_items([spec for spec, _ in targets.values()], Encoding.OVERWRITE, "<u2")
    assert apply_side_by_side(items, {name: found for name, (_, found) in targets.items()}, num_threads=4)
    assert apply_side_by_side({}, {}, num_threads=4) == 0


def test_after_an_error_nothing_is_written_any_more(monkeypatch):
    monkeypatch.setattr(side_by_side, "_CHANGES", 1)
    words = np.zeros(ROWS * COLUMNS * TENSORS, "<u2")
    targets = interleaved(words)
    items = random_items([spec for spec, _ in targets.values()], Encoding.OVERWRITE, "<u2")
    items["t4"] = items["t3"]  # of another tensor
    with pytest.raises(PayloadInvalidError, match="these pieces are bound to t4"):
        apply_side_by_side(items, {name: found for name, (_, found) in targets.items()}, num_threads=3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("deltarefit-share")]
