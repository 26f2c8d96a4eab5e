"""Each refusal of the audits at start, and what they let pass."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from source_cases import box_piece, random_words, row_shards, spec, whole_task

from deltarefit.canonical import Catalog
from deltarefit.errors import RejectedError
from deltarefit.pieces import Piece, StridedView
from deltarefit.source import (
    ConversionTask,
    LocalCollective,
    agree_on_catalog,
    audit_coverage,
    audit_replicas,
    check_manifest,
    find_replicas,
    together,
)
from deltarefit.source.audit import _check_cover, _view
from deltarefit.testing.collective import run_ranks


def covering(tensor, views):
    """A task of a tensor with these boxes, (starts, lengths) each."""
    pieces = tuple(box_piece(tensor, starts, lengths) for starts, lengths in views)
    return ConversionTask(tensor.name, tensor, pieces, lambda: np.zeros(64, tensor.word_dtype), (0,))


def refusals(results):
    assert all(isinstance(result, RejectedError) for result in results), results
    return [str(result) for result in results]


def test_shards_of_every_layout_cover_exactly_once():
    tensors = [spec("even", (8, 4)), spec("uneven", (10, 3)), spec("short", (2, 5)), spec("scalar", ()), spec("empty", (0, 7))]

    def work(collective):
        shards = [row_shards(tensor, 4)[collective.rank] for tensor in tensors[:3]]
        if collective.rank == 2:
            shards += [whole_task(tensors[3], np.zeros(1, "<u2")), whole_task(tensors[4], np.zeros(0, "<u2"))]
        audit_coverage(Catalog(tensors), shards, collective)

    assert run_ranks(4, work) == [None] * 4


def test_expert_shards_sent_as_if_they_were_the_full_tensor_are_refused():
    """One rank exports its [4, 4] half of [8, 4] with no shard metadata."""
    tensor = spec("experts.w1", (8, 4))

    def work(collective):
        owned = [covering(tensor, [((0, 0), (4, 4))])] if collective.rank == 0 else []
        audit_coverage(Catalog([tensor]), owned, collective)

    for text in refusals(run_ranks(2, work)):
        assert "experts.w1 BF16[8, 4]: flat index 16 is owned by no rank (ranks [0] own other parts)" in text


def test_a_shared_embedding_exported_by_two_stages_is_refused_with_both_ranks():
    """A tied embedding on the first and last pipeline stage."""
    tensor = spec("embed", (4, 4))
    results = run_ranks(
        3, lambda c: audit_coverage(Catalog([tensor]), [covering(tensor, [((0, 0), (4, 4))])][: c.rank != 1], c)
    )
    for text in refusals(results):
        assert "embed BF16[4, 4]: flat index 0 is owned more than once, by ranks [0, 2]" in text


def test_an_element_missing_in_the_middle_is_named():
    tensor = spec("w", (3, 4))
    task = covering(tensor, [((0, 0), (1, 4)), ((1, 0), (1, 2)), ((1, 3), (1, 1)), ((2, 0), (1, 4))])
    with pytest.raises(RejectedError, match="flat index 6 is owned by no rank"):
        audit_coverage(Catalog([tensor]), [task], LocalCollective())


def test_a_tensor_nobody_owns_is_refused():
    """A converter that silently skips a tensor."""
    with pytest.raises(RejectedError, match=r"embeddings.weight BF16\[4, 6\]: no rank has any part of it"):
        audit_coverage(Catalog([spec("embeddings.weight")]), [], LocalCollective())


def test_a_task_outside_the_catalog_is_refused_on_every_rank():
    def work(collective):
        owned = [whole_task(spec("new"), np.zeros(24, "<u2"))] if collective.rank == 1 else []
        audit_coverage(Catalog([spec()]), owned, collective)

    first, second = refusals(run_ranks(2, work))
    assert "rank 1: RejectedError: task new" in first
    assert "task new: new BF16[4, 6] is not in the catalog" in second


@given(st.data())
def test_cover_check_agrees_with_counting_elements(data):
    tensor = spec("w", (3, 4, 5))
    views = []
    for _ in range(data.draw(st.integers(1, 6))):
        starts, lengths = [], []
        for dim in tensor.shape:
            start = data.draw(st.integers(0, dim - 1))
            starts.append(start)
            lengths.append(data.draw(st.integers(1, dim - start)))
        views.append(box_piece(tensor, starts, lengths))
    counts = np.zeros(60, int)
    for piece in views:
        view = piece.canonical
        for place in np.ndindex(view.shape):
            counts[view.offset + sum(p * s for p, s in zip(place, view.stride, strict=True))] += 1
    found = _check_cover(60, [_view(piece) for piece in views])
    if (counts == 1).all():
        assert found is None
    else:
        kind, flat_index = found
        assert counts[flat_index] == 0 if kind == "none" else counts[flat_index] > 1
        assert (counts[:flat_index] == 1).all()


def test_an_element_claimed_past_the_end_is_refused_when_the_task_is_made():
    piece = Piece(StridedView(20, (5,), (1,)), StridedView(0, (5,), (1,)))
    with pytest.raises(RejectedError, match="reaches flat index 24"):
        ConversionTask("w", spec(), (piece,), lambda: np.zeros(5, "<u2"), (0,))


def replicated(collective, words):
    return [
        whole_task(spec("a"), random_words(spec("a")), (0, 1, 2, 3)),
        whole_task(spec("b"), words, (collective.rank % 2, collective.rank % 2 + 2), key=f"b@{collective.rank % 2}"),
    ]


def test_equal_replicas_pass_with_one_exchange_of_digests():
    def work(collective):
        audit_replicas(replicated(collective, random_words(spec("b"), collective.rank % 2)), collective)
        return collective.num_calls

    assert run_ranks(4, work) == [2] * 4  # whether reading succeeded, and one digest per replica set


def test_one_flipped_bit_in_a_copy_is_refused_naming_tensor_and_ranks():
    def work(collective):
        words = random_words(spec("b"), collective.rank % 2)
        words[7] ^= collective.rank == 3
        audit_replicas(replicated(collective, words), collective)

    for text in refusals(run_ranks(4, work)):
        assert "1 place: b@1: ranks [1] hold" in text
        assert "ranks [3] hold" in text


def test_ranks_that_disagree_on_who_holds_copies_are_refused():
    def work(collective):
        ranks = (0, 1) if collective.rank == 0 else (1,)
        audit_replicas([whole_task(spec(), np.zeros(24, "<u2"), ranks)], collective)

    for text in refusals(run_ranks(2, work)):
        assert "w: ranks [0] list copies on ranks [0, 1], ranks [1] do not" in text


def test_ranks_with_different_models_are_refused_with_first_names():
    def work(collective):
        shape = (4, 6) if collective.rank < 2 else (4, 8)
        agree_on_catalog(Catalog([spec("a"), spec("b", shape)]), collective)

    for text in refusals(run_ranks(3, work)):
        assert "rank 2: b" in text


def test_checkpoint_and_model_are_compared_in_both_directions():
    """A padded vocabulary, a renamed embedding."""
    model = Catalog([spec("embed", (192, 4)), spec("backbone.embedding"), spec("norm", (4,))])
    checkpoint = Catalog([spec("embed", (150, 4)), spec("backbone.embeddings"), spec("norm", (4,))])
    check_manifest(checkpoint, checkpoint)
    with pytest.raises(RejectedError) as refused:
        check_manifest(model, checkpoint)
    text = str(refused.value)
    assert "differ in 3 places" in text
    assert "backbone.embeddings: the checkpoint has it" in text
    assert "backbone.embedding: the model gives it" in text
    assert "embed: the checkpoint has embed BF16[150, 4], the model gives embed BF16[192, 4]" in text


def test_a_failure_on_one_rank_reaches_all_of_them():
    def work(collective):
        def action():
            if collective.rank == 1:
                raise ValueError("no room")
            return collective.rank

        return together(collective, "allocating", action)

    first, second, third = run_ranks(3, work)
    assert isinstance(second, ValueError)
    for other in (first, third):
        assert isinstance(other, RejectedError)
        assert "allocating failed on 1 of 3 training ranks: rank 1: ValueError: no room" in str(other)
    assert run_ranks(2, lambda c: together(c, "counting", lambda: c.rank)) == [0, 1]


def test_ranks_that_list_the_same_shard_are_its_replicas():
    def work(collective):
        tensor = spec()
        part = collective.rank % 2
        tasks = [whole_task(tensor, np.zeros(24, "<u2"), (), key=f"w@{part}"), whole_task(spec("b"), np.zeros(24, "<u2"), (0,))]
        return [task.replicas for task in find_replicas(tasks, collective)]

    assert run_ranks(4, work) == [[(0, 2), (0,)], [(1, 3), (0,)]] * 2
