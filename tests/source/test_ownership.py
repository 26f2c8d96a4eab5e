"""Who owns which shard: the same answer everywhere, once each, balanced by bytes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_catalogs import qwen3_30b_a3b
from source_cases import row_shards, spec, whole_task

from deltarefit.errors import RejectedError
from deltarefit.pieces import Piece, whole
from deltarefit.source import ConversionTask, cut_into_parts, elect_owners, owned_tasks, stable_hash

GOLDEN_SHAPES = {
    "embed": (300, 8),
    "head": (300, 8),
    "layers.0.q": (16, 8),
    "layers.0.k": (4, 8),
    "layers.1.q": (16, 8),
    "norm": (8,),
}
GOLDEN_OWNERS = {"embed": 2, "head": 0, "layers.0.k": 3, "layers.0.q": 1, "layers.1.q": 3, "norm": 1}


def tasks_of(shapes, replicas):
    return [whole_task(spec(name, shape), np.zeros(1, "<u2"), replicas) for name, shape in shapes.items()]


def qwen3_30b_tasks(replicas):
    """The tensors of Qwen3-30B-A3B, 18,867 of them."""
    return tasks_of({tensor.name: tensor.shape for tensor in qwen3_30b_a3b().values()}, replicas)


def loads(tasks, world_size):
    owners = elect_owners(tasks)
    held = [0] * world_size
    for task in tasks:
        held[owners[task.key]] += task.nbytes
    return held


def test_known_names_have_known_owners():
    assert elect_owners(tasks_of(GOLDEN_SHAPES, (0, 1, 2, 3))) == GOLDEN_OWNERS
    assert stable_hash("model.embed_tokens.weight") == 17744852841324204394


def test_election_does_not_depend_on_the_process_or_the_order_of_tasks():
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_ownership import *\n"
        "shapes = dict(reversed(GOLDEN_SHAPES.items()))\n"
        "assert elect_owners(tasks_of(shapes, (0, 1, 2, 3))) == GOLDEN_OWNERS\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    subprocess.run([sys.executable, "-c", script, Path(__file__).parent], check=True, env=environment, timeout=120)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_shard_has_exactly_one_owner(world_size):
    tasks = tasks_of(GOLDEN_SHAPES, range(world_size))
    owned = [task.key for rank in range(world_size) for task in owned_tasks(tasks, rank)]
    assert sorted(owned) == sorted(GOLDEN_SHAPES)


def test_owners_of_a_30b_model_are_balanced_over_32_ranks():
    tasks = qwen3_30b_tasks(tuple(range(32)))
    assert len(tasks) == 18867
    held = loads(tasks, 32)
    assert max(held) <= 1.1 * sum(held) / 32, f"largest owner holds {max(held) / (sum(held) / 32):.3f} of the mean"


def megatron_tasks(*, tp, pp, ep, etp, world_size=32):
    """Every shard of Qwen3-30B-A3B in Megatron's order of ranks: tensor parallel innermost, pipeline outermost."""
    in_stage = world_size // pp
    for tensor in qwen3_30b_a3b().values():
        layer = re.search(r"layers\.(\d+)\.", tensor.name)
        stage = int(layer[1]) * pp // 48 if layer else 0 if "embed" in tensor.name else pp - 1
        ranks = range(stage * in_stage, (stage + 1) * in_stage)
        expert = re.search(r"experts\.(\d+)\.", tensor.name)
        if expert:
            group = int(expert[1]) * ep // 128
            shards = [[rank for rank in ranks if rank // etp % ep == group and rank % etp == part] for part in range(etp)]
        elif "norm" in tensor.name or "mlp.gate." in tensor.name:
            shards = [list(ranks)]
        else:
            shards = [[rank for rank in ranks if rank % tp == part] for part in range(tp)]
        for part, replicas in enumerate(shards):
            view = whole((tensor.num_elements // len(shards),))
            for number, pieces in enumerate(cut_into_parts([Piece(view, view)], 2)):
                yield ConversionTask(f"{tensor.name}@{part}#{number}", tensor, pieces, lambda: None, tuple(replicas))


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 4, "pp": 1, "ep": 8, "etp": 1}, {"tp": 2, "pp": 4, "ep": 4, "etp": 1}, {"tp": 4, "pp": 2, "ep": 4, "etp": 2},
        {"tp": 1, "pp": 1, "ep": 32, "etp": 1},
    ],
)  # fmt: skip
def test_owners_of_a_30b_model_are_balanced_in_megatrons_layouts_too(layout):
    """Replica sets differ between experts, sharded and copied parameters; each is dealt out by itself.

    Owned whole, one embedding would give its owner 1.28 times the mean where experts are spread over all ranks.
    """
    tasks = list(megatron_tasks(**layout))
    held = loads(tasks, 32)
    assert sum(held) == 61_064_245_248
    assert max(held) <= 1.1 * sum(held) / 32, f"largest owner holds {max(held) / (sum(held) / 32):.3f} of the mean"


def test_a_copied_norm_has_one_owner_of_all_its_copies_and_an_expert_one_of_its_own():
    """Tensor parallel 2, context parallel 2, data parallel 2; experts over 4 ranks, copied twice."""
    norm = whole_task(spec("norm", (8,)), np.zeros(8, "<u2"), range(8))
    experts = [whole_task(spec(f"experts.{n}"), np.zeros(24, "<u2"), (n, n + 4)) for n in range(4)]
    attention = [whole_task(spec(f"q@{part}"), np.zeros(24, "<u2"), range(part, 8, 2)) for part in range(2)]
    tasks = [norm, *experts, *attention]
    owned = {task.key: [rank for rank in range(8) if task in owned_tasks(tasks, rank)] for task in tasks}
    assert all(len(ranks) == 1 and ranks[0] in task.replicas for task, ranks in zip(tasks, owned.values(), strict=True))


def test_replicas_of_shards_share_the_work_within_their_own_set():
    """HSDP: two shards of each tensor, each on two ranks."""
    tensors = [spec(f"t{n}", (8, 4)) for n in range(16)]
    tasks = [task for tensor in tensors for task in row_shards(tensor, 2, lambda shard: (shard, shard + 2))]
    owners = elect_owners(tasks)
    assert all(owners[task.key] in task.replicas for task in tasks)
    assert loads(tasks, 4) == [16 * 64 // 4] * 4


def test_a_norm_held_by_all_and_an_expert_held_by_two_are_elected_among_their_own_holders():
    norm = whole_task(spec("norm", (8,)), np.zeros(8, "<u2"), tuple(range(8)))
    expert = whole_task(spec("experts.0", (8, 8)), np.zeros(64, "<u2"), (3, 7))
    owners = elect_owners([norm, expert])
    assert owners["experts.0"] in (3, 7)
    assert owners["norm"] in range(8)


def test_one_shard_listed_twice_is_refused():
    task = whole_task(spec(), np.zeros(24, "<u2"))
    with pytest.raises(RejectedError, match="w is listed twice"):
        elect_owners([task, task])


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 9))
def test_no_owner_exceeds_the_lightest_by_more_than_the_largest_shard(sizes, world_size):
    tasks = tasks_of({f"t{n}": (size,) for n, size in enumerate(sizes)}, range(world_size))
    held = loads(tasks, world_size)
    assert max(held) - min(held) <= 2 * max(sizes, default=0)
