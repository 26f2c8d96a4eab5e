"""The construction benchmark, small: all modes find the same changes, and bytes are what the claims say."""

import numpy as np
import pytest
from source_cases import plan_for

from deltarefit.canonical import TensorSpec
from deltarefit.ids import EncodingMode, OwnerId
from deltarefit.pieces import Piece, whole
from deltarefit.records import Bucket, CodedItem, Encoding, LocationForm
from deltarefit.source import Owner, SourceSettings, onto_shard
from deltarefit.testing import bench_construct
from deltarefit.testing.bench_construct import assemble, run


@pytest.fixture(scope="module")
def small():
    """One layer of an eighth of the width."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_construct, "HIDDEN", 256)
        patch.setattr(bench_construct, "EXPERT", 192)
        yield run(num_experts=32, rounds=1, threads=1)


def test_payloads_are_cut_as_an_owner_cuts_them(monkeypatch):
    """Smaller ones first and last: what they cost belongs to what is measured."""
    monkeypatch.setattr(bench_construct, "HIDDEN", 256)
    monkeypatch.setattr(bench_construct, "EXPERT", 192)
    settings = SourceSettings(chunk_nbytes=2**20, bucket_nbytes=2**22, scan_threads=1)
    model = bench_construct._Model(1, 32, 0)
    owner = Owner(OwnerId(0), model.tasks, settings)
    model.convert()
    model.change(0.05)
    plan = plan_for(*{task.spec.name: task.spec for task in model.tasks}.values())
    cut = [bucket.input_nbytes for bucket in owner.build(plan, EncodingMode.MIXED)]
    measured = bench_construct._Construction(model, bench_construct._MODES[-1], settings).payloads()
    assert [bucket.input_nbytes for bucket, _ in measured] == cut
    assert cut[0] < max(cut) > cut[-1]


def test_every_mode_finds_the_same_changes(small):
    for rate in (0.03, 0.05):
        rows = [row for row in small["rows"] if row["change_rate"] == rate]
        assert [row["mode"] for row in rows] == ["X", "P", "F", "ours"]
        assert len({row["changed"] for row in rows}) == 1
        assert all(row["median_s"] > 0 for row in rows)


def test_our_payload_is_less_than_half_of_overwrites(small):
    """At most 0.47 of mode P at both rates."""
    for row in small["rows"]:
        if row["mode"] == "ours":
            assert row["to_p"] <= 0.47
            assert row["bytes_per_change"] < {0.03: 1.25, 0.05: 1.15}[row["change_rate"]]


def test_payloads_are_within_two_percent_of_the_entropy_of_their_planes(small):
    """What is left to gain by another coder of bytes: Huffman's own loss, tables and headers."""
    for row in small["rows"]:
        if row["mode"] == "ours":
            assert row["order0_nbytes"] * 0.98 <= row["payload_nbytes"] <= 1.02 * row["order0_nbytes"]


def test_the_entropy_of_planes_is_that_of_their_bytes():
    item = CodedItem(
        spec=TensorSpec("w", "BF16", (64,)),
        encoding=Encoding.DIFFERENCE,
        count=8,
        location_form=LocationForm.GAPS,
        start=0,
        location_planes=(np.array([0, 1] * 4, np.uint8),),
        value_planes=(np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)),
    )
    assert bench_construct.order0_nbytes(Bucket((item,), 128)) == (8 * 1 + 8 * 3 + 0) / 8


def test_an_owner_holds_its_shards_once(small):
    memory = small["memory"]
    assert memory["owned_nbytes"] <= memory["baseline_nbytes"] <= 1.05 * memory["owned_nbytes"]


def test_assembling_gives_the_canonical_tensor():
    """The fused parameter of two ranks, against numpy's own reshapes."""
    spec, pieces = next(iter(bench_construct._attention("layers.0.")))
    rows = (bench_construct.HEADS + 2 * bench_construct.GROUPS) * bench_construct.HEAD
    hidden = bench_construct.HIDDEN
    fused = np.random.default_rng(0).integers(0, 2**16, (rows, hidden), dtype=np.uint16)
    per_group = bench_construct.HEADS // bench_construct.GROUPS * bench_construct.HEAD
    expected = fused.reshape(bench_construct.GROUPS, -1, hidden)[:, :per_group].reshape(-1)

    class Task:
        def __init__(self, rank):
            half = rows // 2
            self.spec = spec
            held = (((rank * half, (rank + 1) * half),), ((0, hidden),))
            self.pieces = onto_shard(pieces, (rows, hidden), held, whole((half, hidden)))
            self.words = lambda: fused[rank * half : (rank + 1) * half].reshape(-1)

    assert all(isinstance(piece, Piece) for piece in pieces)
    assert np.array_equal(assemble([Task(0), Task(1)]), expected)
