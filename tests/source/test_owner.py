"""What owners find, send, commit and refuse, down to the bit."""

import gc
import os
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_cases import apply_buckets, box_piece, plain, plan_for, random_words, spec, whole_task

from deltarefit import kernels
from deltarefit.canonical import DTYPE_NBYTES, TensorDigest
from deltarefit.errors import OperatorRequiredError, RejectedError
from deltarefit.ids import EncodingMode, OwnerId
from deltarefit.pieces import Piece, StridedView, whole
from deltarefit.records import Encoding
from deltarefit.source import ConversionTask, Owner, SourceBaseline, SourceSettings

MIXED, OVERWRITE = EncodingMode.MIXED, EncodingMode.OVERWRITE
ONE_THREAD = SourceSettings(scan_threads=1)


def owner_of(tensor, words, **changes):
    return Owner(OwnerId(0), [whole_task(tensor, words)], SourceSettings(scan_threads=1, **changes))


def emitted(owner, tensor, mode=MIXED, **plan):
    """Flat indices sent for one tensor."""
    found = []
    for bucket in owner.build(plan_for(tensor, **plan), mode):
        for item in bucket.items:
            found += kernels.decode_positions(item).tolist()
    return found


def digest_of(tensor, words):
    view = whole(tensor.shape)
    return kernels.digest(words, [Piece(view, view)])


# --- which elements count as changed ---


@pytest.mark.parametrize(("dtype", "positive", "negative"), [("BF16", 0, 0x8000), ("F32", 0, 0x80000000), ("F8_E4M3", 0, 0x80)])
def test_a_zero_that_changes_sign_is_sent_both_ways(dtype, positive, negative):
    tensor = spec(dtype=dtype)
    words = np.full(24, positive, tensor.word_dtype)
    owner = owner_of(tensor, words)
    words[3] = negative
    assert emitted(owner, tensor) == [3]
    owner.commit()
    words[3] = positive
    assert emitted(owner, tensor) == [3]


def test_float8_changes_are_found_byte_by_byte_without_a_float8_kernel():
    tensor = spec(dtype="F8_E4M3")
    words = np.zeros(24, np.uint8)
    words[:3] = [0x00, 0x7F, 0x38]
    owner = owner_of(tensor, words)
    words[:3] = [0x80, 0xFF, 0x39]
    assert emitted(owner, tensor) == [0, 1, 2]


def test_an_unchanged_nan_is_never_sent_and_a_nan_with_another_payload_is():
    tensor = spec()
    words = np.full(24, 0x7FC0, "<u2")
    owner = owner_of(tensor, words)
    for _ in range(3):
        assert emitted(owner, tensor) == []
        owner.commit()
    words[5] = 0x7FC1
    assert emitted(owner, tensor) == [5]


def test_a_change_made_two_optimizer_steps_ago_is_sent_and_one_taken_back_is_not():
    tensor = spec()
    words = random_words(tensor)
    owner = owner_of(tensor, words)
    words[4] ^= 1
    words[9] ^= 1
    words[9] ^= 1
    words[11] ^= 2
    assert emitted(owner, tensor) == [4, 11]


def test_drift_from_merging_and_unmerging_an_adapter_is_delivered_exactly():
    """W + D - W is not W; the change is against the last committed bits, not against what the trainer believes."""
    torch = pytest.importorskip("torch")
    from deltarefit.bits import storage_words

    weight = torch.randn(40, 40, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    adapter = torch.randn(40, 40, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16) * 0.3
    tensor, words = spec("w", (40, 40)), storage_words(weight)
    held = words.copy()
    owner = owner_of(tensor, words)
    for _ in range(3):
        weight += adapter
        weight -= adapter
        apply_buckets(owner.build(plan_for(tensor), MIXED), {"w": held})
        owner.commit()
        assert np.array_equal(held, words)


def test_empty_and_scalar_tensors_are_kept_and_cost_nothing():
    """Several empty tensors next to a normal one; no rate divides by zero."""
    tensors = [spec("a", (0, 64)), spec("b", (64, 0)), spec("c", ()), spec("d", (4,))]
    words = {tensor.name: random_words(tensor) for tensor in tensors}
    owner = Owner(OwnerId(0), [whole_task(tensor, words[tensor.name]) for tensor in tensors], ONE_THREAD)
    assert list(owner.build(plan_for(*tensors), MIXED)) == []
    assert owner.stats.num_owned == 5
    words["c"][0] ^= 1
    owner.forget_candidate()
    (bucket,) = owner.build(plan_for(*tensors), MIXED)
    assert plain([bucket])[0][1][0][2] == [0]
    assert set(owner.digests()) == {"a", "b", "c", "d"}
    assert owner.digests()["a"] == TensorDigest()


def test_a_transposed_source_is_read_in_logical_order():
    """The source is base.t() of shape [3, 4]; a change at logical (2, 1) is flat index 9."""
    tensor = spec("w", (3, 4))
    base = random_words(tensor)  # stored [4, 3]
    piece = Piece(StridedView(0, (3, 4), (4, 1)), StridedView(0, (3, 4), (1, 3)))
    owner = Owner(OwnerId(0), [ConversionTask("w", tensor, (piece,), lambda: base, (0,))], ONE_THREAD)
    base.reshape(4, 3)[1, 2] ^= 1
    assert emitted(owner, tensor) == [9]


def test_gate_and_up_of_stacked_experts_are_split_inside_each_expert():
    """[E=2, 2F=4, H=3]; a change in expert 1, up row 0 reaches experts.1.up row 0 only."""
    stacked = np.zeros(24, "<u2")
    gate, up = [spec(f"experts.1.{part}", (2, 3)) for part in ("gate", "up")]
    tasks = [
        ConversionTask(tensor.name, tensor, (box_piece(tensor, (0, 0), (2, 3), 12 + 6 * half),), lambda: stacked, (0,))
        for half, tensor in enumerate((gate, up))
    ]
    owner = Owner(OwnerId(0), tasks, ONE_THREAD)
    stacked.reshape(2, 4, 3)[1, 2, 1] = 7
    (bucket,) = owner.build(plan_for(gate, up), MIXED)
    assert [(item.spec.name, kernels.decode_positions(item).tolist()) for item in bucket.items] == [("experts.1.up", [1])]


def test_heads_of_a_fused_qkv_are_taken_per_group():
    """4 query heads, 2 groups, head size 2: rows [q0 q1 k0 v0 | q2 q3 k1 v1]; a change in k1 touches k rows 2, 3."""
    fused = np.zeros(16 * 3, "<u2")
    roles = {"q": (8, 0, 4), "k": (4, 4, 2), "v": (4, 6, 2)}  # rows, first row in the group, rows per group
    tasks = []
    for name, (rows, first, per_group) in roles.items():
        tensor = spec(name, (rows, 3))
        piece = Piece(
            StridedView(0, (2, per_group, 3), (per_group * 3, 3, 1)), StridedView(first * 3, (2, per_group, 3), (24, 3, 1))
        )
        tasks.append(ConversionTask(name, tensor, (piece,), lambda: fused, (0,)))
    owner = Owner(OwnerId(0), tasks, ONE_THREAD)
    fused.reshape(16, 3)[12, 2] = 1  # k1, first row
    (bucket,) = owner.build(plan_for(*(task.spec for task in tasks)), MIXED)
    assert [(item.spec.name, kernels.decode_positions(item).tolist()) for item in bucket.items] == [("k", [2 * 3 + 2])]


# --- attempts ---


def layered_owner(seed=0, **changes):
    tensors = [spec(f"layers.{n}", (8, 16)) for n in range(6)]
    words = {tensor.name: random_words(tensor, seed + n) for n, tensor in enumerate(tensors)}
    tasks = [whole_task(tensor, words[tensor.name]) for tensor in tensors]
    return tensors, words, Owner(OwnerId(0), tasks, SourceSettings(**changes))


def touch(words, seed=1):
    rng = np.random.default_rng(seed)
    for array in words.values():
        array[rng.random(array.size) < 0.1] ^= 3


def test_every_attempt_makes_the_same_buckets_whatever_the_threads():
    made = []
    for threads in (1, 3):
        tensors, words, owner = layered_owner(chunk_nbytes=300, bucket_nbytes=700, scan_threads=threads)
        touch(words)
        made += [plain(owner.build(plan_for(*tensors), MIXED)) for _ in range(2)]
    assert all(one == made[0] for one in made)
    assert len(made[0]) == 3


def test_a_retry_overwrites_the_same_elements_with_absolute_values():
    tensors, words, owner = layered_owner(scan_threads=1)
    held = {name: array.copy() for name, array in words.items()}
    touch(words)
    mixed, retry = list(owner.build(plan_for(*tensors), MIXED)), list(owner.build(plan_for(*tensors), OVERWRITE))
    assert [[item[2] for item in items] for _, items in plain(mixed)] == [
        [item[2] for item in items] for _, items in plain(retry)
    ]
    assert {item.encoding for bucket in retry for item in bucket.items} == {Encoding.OVERWRITE}
    apply_buckets(mixed, held)
    apply_buckets(retry, held)
    apply_buckets(retry, held)
    assert all(np.array_equal(held[name], words[name]) for name in words)


def test_a_candidate_that_moves_between_attempts_is_refused_with_the_tensor():
    tensors, words, owner = layered_owner(scan_threads=1)
    touch(words)
    list(owner.build(plan_for(*tensors), MIXED))
    words["layers.2"][5] ^= 1
    with pytest.raises(OperatorRequiredError, match=r"layers.2 .*changed after this transition first read it"):
        list(owner.build(plan_for(*tensors), OVERWRITE))
    words["layers.2"][5] ^= 1
    assert list(owner.build(plan_for(*tensors), OVERWRITE))


def test_an_attempt_that_broke_off_still_pins_what_it_read():
    tensors, words, owner = layered_owner(scan_threads=1, chunk_nbytes=256, bucket_nbytes=256)
    touch(words)
    build = owner.build(plan_for(*tensors), MIXED)
    next(build)
    build.close()
    words["layers.0"][5] ^= 1
    with pytest.raises(OperatorRequiredError, match=r"layers\.0"):
        list(owner.build(plan_for(*tensors), OVERWRITE))


def test_an_abandoned_transition_lets_the_next_one_see_another_candidate():
    tensors, words, owner = layered_owner(scan_threads=1)
    held = {name: array.copy() for name, array in words.items()}
    touch(words)
    list(owner.build(plan_for(*tensors), MIXED))
    owner.forget_candidate()
    touch(words, seed=2)
    apply_buckets(owner.build(plan_for(*tensors), MIXED), held)
    assert all(np.array_equal(held[name], words[name]) for name in words)


def test_dense_tensors_are_sent_whole_as_overwrites_and_counted_apart():
    tensors, words, owner = layered_owner(scan_threads=1)
    words["layers.1"][3] ^= 1
    words["layers.4"][0] ^= 1
    (bucket,) = owner.build(plan_for(*tensors, dense=["layers.1"]), MIXED)
    assert [(item.spec.name, item.encoding, item.count) for item in bucket.items] == [
        ("layers.1", Encoding.OVERWRITE, 128),
        ("layers.4", Encoding.DIFFERENCE, 1),
    ]
    assert (owner.stats.num_changed, owner.stats.num_emitted, owner.stats.num_owned) == (2, 129, 6 * 128)


def test_a_plan_of_another_model_is_refused_before_anything_is_scanned():
    owner = owner_of(spec("w", (4, 6)), np.zeros(24, "<u2"))
    with pytest.raises(RejectedError, match=r"the plan lists w BF16\[4, 8\], this owner holds w BF16\[4, 6\]"):
        next(owner.build(plan_for(spec("w", (4, 8))), MIXED))


# --- commit and digests ---


def test_digests_follow_commits_from_the_changes_alone():
    tensors, words, owner = layered_owner(scan_threads=2)
    for round_ in range(3):
        touch(words, seed=round_)
        list(owner.build(plan_for(*tensors), MIXED))
        candidate = owner.candidate_digests()
        assert candidate == {tensor.name: digest_of(tensor, words[tensor.name]) for tensor in tensors}
        assert candidate != owner.digests()
        owner.commit()
        assert owner.digests() == candidate == owner.candidate_digests()


def test_commit_is_repeatable_and_does_not_take_a_later_candidate():
    tensors, words, owner = layered_owner(scan_threads=1)
    touch(words)
    list(owner.build(plan_for(*tensors), MIXED))
    owner.commit()
    committed = owner.digests()
    touch(words, seed=5)
    owner.commit()
    assert owner.digests() == committed
    assert emitted_anything(owner, tensors)


def emitted_anything(owner, tensors):
    return any(True for _ in owner.build(plan_for(*tensors), MIXED))


def test_a_commit_that_was_interrupted_can_be_repeated(monkeypatch):
    tensors, words, owner = layered_owner(scan_threads=1)
    touch(words)
    list(owner.build(plan_for(*tensors), MIXED))
    real = kernels.commit_many

    def torn(work):
        monkeypatch.setattr(kernels, "commit_many", real)
        real(work[:3])
        committed, storage, *_ = work[3]
        committed[: committed.size // 2] = storage[: committed.size // 2]
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "commit_many", torn)
    with pytest.raises(KeyboardInterrupt):
        owner.commit()
    owner.commit()
    assert owner.digests() == {tensor.name: digest_of(tensor, words[tensor.name]) for tensor in tensors}
    assert all(np.array_equal(t.words[0], words[t.task.spec.name]) for t in owner.baseline.trackers)


def test_commit_refuses_bits_that_were_never_sent():
    tensors, words, owner = layered_owner(scan_threads=1)
    touch(words)
    list(owner.build(plan_for(*tensors), MIXED))
    before = [tracker.words[0].copy() for tracker in owner.baseline.trackers]
    words["layers.5"][0] ^= 1
    with pytest.raises(OperatorRequiredError, match=r"layers\.5"):
        owner.commit()
    assert all(np.array_equal(a, t.words[0]) for a, t in zip(before, owner.baseline.trackers, strict=True))


def test_commit_before_the_build_ended_is_refused():
    tensors, words, owner = layered_owner(scan_threads=1, chunk_nbytes=256, bucket_nbytes=256)
    touch(words)
    build = owner.build(plan_for(*tensors), MIXED)
    next(build)
    with pytest.raises(RejectedError, match="before the build ended"):
        owner.commit()
    with pytest.raises(RejectedError, match="before the build ended"):
        owner.candidate_digests()
    build.close()


@settings(max_examples=40)
@given(st.sampled_from(sorted(DTYPE_NBYTES)), st.sampled_from(list(Encoding)), st.integers(0, 2**32), st.floats(0, 1))
def test_what_is_sent_turns_the_committed_bits_into_the_candidate(dtype, encoding, seed, density):
    tensor = spec("w", (5, 7, 3), dtype)
    words = random_words(tensor, seed)
    owner, held = owner_of(tensor, words), words.copy()
    rng = np.random.default_rng(seed)
    words[:] = np.where(rng.random(words.size) < density, random_words(tensor, seed + 1), words)
    apply_buckets(owner.build(plan_for(tensor, encoding=encoding), MIXED), {"w": held})
    assert np.array_equal(held, words)
    owner.commit()
    assert np.array_equal(owner.baseline.trackers[0].words[0], words)


def test_chunks_are_scanned_at_the_same_time_on_all_threads():
    """Each shard's words are given only once as many threads as there should be are waiting for them."""
    together = threading.Barrier(3, timeout=30)
    is_building = threading.Event()
    threads = set()

    def words_of(array):
        def words():
            if is_building.is_set():
                threads.add(threading.get_ident())
                together.wait()
            return array

        return words

    tensors = [spec(f"layers.{n}", (8, 16)) for n in range(6)]
    tasks = [
        ConversionTask(t.name, t, (Piece(whole(t.shape), whole(t.shape)),), words_of(random_words(t)), (0,)) for t in tensors
    ]
    owner = Owner(OwnerId(0), tasks, SourceSettings(scan_threads=3, chunk_nbytes=1))
    is_building.set()
    assert list(owner.build(plan_for(*tensors), MIXED)) == []
    assert len(threads) == 3
    assert threading.get_ident() not in threads


def test_threads_are_one_per_core_that_the_process_may_use():
    assert SourceSettings().num_threads == min(16, len(os.sched_getaffinity(0)))
    assert SourceSettings(scan_threads=5).num_threads == 5


# --- baseline memory ---


def test_one_change_in_each_of_1152_tiny_tensors_is_one_bucket():
    """3 layers of what a mixture of 48 layers, 128 experts and 3 projections has; cost follows bytes, not names."""
    arena = np.zeros(1152 * 4, "<u2")
    tensors = [spec(f"layers.{n // 384}.experts.{n % 384 // 3}.{'gud'[n % 3]}", (2, 2)) for n in range(1152)]
    tasks = [whole_task(tensor, arena[4 * n : 4 * n + 4]) for n, tensor in enumerate(tensors)]
    owner = Owner(OwnerId(0), tasks, SourceSettings())
    arena[2::4] += 1
    (bucket,) = owner.build(plan_for(*tensors), MIXED)
    assert (len(bucket.items), owner.stats.num_changed, owner.stats.num_buckets) == (1152, 1152, 1)
    held = {tensor.name: np.zeros(4, "<u2") for tensor in tensors}
    apply_buckets([bucket], held)
    assert all(words.tolist() == [0, 0, 1, 0] for words in held.values())


def test_memory_does_not_grow_from_refit_to_refit():
    tensors, words, owner = layered_owner(scan_threads=1, chunk_nbytes=300, bucket_nbytes=700)
    plan = plan_for(*tensors)
    sizes = {}
    tracemalloc.start()
    try:
        for turn in range(54):
            touch(words, seed=turn)
            for _ in owner.build(plan, MIXED):
                pass
            owner.commit()
            if turn in (5, 29, 53):
                gc.collect()
                sizes[turn] = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # What other threads of this process keep shows in one stretch, a leak in both.
    assert min(sizes[29] - sizes[5], sizes[53] - sizes[29]) < 8192, sizes


def test_building_and_committing_add_buffers_of_chunks_and_no_second_copy():
    """The candidate is what the parameters hold; beside the baseline there are the chunks under way."""
    tensors = [spec(f"layers.{n}", (256, 1024)) for n in range(64)]
    words = {tensor.name: random_words(tensor, n) for n, tensor in enumerate(tensors)}
    tasks = [whole_task(tensor, words[tensor.name]) for tensor in tensors]
    chunk_nbytes = 2 * tensors[0].nbytes
    owner = Owner(OwnerId(0), tasks, SourceSettings(scan_threads=2, chunk_nbytes=chunk_nbytes, bucket_nbytes=chunk_nbytes))
    owned = sum(tensor.nbytes for tensor in tensors)
    assert owner.owned_nbytes == owner.baseline.nbytes == owned
    for array in words.values():
        array[::40] ^= 3
    tracemalloc.start()
    try:
        for _ in owner.build(plan_for(*tensors), MIXED):
            pass
        owner.commit()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * chunk_nbytes <= owned / 8


def test_baseline_in_a_mapped_file_behaves_as_in_memory_and_leaves_nothing(tmp_path):
    tensors, words, owner = layered_owner(scan_threads=1, baseline_directory=tmp_path)
    touch(words)
    changed = plain(owner.build(plan_for(*tensors), MIXED))
    owner.commit()
    assert isinstance(owner.baseline.trackers[0].words[0], np.memmap)
    assert list(tmp_path.iterdir()) == []
    same, other, plain_owner = layered_owner(scan_threads=1)
    touch(other)
    assert plain(plain_owner.build(plan_for(*same), MIXED)) == changed


def test_a_baseline_directory_that_is_missing_is_refused_with_the_size(tmp_path):
    with pytest.raises(RejectedError, match=r"baseline of 768 bytes in .*nowhere"):
        SourceBaseline([whole_task(spec("w", (384,)), np.zeros(384, "<u2"))], tmp_path / "nowhere")


def test_baseline_holds_one_copy_of_what_is_owned():
    tensors, _, owner = layered_owner(scan_threads=1)
    assert owner.baseline.nbytes == sum(tensor.nbytes for tensor in tensors)


def test_padding_without_a_piece_is_neither_compared_nor_counted():
    """A vocabulary of 5 padded to 8 rows."""
    tensor = spec("embed", (5, 4))
    padded = np.zeros(32, "<u2")
    task = ConversionTask("embed", tensor, (box_piece(tensor, (0, 0), (5, 4)),), lambda: padded, (0,))
    owner = Owner(OwnerId(0), [task], ONE_THREAD)
    padded[20:] = 9
    assert emitted(owner, tensor) == []
    assert owner.stats.num_owned == 20


def test_changes_are_counted_although_most_of_the_tensor_is_sent_whole():
    tensor = spec("w", (400,))
    words = random_words(tensor)
    owner = owner_of(tensor, words)
    words[:390] ^= 0x0101
    (bucket,) = owner.build(plan_for(tensor), MIXED)
    assert bucket.items[0].count == owner.stats.num_emitted
    assert owner.stats.num_changed == 390
    owner.commit()
    words[17] ^= 1
    assert emitted(owner, tensor) == [17]
    assert owner.stats.num_changed == 1


def test_a_committed_word_that_flipped_is_found_before_what_was_built_from_it_is_committed():
    """The change was counted from the flipped word: receivers, which hold the right one, would end elsewhere."""
    tensors, words, owner = layered_owner(scan_threads=1)
    owner.baseline.trackers[2].words[0][5] ^= 4
    touch(words)
    list(owner.build(plan_for(*tensors), MIXED))
    with pytest.raises(OperatorRequiredError, match=r"layers\.2 .*committed words in this trainer's memory lost the digest"):
        owner.prove()


def test_a_proof_reads_the_candidate_only(monkeypatch):
    tensors, words, owner = layered_owner(scan_threads=1)
    touch(words)
    list(owner.build(plan_for(*tensors), MIXED))
    monkeypatch.setattr(kernels, "scan", None)
    owner.prove()
    owner.commit()
    assert owner.digests() == {tensor.name: digest_of(tensor, words[tensor.name]) for tensor in tensors}


def test_a_baseline_is_filled_by_one_read_and_its_digest_is_of_what_was_copied():
    """A write to the parameter while the baseline is made shows as a change afterwards, not as damage to the baseline."""
    tensor = spec("w")
    first, written = random_words(tensor, 1), random_words(tensor, 2)
    task = whole_task(tensor, written)
    reads = iter([first])
    object.__setattr__(task, "words", lambda: next(reads, written))
    owner = Owner(OwnerId(0), [task], ONE_THREAD)
    assert owner.digests() == owner.recount() == {"w": digest_of(tensor, first)}
    assert emitted(owner, tensor) == np.flatnonzero(first != written).tolist()
    owner.commit()
    assert owner.digests() == owner.recount() == {"w": digest_of(tensor, written)}
