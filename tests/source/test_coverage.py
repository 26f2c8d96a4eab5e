"""The paper's coverage tables, reproduced, and ours beside them (Tables D.1, D.2, Fig. D.2)."""

import math
from types import SimpleNamespace

import msgspec
import pytest
from model_catalogs import nemotron_super_120b, nemotron_ultra_550b, qwen3_30b_a3b
from source_cases import row_shards, spec

from deltarefit.canonical import Catalog
from deltarefit.errors import RejectedError
from deltarefit.source import (
    ParallelDegrees,
    SourceSettings,
    coverage_of,
    cut_into_buckets,
    cut_into_chunks,
    elect_owners,
    open_source,
)
from deltarefit.source.task import ConversionTask
from deltarefit.testing.collective import run_ranks


@pytest.fixture(scope="module")
def qwen():
    return qwen3_30b_a3b()


@pytest.fixture(scope="module")
def ultra():
    return nemotron_ultra_550b()


def by_label(report):
    return {row.weight_type: row for row in report.by_type}


def test_the_papers_classes_cover_qwen3_30b_as_table_d2_says(qwen):
    report = coverage_of(qwen, classes="paper")
    assert (report.tensors_total, report.tensors_direct) == (18867, 18721)
    assert report.bytes_total == 61_064_245_248
    assert round(100 * report.bytes_direct / report.bytes_total, 1) == 96.3
    rows = by_label(report)
    assert (rows["routed experts"].tensors, round(100 * rows["routed experts"].share, 2)) == (18432, 94.95)
    assert (rows["attention output projection"].tensors, round(100 * rows["attention output projection"].share, 2)) == (
        48,
        1.32,
    )
    assert (rows["router"].tensors, rows["normalisation"].tensors) == (48, 193)
    residual = rows["attention queries"].nbytes + rows["attention keys and values"].nbytes
    assert round(100 * residual / report.bytes_total, 2) == 1.65
    assert round(100 * rows["embedding and output head"].share, 2) == 2.04


@pytest.mark.parametrize(("degree", "direct", "total"), [(1, 18721, 18867), (4, 74161, 74307), (8, 148081, 148227)])
def test_items_of_the_papers_classes_grow_as_figure_d2_says(qwen, degree, direct, total):
    report = coverage_of(qwen, ParallelDegrees(degree, degree), classes="paper")
    assert (report.items_direct, report.items_total) == (direct, total)


def test_the_papers_classes_cover_nemotron_ultra_as_table_d1_says(ultra):
    report = coverage_of(ultra, classes="paper")
    assert report.tensors_total - report.tensors_direct == 185
    assert abs(report.bytes_total / 1e9 - 1121) < 1
    assert round(100 * report.bytes_direct / report.bytes_total, 1) == 97.0
    rows = by_label(report)
    assert (rows["routed experts"].tensors, round(100 * rows["routed experts"].share, 1)) == (50176, 93.9)
    assert report.tensors_direct - rows["routed experts"].tensors == 662
    assert rows["attention queries"].tensors + rows["attention keys and values"].tensors == 39
    assert rows["Mamba input projection and convolution"].tensors == 144


def test_items_of_nemotron_ultra_are_those_of_appendix_d(ultra):
    report = coverage_of(ultra, ParallelDegrees(8, 8), classes="paper")
    assert (report.items_direct, report.items_total) == (403_869, 404_054)


@pytest.mark.parametrize("make", [qwen3_30b_a3b, nemotron_super_120b, nemotron_ultra_550b])
def test_pieces_cover_everything_in_16_bits(make):
    catalog = make()
    report = coverage_of(catalog, ParallelDegrees(8, 8, num_key_value_heads=4))
    assert report.bytes_direct == report.bytes_total == catalog.nbytes
    assert report.tensors_direct == report.tensors_total == len(catalog)


def test_keys_and_values_have_no_more_items_than_heads(qwen):
    rows = by_label(coverage_of(qwen, ParallelDegrees(8, 8, num_key_value_heads=4)))
    assert rows["attention keys and values"].items == 96 * 4
    assert rows["attention queries"].items == 48 * 8


def test_a_computed_tensor_is_residual_with_its_reason():
    catalog = Catalog([spec("layers.0.q_proj.weight"), spec("layers.0.norm.weight", (4,)), spec("x", (0,))])
    report = coverage_of(catalog, residual={"layers.0.q_proj.weight": "changes the stored bits of layers.0.q"})
    assert [(row.weight_type, row.path, row.reason, row.items) for row in report.by_type] == [
        ("normalisation", "direct", "", 1),
        ("other", "direct", "", 0),
        ("attention queries", "residual", "changes the stored bits of layers.0.q", 1),
    ]
    named = coverage_of(catalog, residual={"layers.0.q_proj.weight"}.__class__(["layers.0.q_proj.weight"]))
    assert named.by_type[-1].reason == "computed by the export"
    fields = msgspec.to_builtins(report)
    assert {"tensors_total", "tensors_direct", "bytes_total", "bytes_direct", "items_total", "items_direct", "by_type"} == set(
        fields
    )


def test_a_policy_of_nothing_has_no_shares_to_divide():
    assert coverage_of(Catalog([])).by_type == ()
    with pytest.raises(RejectedError, match="at least 1 each"):
        ParallelDegrees(0)


def test_baseline_of_the_papers_classes_is_its_checkpoint_and_a_little(qwen, ultra):
    """1.04 and 1.03 checkpoints, about 36 GB an owner; with pieces it is 1.00."""
    for catalog, expected in ((qwen, 1.0369), (ultra, 1.0301)):
        report = coverage_of(catalog, classes="paper")
        assert abs(1 + (report.bytes_total - report.bytes_direct) / report.bytes_total - expected) < 0.0005
    assert abs(1.0301 * ultra.nbytes / 32 / 1e9 - 36.1) < 0.1


def test_bucket_targets_give_about_the_papers_number_of_payloads():
    """482 payloads over 32 owners at 247.2 GB, from 256 MiB chunks in 512 MiB buckets; half as many again with smaller ones at
    both ends, as owners cut them."""
    catalog = nemotron_super_120b()
    assert abs(catalog.nbytes / 1e9 - 247.2) < 1.5
    assert math.ceil(catalog.nbytes / 32 / SourceSettings().bucket_nbytes) * 32 == 480
    tasks = [ConversionTask(s.name, s, (), lambda: None, tuple(range(32))) for s in catalog.values()]
    for task in tasks:
        object.__setattr__(task, "pieces", (_Whole(task.spec.num_elements),))
    owners = elect_owners(tasks)
    shares = [[s.nbytes for name, s in sorted(catalog.items()) if owners[name] == rank] for rank in range(32)]
    assert 470 <= sum(num_payloads(share, None) for share in shares) <= 500
    assert 700 <= sum(num_payloads(share, sum(share)) for share in shares) <= 750


def num_payloads(sizes, total_nbytes):
    """Of an owner of tensors that all change; with ``total_nbytes`` smaller ones come first and last."""
    settings, item = SourceSettings(), SimpleNamespace(spec=spec())
    chunks = cut_into_chunks([(size, size) for size in sizes], settings.chunk_nbytes, total_nbytes=total_nbytes)
    scanned = [((item,) * len(chunk), sum(chunk)) for chunk in chunks]
    return len(list(cut_into_buckets(scanned, settings.bucket_nbytes, total_nbytes=total_nbytes)))


class _Whole:
    def __init__(self, num_elements):
        self.num_elements = num_elements


def test_a_tensor_of_another_dtype_is_cast_and_still_direct():
    catalog = Catalog([spec("layers.0.q_proj.weight"), spec("layers.0.norm.weight", (4,))])
    report = coverage_of(catalog, cast={"layers.0.norm.weight": "held as F32"}, items={"layers.0.q_proj.weight": 3})
    assert [(row.weight_type, row.path, row.reason, row.items) for row in report.by_type] == [
        ("attention queries", "direct", "", 3),
        ("normalisation", "cast", "held as F32", 0),
    ]
    assert (report.tensors_direct, report.bytes_direct) == (2, report.bytes_total)


def test_items_of_live_ranks_are_what_their_owners_would_send(ranks_of_rows):
    reports = ranks_of_rows
    assert all(report == reports[0] for report in reports)
    assert [(row.tensors, row.items) for row in reports[0].by_type] == [(2, 3)]


@pytest.fixture
def ranks_of_rows():
    """A tensor of five rows on three ranks, and an empty one on all of them."""
    tensor, empty = spec("w", (5, 4)), spec("empty", (0, 4))

    class Adapter:
        def __init__(self, rank):
            self._rank = rank

        def catalog(self):
            return Catalog([tensor, empty])

        def tasks(self):
            return [row_shards(tensor, 3)[self._rank], ConversionTask("empty", empty, (), lambda: None, (0, 1, 2))]

        def barrier(self):
            return None

    def work(collective):
        return open_source(Adapter(collective.rank), collective, SourceSettings(scan_threads=1)).coverage(collective)

    return run_ranks(3, work)
