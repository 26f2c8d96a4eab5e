"""The adapter on stand-ins: what goes directly, what only Bridge converts, what is refused, and the barrier."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from stand_ins import Bridge, Chunk, MegatronModelBridge, Task, auto, elsewhere, mapping  # noqa: E402

from deltarefit import kernels  # noqa: E402
from deltarefit.bits import logical_words  # noqa: E402
from deltarefit.canonical import Catalog, TensorSpec  # noqa: E402
from deltarefit.errors import RejectedError  # noqa: E402
from deltarefit.ids import EncodingMode  # noqa: E402
from deltarefit.integrations.megatron import MegatronAdapter, facts_of, megatron_adapter  # noqa: E402
from deltarefit.pieces import Piece, whole  # noqa: E402
from deltarefit.plan import RefitPlan  # noqa: E402
from deltarefit.records import Encoding  # noqa: E402
from deltarefit.source import LocalCollective, SourceSettings, open_source  # noqa: E402
from deltarefit.testing.collective import run_ranks  # noqa: E402

pytestmark = pytest.mark.torch
ONE_THREAD = SourceSettings(scan_threads=1)


def ones(*shape):
    return torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.bfloat16).reshape(shape)


def manifest(**shapes):
    return Catalog(TensorSpec(name, "BF16", shape) for name, shape in shapes.items())


def adapter(chunk, bridge, catalog, collective=None):
    return MegatronAdapter([chunk], bridge, collective or LocalCollective(), catalog)


def exported_plus_one(tasks):
    """A bridge whose export adds one to everything."""
    for task in tasks:
        yield task.mapping.hf_param, task.param_weight + 1


# --- exact classes -----------------------------------------------------------------------------------------------------------


def test_an_auto_mapping_is_what_it_resolves_to():
    chunk = Chunk({"a.weight": ones(4, 2)})
    for kind, name in (("column", "ColumnParallelMapping"), ("row", "RowParallelMapping"), ("replicated", "ReplicatedMapping")):
        assert facts_of(chunk.task("a.weight", auto("h", kind))).kind == name
    assert facts_of(chunk.task("a.weight", auto("h", permute_dims=(1, 0)))).permutation == (1, 0)


@pytest.mark.parametrize("kind", ["RMSNorm2ZeroCenteredRMSNormMapping", "MyAutoMapping", "QKVGMapping", "GDNLinearMapping"])
def test_a_class_that_is_not_known_is_never_taken_for_its_base(kind):
    """A subclass may change values."""
    chunk = Chunk({"a.weight": ones(4)})
    assert facts_of(chunk.task("a.weight", mapping(kind, "h"))).refusal == (
        f"{kind} is not a rearrangement of bits that is known here"
    )


def test_an_export_hook_of_a_task_rules_direct_sending_out():
    chunk = Chunk({"a.weight": ones(4)})
    found = facts_of(chunk.task("a.weight", mapping("DirectMapping", "h"), export_hook=lambda name, tensor: []))
    assert found.refusal == "an export hook may change it"


def test_a_fused_mapping_over_anything_but_rows_is_left_to_bridge():
    chunk = Chunk({"a.weight": ones(4)}, SimpleNamespace(num_attention_heads=2, num_query_groups=2, kv_channels=1))
    fused = mapping("QKVMapping", {"q": "q", "k": "k", "v": "v"}, _tp_mapping=auto("h", "replicated"))
    assert facts_of(chunk.task("a.weight", fused)).refusal == "it is fused over ranks as ReplicatedMapping, expected rows"


@pytest.mark.parametrize(
    ("name", "expert"), [("m.experts.local_experts.3.linear_fc2.weight", 3), ("m.experts.linear_fc2.weight12", 12)]
)
def test_the_number_of_an_expert_is_in_its_name(name, expert):
    chunk = Chunk({"a.weight": ones(4)})
    found = auto("h", "row", transpose_on_export=True, name=name)
    type(found).__name__ = "FusedExpertMapping"
    facts = facts_of(chunk.task("a.weight", found, global_name=name))
    assert (facts.expert, facts.is_row, facts.may_transpose, facts.refusal) == (expert, True, True, "")
    type(found).megatron_param = "m.experts.linear_fc2.weight"
    assert "no expert number" in facts_of(chunk.task("a.weight", found)).refusal


def test_a_sharded_data_parallel_parameter_is_refused():
    tensor = SimpleNamespace(placements=(), device_mesh=None)
    task = Task("a", "layers.0.a", mapping("DirectMapping", "h"), 0, SimpleNamespace(config=None), tensor)
    with pytest.raises(RejectedError, match=r"layers.0.a is a DTensor: Megatron-FSDP shards are not mapped"):
        facts_of(task)


# --- reading a model ---------------------------------------------------------------------------------------------------------


def test_names_of_wrappers_are_not_in_tasks():
    inner = Chunk({"a.weight": ones(2, 2)})
    outer = torch.nn.Module()
    outer.add_module("module", torch.nn.Module())
    outer._modules["module"].add_module("module", inner)
    found = adapter(outer, Bridge([inner.task("a.weight", auto("h"))]), manifest(h=(2, 2)))
    (task,) = found.tasks()
    assert task.spec.name == "h"
    assert not found.unmapped


def test_parameters_without_a_checkpoint_tensor_are_reported(caplog):
    chunk = Chunk({"a.weight": ones(2), "extra.scale": ones(3)})
    bridge = Bridge([chunk.task("a.weight", mapping("DirectMapping", "h")), None])
    found = adapter(chunk, bridge, manifest(h=(2,)))
    assert dict(found.unmapped) == {"extra.scale": "Bridge has no checkpoint tensor for it"}
    assert "1 parameters of rank 0 are in no tensor of the checkpoint and are never sent: extra.scale" in caplog.text


def test_a_checkpoint_tensor_without_a_parameter_is_refused_by_name():
    chunk = Chunk({"a.weight": ones(2)})
    found = adapter(chunk, Bridge([chunk.task("a.weight", mapping("DirectMapping", "h"))]), manifest(h=(2,), lost=(3,)))
    with pytest.raises(RejectedError, match=r"lost BF16\[3\]: no rank has any part of it"):
        open_source(found, LocalCollective(), ONE_THREAD)


def test_attached_adapters_are_refused():
    chunk = Chunk({"a.adapter.linear_in.weight": ones(2)})
    with pytest.raises(RejectedError, match=r"a.adapter.linear_in.weight: adapters are attached"):
        adapter(chunk, Bridge([]), manifest())


def test_ranks_with_different_models_are_refused():
    def work(collective):
        chunk = Chunk({"a.weight": ones(2)})
        tasks = [chunk.task("a.weight", mapping("DirectMapping", "h"))] * (1 + collective.rank)
        return adapter(chunk, Bridge(tasks), manifest(h=(2,)), collective)

    results = run_ranks(2, work)
    assert all("ranks list [1, 2] conversion tasks" in str(result) for result in results)


@pytest.mark.parametrize("lists_head", [False, True])
def test_a_tied_head_on_the_last_stage_is_a_replica_of_the_embedding(lists_head):
    """Bridge leaves the copy out; it must be equal to the embedding, and be sent under every name that the checkpoint lists."""

    class Tied(MegatronModelBridge):
        def mapping_registry(self):
            heads = {"output_layer.weight": mapping("AutoMapping", "head")}
            return SimpleNamespace(megatron_to_hf_lookup=heads.get)

    catalog = manifest(embed=(4, 2), **({"head": (4, 2)} if lists_head else {}))
    name, tied = "embedding.word_embeddings.weight", SimpleNamespace(share_embeddings_and_output_weights=True)

    def work(collective, wrong=0.0):
        if collective.rank == 0:
            chunk = Chunk({name: ones(4, 2)}, tied)
            task = chunk.task(name, auto("embed"))
        else:
            chunk = Chunk({"output_layer.weight": ones(4, 2)}, tied)
            chunk.output_layer.weight[1, 1] += wrong
            task = elsewhere(name, auto("embed"))
        found = adapter(chunk, Bridge([task], model_bridge=Tied()), catalog, collective)
        source = open_source(found, collective, ONE_THREAD)
        return {task.spec.name: task.replicas for task in source.tasks}, dict(found.unmapped)

    expected = (dict.fromkeys(catalog, (0, 1)), {})
    assert run_ranks(2, work) == [expected, expected]
    wrong = run_ranks(2, lambda collective: work(collective, 1.0))
    assert all("embed" in str(result) and "replicas differ" in str(result) for result in wrong)


# --- what only Bridge converts -----------------------------------------------------------------------------------------------


def refit(source, bridge, expected, change):
    """Change parameters, refit, and compare with the bridge's own export."""
    plan = RefitPlan(source.catalog, dict.fromkeys(source.catalog, Encoding.DIFFERENCE), 1)
    held = {name: words.copy() for name, words in expected().items()}
    for mode in EncodingMode:
        change()
        for bucket in source.owner.build(plan, mode):
            for item in bucket.items:
                view = whole(item.spec.shape)
                kernels.apply_item(held[item.spec.name], [Piece(view, view)], item)
        source.owner.commit()
        now = expected()
        assert all(np.array_equal(held[name], now[name]) for name in now)
    return bridge.exports


def test_values_that_bridge_changes_are_converted_by_bridge():
    chunk = Chunk({"a.weight": ones(2, 2), "norm.weight": ones(3), "other.weight": ones(3)})
    tasks = [
        chunk.task("a.weight", auto("h")),
        chunk.task("norm.weight", mapping("PlusOneMapping", "n")),
        chunk.task("other.weight", mapping("PlusOneMapping", "o")),
    ]
    bridge = Bridge(tasks, export=exported_plus_one)
    source = open_source(adapter(chunk, bridge, manifest(h=(2, 2), n=(3,), o=(3,))), LocalCollective(), ONE_THREAD)
    assert dict(source.residual) == dict.fromkeys("no", "PlusOneMapping is not a rearrangement of bits that is known here")

    def expected():
        norms = {"n": chunk.norm.weight + 1, "o": chunk.other.weight + 1}
        return {name: logical_words(tensor) for name, tensor in {"h": chunk.a.weight, **norms}.items()}

    def change():
        chunk.a.weight[0, 0] += 1
        chunk.norm.weight[1] += 1

    bridge.exports.clear()
    assert refit(source, bridge, expected, change) == [["norm.weight"]] * 2, "the other one did not change"


def test_what_one_rank_cannot_send_no_rank_sends_directly():
    """Expert-parallel ranks list their own experts at the same places: a place is direct on all of them or on none."""

    def work(collective):
        kind = "DirectMapping" if collective.rank == 0 else "StrangeMapping"
        chunk = Chunk({"e.weight": ones(2)})
        name = f"experts.{collective.rank}"
        task = chunk.task("e.weight", mapping(kind, f"h{collective.rank}"), global_name=name)
        others = {f"h{rank}": chunk.e.weight + 1 for rank in range(2)}
        bridge = Bridge([task], export=lambda tasks: others.items())
        source = open_source(adapter(chunk, bridge, manifest(h0=(2,), h1=(2,)), collective), collective, ONE_THREAD)
        return sorted(source.residual), len(source.tasks), [task.spec.name for task in source.sources]

    results = run_ranks(2, work)
    assert results == [(["h0", "h1"], 0, [f"experts.{rank}@0/1"]) for rank in range(2)]


@pytest.mark.parametrize(
    ("export", "message"),
    [
        (lambda tasks: [], "Bridge exports no n, which the checkpoint has"),
        (lambda tasks: [("n", ones(5))], r"Bridge exports n with shape \[5\]; the checkpoint has n BF16\[3\]"),
    ],
)
def test_an_export_that_is_not_the_checkpoints_is_refused(export, message):
    chunk = Chunk({"norm.weight": ones(3)})
    bridge = Bridge([chunk.task("norm.weight", mapping("PlusOneMapping", "n"))], export=export)
    with pytest.raises(RejectedError, match=message):
        open_source(adapter(chunk, bridge, manifest(n=(3,))), LocalCollective(), ONE_THREAD)


def test_a_conversion_into_a_tensor_that_the_checkpoint_lacks_is_refused_with_both_names():
    chunk = Chunk({"norm.weight": ones(3)})
    bridge = Bridge([chunk.task("norm.weight", mapping("PlusOneMapping", "n"))])
    with pytest.raises(RejectedError, match="cannot map n, which the checkpoint lacks: PlusOneMapping is not"):
        adapter(chunk, bridge, manifest())


@pytest.mark.parametrize(
    ("hook", "is_direct"),
    [
        (lambda weights: weights, True),
        (lambda weights: {**weights, "inv_freq": torch.ones(2)}, True),
        (lambda weights: {name: tensor * 2 for name, tensor in weights.items()}, False),
        (lambda weights: {name: tensor for name, tensor in weights.items() if tensor.sum().item() > 0}, False),
        (lambda weights: {}, False),
    ],
)
def test_a_bridges_own_last_step_is_tried_without_data(hook, is_direct):
    """One that returns what it was given is no reason to convert; one that looks at values may do anything."""

    class Hooked(MegatronModelBridge):
        def maybe_modify_converted_hf_weight(self, task, weights, state):
            return hook(weights)

    chunk = Chunk({"a.weight": ones(2)})
    bridge = Bridge([chunk.task("a.weight", mapping("DirectMapping", "h"))], model_bridge=Hooked(), export=exported_plus_one)
    source = open_source(adapter(chunk, bridge, manifest(h=(2,))), LocalCollective(), ONE_THREAD)
    reason = {} if is_direct else {"h": "Hooked.maybe_modify_converted_hf_weight may change it"}
    assert dict(source.residual) == reason


# --- being made --------------------------------------------------------------------------------------------------------------


def test_the_barrier_finishes_overlapped_parameter_gathers():
    class Wrapped(Chunk):
        calls = ()

        def start_param_sync(self, **options):
            self.calls = (*self.calls, options)

    chunk = Wrapped({"a.weight": ones(2)})
    found = adapter(chunk, Bridge([chunk.task("a.weight", mapping("DirectMapping", "h"))]), manifest(h=(2,)))
    chunk.ddp_config = SimpleNamespace(overlap_param_gather=False)
    found.barrier()
    assert chunk.calls == ()
    chunk.ddp_config.overlap_param_gather = True
    found.barrier()
    assert chunk.calls == ({"force_sync": True},)


def test_a_model_without_a_bridge_or_a_checkpoint_is_refused():
    chunk = Chunk({"a.weight": ones(2)})
    with pytest.raises(RejectedError, match="names no Hugging Face checkpoint; give the AutoBridge"):
        megatron_adapter([chunk], collective=LocalCollective())
    bridge = Bridge([chunk.task("a.weight", mapping("DirectMapping", "h"))])
    with pytest.raises(RejectedError, match="from a configuration alone; give the checkpoint"):
        megatron_adapter(chunk, bridge=bridge, collective=LocalCollective())
    found = megatron_adapter(chunk, bridge=bridge, collective=LocalCollective(), manifest=manifest(h=(2,)))
    assert list(found.catalog()) == ["h"]
    with pytest.raises(RejectedError, match="expected a model chunk or a list of them"):
        megatron_adapter("model", bridge=bridge)


def test_a_parameter_in_another_dtype_is_rounded_before_it_is_compared():
    chunk = Chunk({"a.weight": ones(2).float()})
    source = open_source(
        adapter(chunk, Bridge([chunk.task("a.weight", mapping("DirectMapping", "h"))]), manifest(h=(2,))),
        LocalCollective(),
        ONE_THREAD,
    )
    chunk.a.weight[0] *= 1 + 2**-20
    plan = RefitPlan(source.catalog, {"h": Encoding.DIFFERENCE}, 1)
    assert not list(source.owner.build(plan, EncodingMode.MIXED))
    assert source.coverage(LocalCollective()).by_type[0].path == "cast"
