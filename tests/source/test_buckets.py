"""How shards fill chunks and chunks fill buckets (paper C, Fig. C.3)."""

from types import SimpleNamespace

import numpy as np
import pytest
from source_cases import plan_for, spec, whole_task

from deltarefit.ids import EncodingMode, OwnerId
from deltarefit.payload import Limits
from deltarefit.source import Owner, SourceSettings, cut_into_buckets, cut_into_chunks

ITEM = SimpleNamespace(spec=spec("t", (1,)))


def sizes_of(chunks):
    return [list(chunk) for chunk in chunks]


def test_tensors_are_never_split_and_a_large_one_forms_its_own_chunk():
    sized = [(size, size) for size in (5, 90, 5)]
    assert sizes_of(cut_into_chunks(sized, 40)) == [[5], [90], [5]]
    assert sizes_of(cut_into_chunks(sized, 1000)) == [[5, 90, 5]]
    assert cut_into_chunks([], 40) == ()


def test_a_chunk_without_changes_is_charged_to_no_bucket():
    buckets = list(cut_into_buckets([((ITEM,), 256), ((), 256), ((ITEM,), 256), ((ITEM,), 256)], 512))
    assert [(len(bucket.items), bucket.input_nbytes) for bucket in buckets] == [(2, 512), (1, 256)]


def test_a_bucket_may_exceed_its_target_by_one_chunk_only():
    buckets = list(cut_into_buckets([((ITEM,), 5), ((ITEM,), 90), ((ITEM,), 5)], 60))
    assert [bucket.input_nbytes for bucket in buckets] == [5, 90, 5]


MIB = 2**20


@pytest.mark.parametrize("parts", [1, 3, 7, 40, 400])
def test_the_first_and_the_last_are_smaller(parts):
    """So the link has something to carry soon, and little is left to write once the last byte has arrived."""
    sized = [(4 * MIB, 4 * MIB)] * parts
    chunks = [sum(chunk) for chunk in cut_into_chunks(sized, 64 * MIB, total_nbytes=parts * 4 * MIB)]
    assert sum(chunks) == parts * 4 * MIB
    assert max(chunks) <= 64 * MIB
    buckets = [b.input_nbytes for b in cut_into_buckets([((ITEM,), n) for n in chunks], 256 * MIB, total_nbytes=sum(chunks))]
    assert sum(buckets) == sum(chunks)
    assert max(buckets) <= 256 * MIB
    if parts == 400:
        assert chunks[:4] == [8 * MIB, 8 * MIB, 16 * MIB, 32 * MIB]
        assert max(chunks) == 64 * MIB
        assert chunks[-1] <= 8 * MIB
        assert buckets[0] == 32 * MIB
        assert max(buckets) > 128 * MIB
        assert buckets[-1] <= 32 * MIB


def test_what_is_small_anyway_is_not_cut_smaller():
    assert [sum(chunk) for chunk in cut_into_chunks([(MIB, MIB)] * 9, 2 * MIB, total_nbytes=9 * MIB)] == [2 * MIB] * 4 + [MIB]
    buckets = cut_into_buckets([((ITEM,), MIB)] * 9, 2 * MIB, total_nbytes=9 * MIB)
    assert [bucket.input_nbytes for bucket in buckets] == [2 * MIB] * 4 + [MIB]


def test_many_small_tensors_are_no_more_than_a_payload_may_hold():
    """The largest mixtures have more tensors than one payload may have items; their names fill it too."""
    chunks = [((ITEM,) * 5, 100), ((ITEM,), 1), ((), 9), ((ITEM,) * 4, 100)]
    buckets = list(cut_into_buckets(chunks, 512, Limits(items=3)))
    assert [len(bucket.items) for bucket in buckets] == [3, 3, 3, 1]
    assert sum(bucket.input_nbytes for bucket in buckets) == 201
    named = SimpleNamespace(spec=spec("n" * 40, (1,)))
    assert [len(b.items) for b in cut_into_buckets([((named,) * 5, 10)], 512, Limits(name_nbytes=100))] == [2, 2, 1]


def test_a_tensor_larger_than_the_bucket_is_one_payload_with_one_item():
    large = spec("large", (3, 1024))
    words = np.zeros(large.num_elements, "<u2")
    owner = Owner(OwnerId(0), [whole_task(large, words)], SourceSettings(chunk_nbytes=512, bucket_nbytes=1024, scan_threads=1))
    words[::7] = 1
    buckets = list(owner.build(plan_for(large), EncodingMode.MIXED))
    assert [(len(bucket.items), bucket.input_nbytes) for bucket in buckets] == [(1, 6144)]


def test_buckets_are_handed_out_before_later_chunks_are_scanned():
    names = [spec(f"t{n}", (64,)) for n in range(40)]
    read = []

    def task(tensor):
        plain = whole_task(tensor, np.ones(64, "<u2"))
        made = whole_task(tensor, np.zeros(64, "<u2"))
        words = iter([np.zeros(64, "<u2")])

        def live():
            read.append(tensor.name)
            return next(words, plain.words())

        object.__setattr__(made, "words", live)
        return made

    settings = SourceSettings(chunk_nbytes=128, bucket_nbytes=128, scan_threads=1)
    owner = Owner(OwnerId(0), [task(tensor) for tensor in names], settings)
    read.clear()
    next(owner.build(plan_for(*names), EncodingMode.MIXED))
    assert len(read) == 1
