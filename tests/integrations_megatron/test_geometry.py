"""Every class of mapping against what Bridge does to whole tensors, written once more with reshapes."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.errors import RejectedError
from deltarefit.integrations.megatron import TaskFacts, geometry_of
from deltarefit.pieces import whole
from deltarefit.source import onto_shard

pytestmark = pytest.mark.torch


def numbers(*shapes, names="abcd"):
    """Tensors in which every element of every tensor has a number of its own."""
    tensors, start = {}, 0
    for name, shape in zip(names, shapes, strict=False):
        count = math.prod(shape)
        tensors[name] = np.arange(start, start + count).reshape(shape)
        start += count
    return tensors


def catalog_of(tensors):
    return Catalog(TensorSpec(name, "BF16", tensor.shape) for name, tensor in tensors.items())


def local_of(facts, tensors):
    """The rank's part, built from pieces alone; -1 where nothing lies."""
    geometry = geometry_of(facts, catalog_of(tensors))
    local = np.full(math.prod(facts.shape), -1)
    for name, pieces in geometry.pieces.items():
        flat = tensors[name].reshape(-1)
        for piece in onto_shard(pieces, geometry.shape, geometry.held, whole(facts.shape)):
            for index in np.ndindex(piece.canonical.shape):
                here = piece.storage.offset + sum(i * s for i, s in zip(index, piece.storage.stride, strict=True))
                there = piece.canonical.offset + sum(i * s for i, s in zip(index, piece.canonical.stride, strict=True))
                assert local[here] == -1
                local[here] = flat[there]
    return local.reshape(facts.shape)


def facts(kind, shape, targets, rank=0, size=1, **more):
    name = more.pop("name", "layers.0.weight")
    return TaskFacts(
        name=name, local_name=name, chunk=0, kind=kind, targets=targets, shape=tuple(shape), dtype="BF16", tp_rank=rank,
        tp_size=size, **more,
    )  # fmt: skip


def check(kind, gathered, tensors, targets, size, axis=0, **more):
    """The gathered parameter in shards along an axis, each compared with what pieces make of it."""
    for rank, shard in enumerate(np.split(gathered, size, axis)):
        assert np.array_equal(local_of(facts(kind, shard.shape, targets, rank, size, **more), tensors), shard)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shape", [(8, 3), (8,), (8, 1, 4)])
def test_columns_rows_and_copies(size, shape):
    tensors = numbers(shape)
    check("ColumnParallelMapping", tensors["a"], tensors, {"": "a"}, size)
    for kind in ("DirectMapping", "ReplicatedMapping"):
        one = facts(kind, shape, {"": "a"}, size - 1, size)
        assert np.array_equal(local_of(one, tensors), tensors["a"])
    wide = numbers((3, 8))
    check("RowParallelMapping", wide["a"], wide, {"": "a"}, size, axis=1)
    bias = numbers((8,))
    assert np.array_equal(local_of(facts("RowParallelMapping", (8,), {"": "a"}, size - 1, size), bias), bias["a"])


@pytest.mark.parametrize("size", [1, 2])
def test_an_auto_mapping_that_exchanges_dimensions(size):
    tensors = numbers((3, 8))
    check("ColumnParallelMapping", tensors["a"].T, tensors, {"": "a"}, size, permutation=(1, 0))
    check("RowParallelMapping", tensors["a"].T, tensors, {"": "a"}, 1, axis=1, permutation=(1, 0))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_vocabulary_padding_is_in_no_piece(size):
    tensors = numbers((10, 3))
    padded = np.concatenate([tensors["a"], np.full((6, 3), -1)])
    check("ColumnParallelMapping", padded, tensors, {"": "a"}, size, name="embedding.word_embeddings.weight")
    with pytest.raises(RejectedError, match=r"the checkpoint has a BF16\[10, 3\]; .* makes \[16, 3\]"):
        check("ColumnParallelMapping", padded, tensors, {"": "a"}, size, name="decoder.layers.0.linear.weight")


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tail", [(3,), ()])
def test_gate_and_up_are_halves_of_each_rank(size, tail):
    tensors = numbers((8, *tail), (8, *tail))
    for rank in range(size):
        local = np.concatenate([np.split(tensors[name], size)[rank] for name in "ab"])
        one = facts("GatedMLPMapping", local.shape, {"gate": "a", "up": "b"}, rank, size)
        assert np.array_equal(local_of(one, tensors), local)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.sampled_from([(), (1,), (3,)]), st.booleans(), st.data())
def test_attention_heads_lie_group_by_group(groups, per_group, head, tail, gated, data):
    """Q heads of a group (then their gates), its key, its value; shards of rows, wherever they cut."""
    heads = groups * per_group
    width = 2 if gated else 1
    tensors = numbers((heads * width * head, *tail), (groups * head, *tail), (groups * head, *tail))
    queries = tensors["a"].reshape(groups, per_group, width, head, *tail)
    parts = [queries[:, :, block].reshape(groups, per_group * head, *tail) for block in range(width)]
    parts += [tensors[name].reshape(groups, head, *tail) for name in "bc"]
    fused = np.concatenate(parts, axis=1).reshape(-1, *tail)
    size = data.draw(st.sampled_from([n for n in range(1, 9) if fused.shape[0] % n == 0]))
    layout = {"heads": heads, "groups": groups, "head_size": head, "has_output_gate": gated}
    check("QKVMapping", fused, tensors, {"q": "a", "k": "b", "v": "c"}, size, **layout)
    stacked = {"a": np.concatenate([tensors[name] for name in "abc"])}
    check("ConcatenatedQKVMapping", fused, stacked, {"": "a"}, size, **layout)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_keys_and_values_alternate(size):
    tensors = numbers((8, 5), (8, 5))
    fused = np.concatenate([tensors[name].reshape(4, 2, 5) for name in "ab"], axis=1).reshape(16, 5)
    layout = {"heads": 8, "groups": 4, "head_size": 2}
    check("KVMapping", fused, tensors, {"k": "a", "v": "b"}, size, **layout)


@pytest.mark.parametrize("kind", ["MambaInProjMapping", "MambaConv1dMapping", "GDNConv1dMapping"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tail", [(3,), (1, 4), ()])
def test_components_are_cut_one_by_one(kind, size, tail):
    components = (8, 8, 4, 4, 4)
    tensors = numbers((sum(components), *tail))
    parts = np.split(tensors["a"], np.cumsum(components)[:-1])
    for rank in range(size):
        local = np.concatenate([np.split(part, size)[rank] for part in parts])
        one = facts(kind, local.shape, {"": "a"}, rank, size, components=components)
        assert np.array_equal(local_of(one, tensors), local)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_stack_of_experts_is_an_expert_after_another(size, transposed):
    tensors = numbers((3, 4, 8))
    for expert in range(3):
        one = tensors["a"][expert].T if transposed else tensors["a"][expert]
        layout = {"expert": expert, "may_transpose": True}
        check("FusedExpertMapping", one, tensors, {"": "a"}, size, axis=1, is_row=True, **layout)
        check("FusedExpertMapping", one, tensors, {"": "a"}, size, **layout)
        for rank in range(size):
            local = np.concatenate([np.split(half, size)[rank] for half in np.split(one, 2)])
            found = facts("FusedGatedExpertMapping", local.shape, {"": "a"}, rank, size, **layout)
            assert np.array_equal(local_of(found, tensors), local)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (facts("ColumnParallelMapping", (4, 3), {"": "missing"}), "maps it to missing, which the checkpoint lacks"),
        (facts("ColumnParallelMapping", (4, 3), {"": "a"}), r"the checkpoint has a BF16\[8, 3\]"),
        (facts("ColumnParallelMapping", (), {"": "a"}), "of a single number"),
        (facts("GatedMLPMapping", (16, 3), {"gate": "a", "up": "b"}), "differ in shape"),
        (facts("MambaInProjMapping", (8, 3), {"": "a"}, 0, 2, components=(5, 3)), "5 rows do not divide among 2 ranks"),
        (facts("MambaInProjMapping", (8, 3), {"": "a"}, 0, 1, components=(5, 2)), r"expects \[7, 3\]"),
        (facts("QKVMapping", (8, 3), {"q": "a", "k": "a", "v": "a"}, heads=2, groups=2, head_size=1), r"expects \[6, 3\]"),
        (facts("QKVMapping", (3, 3), {"q": "a", "k": "a", "v": "a"}, 0, 4, heads=2, groups=2, head_size=1), "do not divide"),
        (facts("FusedExpertMapping", (8, 3), {"": "a"}, expert=0), "is no stack of experts"),
        (facts("FusedExpertMapping", (2,), {"": "a"}, expert=9), "is no stack of experts with number 9"),
        (facts("FusedExpertMapping", (2,), {"": "a"}, expert=0), "is not the gathered shape"),
        (facts("ReplicatedMapping", (8, 3), {"": "a"}, permutation=(0, 0)), "permutation"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_names(wrong, message):
    with pytest.raises(RejectedError, match=message):
        geometry_of(wrong, catalog_of(numbers((8, 3), (4, 3))))


def test_facts_survive_being_written_down():
    one = facts("QKVMapping", (8, 3), {"q": "a", "k": "b", "v": "c"}, heads=2, groups=2, head_size=1)
    assert msgspec.json.decode(msgspec.json.encode(one), type=TaskFacts) == one
