"""Intervals of placements against torch's own splitting of index tensors."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltarefit.errors import RejectedError
from deltarefit.integrations.fsdp import MeshSplit, held_intervals

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def rows(intervals):
    return [row for start, stop in intervals for row in range(start, stop)]


def by_torch(length, splits):
    """What ``torch.chunk`` and DTensor's own strided splitting leave of a dimension."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    index = torch.arange(length)
    for split in splits:
        placement = Shard(0) if split.split_factor == 1 else _StridedShard(0, split_factor=split.split_factor)
        parts, _ = placement._split_tensor(index, split.num_ranks, with_padding=False)
        index = parts[split.coordinate]
    return index.tolist()


@pytest.mark.parametrize("split_factor", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_one_split_is_the_one_torch_makes(num_ranks, split_factor):
    for length, coordinate in itertools.product(range(1, 15), range(num_ranks)):
        split = MeshSplit(num_ranks, coordinate, 0, split_factor)
        assert rows(held_intervals("w", (length,), [split])[0]) == by_torch(length, [split]), (length, coordinate)


@given(st.integers(1, 24), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.data())
def test_two_splits_of_one_dimension_apply_from_left_to_right(length, outer, inner, is_strided, data):
    splits = [
        MeshSplit(outer, data.draw(st.integers(0, outer - 1)), 0, inner if is_strided else 1),
        MeshSplit(inner, data.draw(st.integers(0, inner - 1)), 0),
    ]
    assert rows(held_intervals("w", (length,), splits)[0]) == by_torch(length, splits)


def test_a_dimension_that_does_not_divide_leaves_the_last_rank_short():
    """10 rows over 4 ranks are 3, 3, 3, 1."""
    held = [held_intervals("w", (10, 2), [MeshSplit(4, rank, 0)]) for rank in range(4)]
    assert held == [(((0, 3),), ((0, 2),)), (((3, 6),), ((0, 2),)), (((6, 9),), ((0, 2),)), (((9, 10),), ((0, 2),))]


def test_six_experts_over_four_ranks_leave_the_last_rank_empty():
    assert held_intervals("experts", (6, 2), [MeshSplit(4, 3, 0)]) == ((), ((0, 2),))


def test_a_strided_shard_alone_is_gate_rows_and_up_rows():
    """Torch's offset helpers report one block of 4 rows for this one."""
    split = MeshSplit(2, 1, 1, split_factor=2)
    assert held_intervals("gate_up_proj", (2, 8, 4), [split])[1] == ((2, 4), (6, 8))


def test_a_split_of_a_dimension_that_is_not_there_is_refused():
    with pytest.raises(RejectedError, match="w: is sharded along dimension 2"):
        held_intervals("w", (4, 4), [MeshSplit(2, 0, 2)])
