"""Sharded transformers models: all layouts on all ranks of a job, in one process."""

import functools
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fsdp_layouts import ARCHITECTURE, make, rank_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Partial, Replicate, distribute_tensor  # noqa: E402

from deltarefit.bits import logical_words, storage_words  # noqa: E402
from deltarefit.errors import RejectedError  # noqa: E402
from deltarefit.integrations.fsdp import fsdp_adapter, shard_of, write_guard  # noqa: E402
from deltarefit.integrations.torch import tasks, torch_adapter  # noqa: E402
from deltarefit.integrations.torch.local import local_part  # noqa: E402
from deltarefit.source import LocalCollective, SourceSettings, open_source  # noqa: E402
from deltarefit.testing.checkpoints import load_tensors, tiny_model  # noqa: E402
from deltarefit.testing.collective import ThreadCollective, run_ranks  # noqa: E402

pytestmark = pytest.mark.torch
ONE_THREAD = SourceSettings(scan_threads=1)


def sources_of(layout, world_size, spoil=lambda rank, model: None):
    adapters = []
    for rank in range(world_size):
        with rank_of(world_size, rank):
            collective = ThreadCollective.world(world_size)[rank]
            model = make(layout, world_size)
            spoil(rank, model)
            adapter = fsdp_adapter(model, collective=collective)
            adapter.catalog()
            adapters.append(adapter)

    def work(collective):
        adapters[collective.rank]._collective = collective
        return open_source(adapters[collective.rank], collective, ONE_THREAD)

    return run_ranks(world_size, work)


def rebuild(sources):
    words, counts = {}, {}
    for source in sources:
        for tracker in source.owner.baseline.trackers:
            spec = tracker.task.spec
            held = words.setdefault(spec.name, np.zeros(spec.num_elements, spec.word_dtype))
            count = counts.setdefault(spec.name, np.zeros(spec.num_elements, np.uint8))
            for pieces, committed in zip(tracker.groups, tracker.words, strict=True):
                positions = np.concatenate([index_of(piece.canonical) for piece in pieces])
                held[positions] = committed
                count[positions] += 1
    return words, counts


def index_of(view):
    index = np.full((), view.offset)
    for length, stride in zip(view.shape, view.stride, strict=True):
        index = np.add.outer(index, np.arange(length) * stride)
    return index.reshape(-1)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("fsdp", 3), ("fsdp_wrapped", 2), ("hsdp", 4), ("fsdp_columns", 2), ("tp", 2), ("tp_fsdp", 4), ("ep", 3),
        ("ep", 5), ("ep_fsdp", 4), ("fused_tp", 2), ("tied_fsdp", 4),
    ],
)  # fmt: skip
def test_owners_together_hold_the_checkpoint_exactly_once(layout, world_size, tmp_path):
    model = tiny_model(ARCHITECTURE.get(layout, "qwen3_moe"))
    model.save_pretrained(tmp_path)
    expected = {name: logical_words(tensor) for name, tensor in load_tensors(tmp_path).items()}
    sources = sources_of(layout, world_size)
    for source in sources:
        if isinstance(source, Exception):
            raise source
    assert sources[0].catalog == torch_adapter(model).catalog()
    words, counts = rebuild(sources)
    assert sorted(words) == sorted(expected)
    assert all((count == 1).all() for count in counts.values())
    assert all(np.array_equal(words[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("layout", "world_size"), [("fsdp", 3), ("tp_fsdp", 4), ("fused_tp", 2)])
def test_large_shards_are_owned_and_read_in_parts(monkeypatch, layout, world_size, tmp_path):
    """With parts of 512 bytes, which takes tiny models for large ones: the same elements, and no more is read at a time."""
    monkeypatch.setattr(tasks, "cut_into_parts", functools.partial(tasks.cut_into_parts, target_nbytes=512))
    model = tiny_model(ARCHITECTURE.get(layout, "qwen3_moe"))
    model.save_pretrained(tmp_path)
    expected = {name: logical_words(tensor) for name, tensor in load_tensors(tmp_path).items()}
    sources = sources_of(layout, world_size)
    assert not [source for source in sources if isinstance(source, Exception)], sources
    words, counts = rebuild(sources)
    assert all((count == 1).all() for count in counts.values())
    assert all(np.array_equal(words[name], expected[name]) for name in expected)
    owned = [tracker.task for source in sources for tracker in source.owner.baseline.trackers]
    assert max(task.nbytes for task in owned) <= 512
    assert len(owned) > 3 * len(expected)
    held = [source.owner.owned_nbytes for source in sources]
    assert max(held) <= 1.1 * sum(held) / world_size


def test_what_is_not_sharded_is_owned_once_among_all_ranks():
    """Mixed DTensor and plain state."""
    sources = sources_of("ep", 2)
    owned = [tracker.task.spec.name for source in sources for tracker in source.owner.baseline.trackers]
    assert owned.count("model.norm.weight") == 1
    assert all(task.replicas == (0, 1) for task in sources[0].tasks if task.spec.name == "model.norm.weight")


def test_eight_experts_over_five_ranks_leave_the_last_one_without_any():
    sources = sources_of("ep", 5)
    held = [sum(".experts." in task.spec.name for task in source.tasks) for source in sources]
    assert held[4] == 0
    assert held[0] == held[3] > 0


@pytest.mark.parametrize(
    ("layout", "name", "ranks", "others"),
    [
        ("hsdp", "model.layers.1.self_attn.q_proj.weight", [1], [3]),  # copies along a dimension that the shard does not know
        ("ep_fsdp", "model.norm.weight", [1], [3]),
        ("ep", "model.norm.weight", [0, 1, 2], [3]),  # a plain tensor beside DTensors
    ],
)
def test_copies_that_differ_in_a_bit_are_refused_naming_tensor_and_ranks(layout, name, ranks, others):
    def spoil(rank, model):
        if rank == others[0]:
            storage_words(local_part(dict(model.named_parameters())[name].detach()))[0] ^= 1

    for result in sources_of(layout, 4, spoil):
        assert isinstance(result, RejectedError), result
        assert re.search(
            rf"1 place: {re.escape(name)}\S*: ranks {re.escape(str(ranks))} hold \w+, ranks {re.escape(str(others))} hold",
            str(result),
        ), result


def test_a_partial_sum_is_refused():
    with rank_of(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        made = distribute_tensor(torch.zeros(4), mesh, [Replicate()], src_data_rank=None)
        assert shard_of("w", made).held == (((0, 4),),)
        made = type(made).from_local(torch.zeros(4), mesh, [Partial()], run_check=False)
        with pytest.raises(RejectedError, match="w: is a partial sum over 2 ranks"):
            shard_of("w", made)


def test_a_parameter_that_is_gathered_at_refit_time_is_refused_with_what_to_do():
    with rank_of(2, 0):
        model = nn.Linear(4, 4, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        adapter = fsdp_adapter(model, collective=ThreadCollective.world(2)[0])
        (task,) = adapter.tasks()
        task.words()
        model.weight = nn.Parameter(torch.zeros(4, 4))
        adapter._collective = LocalCollective()
        with pytest.raises(RejectedError, match=r"weight: is gathered now .* Reshard the module before the refit"):
            adapter.barrier()


def test_an_optimizer_is_held_up_also_while_its_parameters_are_gathered():
    with rank_of(2, 0):
        model = nn.Linear(4, 4, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        guard = write_guard(model)
        guard.refuse("being published")
        try:
            before = guard.count_writes()
            model.weight = nn.Parameter(torch.zeros(4, 4))  # as a forward pass leaves the outermost ones
            with pytest.raises(RejectedError, match="optimizer step refused: being published"):
                optimizer.step()
            assert guard.count_writes() == before, "a gathered copy is no write"
        finally:
            guard.allow()
