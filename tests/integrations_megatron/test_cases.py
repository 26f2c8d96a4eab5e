"""What went wrong elsewhere with Megatron sources: padding, buffers, pipelines, numbered experts, the widths of Mamba."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from stand_ins import Bridge, Chunk, MegatronModelBridge, auto, elsewhere, mapping  # noqa: E402

from deltarefit import kernels  # noqa: E402
from deltarefit.bits import logical_words  # noqa: E402
from deltarefit.canonical import Catalog, TensorSpec  # noqa: E402
from deltarefit.errors import RejectedError  # noqa: E402
from deltarefit.ids import EncodingMode  # noqa: E402
from deltarefit.integrations.megatron import MegatronAdapter  # noqa: E402
from deltarefit.plan import RefitPlan  # noqa: E402
from deltarefit.records import Encoding  # noqa: E402
from deltarefit.source import SourceSettings, open_source  # noqa: E402
from deltarefit.testing.collective import run_ranks  # noqa: E402

pytestmark = pytest.mark.torch
ONE_THREAD = SourceSettings(scan_threads=1)
EMBEDDING = "embedding.word_embeddings.weight"


def ones(*shape):
    return torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.bfloat16).reshape(shape)


def refits(collective, chunks, bridge, catalog, change):
    """The source, and per tensor the flat indices that this rank sends after a change; committed."""
    source = open_source(MegatronAdapter(chunks, bridge, collective, catalog), collective, ONE_THREAD)
    with torch.no_grad():
        change()
    plan = RefitPlan(catalog, dict.fromkeys(catalog, Encoding.DIFFERENCE), collective.world_size)
    sent = {}
    for bucket in source.owner.build(plan, EncodingMode.MIXED):
        for item in bucket.items:
            sent.setdefault(item.spec.name, []).extend(kernels.decode_positions(item).tolist())
    source.owner.commit()
    return source, sent


def ran(world_size, work):
    results = run_ranks(world_size, work)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def together(results):
    """What all ranks sent."""
    total = {}
    for _, sent in results:
        for name, positions in sent.items():
            total.setdefault(name, []).extend(positions)
    return total


def test_padding_of_the_vocabulary_is_never_sent_for_tied_heads_too():
    """10 rows padded to 12 over two ranks; row 9 and padding row 11 change."""

    class Tied(MegatronModelBridge):
        def mapping_registry(self):
            heads = {"output_layer.weight": mapping("AutoMapping", "head")}
            return SimpleNamespace(megatron_to_hf_lookup=heads.get)

    catalog = Catalog(TensorSpec(name, "BF16", (10, 2)) for name in ("embed", "head"))
    tied = SimpleNamespace(share_embeddings_and_output_weights=True)

    def work(collective):
        chunk = Chunk({EMBEDDING: ones(6, 2)}, tied)
        task = chunk.task(EMBEDDING, auto("embed", rank=collective.rank, size=2))

        def change():
            if collective.rank == 1:
                chunk.get_parameter(EMBEDDING)[3:6:2, 0] += 1  # of all rows: 9 and 11

        return refits(collective, [chunk], Bridge([task], model_bridge=Tied()), catalog, change)

    assert together(ran(2, work)) == {"embed": [18], "head": [18]}


def test_a_routers_correction_bias_is_a_buffer_that_travels_in_32_bits():
    """No gradient, and values so close together that 16 bits would make a few of them."""
    bias = torch.linspace(6.817, 7.063, 238)
    catalog = Catalog([TensorSpec("gate.e_score_correction_bias", "F32", (238,))])

    def work(collective):
        chunk = Chunk({"router.weight": ones(1)})
        router = chunk.get_submodule("router")
        router.register_buffer("expert_bias", bias.clone())
        task = chunk.task("router.weight", mapping("DirectMapping", "gate.e_score_correction_bias"), global_name="router.bias")
        task = task.__class__(**{**vars(task), "param_name": "router.expert_bias", "param_weight": router.expert_bias})
        words = logical_words(router.expert_bias).copy()

        def change():
            logical_words(router.expert_bias)[100] += 1  # one unit in the last place

        source, sent = refits(collective, [chunk], Bridge([task]), catalog, change)
        (held,) = source.owner.baseline.trackers[0].words
        return sent, np.unique(held).size, int(held[100]) - int(words[100]), dict(source.adapter.unmapped)

    ((sent, distinct, ulps, unmapped),) = ran(1, work)
    assert (sent, distinct, ulps) == ({"gate.e_score_correction_bias": [100]}, 238, 1)
    assert list(unmapped) == ["router.weight"]


def test_chunks_of_a_virtual_pipeline_are_told_apart():
    """Each chunk counts its layers from 0; the tasks' own names do not."""
    catalog = Catalog(TensorSpec(f"h{number}", "BF16", (3,)) for number in range(4))
    name = "decoder.layers.0.norm.weight"

    def work(collective):
        chunks = [Chunk({name: ones(3) * (1 + 2 * chunk + collective.rank)}) for chunk in range(2)]
        tasks = []
        for number in range(4):
            found = mapping("DirectMapping", f"h{number}")
            everywhere = f"decoder.layers.{number}.norm.weight"
            if number % 2 == collective.rank:
                tasks.append(chunks[number // 2].task(name, found, global_name=everywhere, chunk=number // 2))
            else:
                tasks.append(elsewhere(everywhere, found))

        def change():
            if collective.rank == 1:
                chunks[1].get_parameter(name)[2] += 1

        source, sent = refits(collective, chunks, Bridge(tasks), catalog, change)
        held = {tracker.task.spec.name: tracker.words[0] for tracker in source.owner.baseline.trackers}
        for number in range(collective.rank, 4, 2):
            assert np.array_equal(held[f"h{number}"], logical_words(chunks[number // 2].get_parameter(name)))
        return source, sent

    assert together(ran(2, work)) == {"h3": [2]}


def test_a_stage_without_changes_and_a_parameter_without_a_counterpart_end_nothing():
    catalog = Catalog(TensorSpec(f"h{stage}", "BF16", (2, 2)) for stage in range(2))

    def work(collective):
        own, other = collective.rank, 1 - collective.rank
        chunk = Chunk({f"s{own}.weight": ones(2, 2), f"s{own}.temperature": ones(1)})
        tasks = {
            own: chunk.task(f"s{own}.weight", mapping("DirectMapping", f"h{own}")),
            other: elsewhere(f"s{other}.weight", mapping("DirectMapping", f"h{other}")),
        }

        def change():
            chunk.get_parameter(f"s{own}.weight")[0, 1] += 1 - own
            chunk.get_parameter(f"s{own}.temperature")[0] += 1

        source, sent = refits(collective, [chunk], Bridge([tasks[0], tasks[1], None]), catalog, change)
        assert list(source.adapter.unmapped) == [f"s{own}.temperature"]
        return source, sent

    results = ran(2, work)
    assert [sent for _, sent in results] == [{"h0": [1]}, {}]
    assert [source.owner.changed_elements for source, _ in results] == [1, 0]


@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_an_embedding_that_a_later_stage_holds_too_is_sent_once(wrong):
    """Blocks that predict ahead have a copy of the embedding on the last stage."""
    catalog = Catalog([TensorSpec("embed", "BF16", (4, 2))])

    def work(collective):
        chunk = Chunk({EMBEDDING: ones(4, 2)})
        chunk.get_parameter(EMBEDDING)[2, 0] += wrong * collective.rank
        task = chunk.task(EMBEDDING, auto("embed"))
        return refits(collective, [chunk], Bridge([task]), catalog, lambda: chunk.get_parameter(EMBEDDING)[1].add_(1))

    results = run_ranks(2, work)
    if wrong:
        assert all(isinstance(result, RejectedError) for result in results)
        assert "embed" in str(results[0])
        assert "ranks [0] hold" in str(results[0])
        assert "ranks [1] hold" in str(results[0])
    else:
        assert together(results) == {"embed": [2, 3]}


def test_grouped_experts_are_numbered_over_all_ranks():
    """Two expert-parallel ranks of two experts, each expert a numbered parameter of one grouped layer."""
    roles = ("gate", "up")
    catalog = Catalog(
        TensorSpec(f"experts.{expert}.{role}_proj.weight", "BF16", (2, 3)) for expert in range(4) for role in roles
    )

    def work(collective):
        name = "mlp.experts.linear_fc1.weight"
        chunk = Chunk({f"{name}{local}": ones(4, 3) for local in range(2)})
        tasks = []
        for local in range(2):
            expert = 2 * collective.rank + local
            targets = {role: f"experts.{expert}.{role}_proj.weight" for role in roles}
            tasks.append(
                chunk.task(f"{name}{local}", mapping("GatedMLPMapping", targets), global_name=f"decoder.{name}{expert}")
            )

        def change():
            if collective.rank == 1:
                chunk.get_parameter(f"{name}1")[3, 2] += 1  # of expert 3: the last row of the up projection

        return refits(collective, [chunk], Bridge(tasks), catalog, change)

    results = ran(2, work)
    assert together(results) == {"experts.3.up_proj.weight": [5]}
    owned = [{tracker.task.spec.name for tracker in source.owner.baseline.trackers} for source, _ in results]
    assert [sorted({int(name.split(".")[1]) for name in names}) for names in owned] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("rows", [14, 18])
def test_the_inner_width_of_mamba_is_heads_times_head_size(rows):
    """2 heads of 2 make 4, whatever an expansion of 2 times a hidden size of 3 would make."""
    catalog = Catalog([TensorSpec("in_proj", "BF16", (rows, 3))])
    config = SimpleNamespace(
        mamba_num_heads=2, mamba_head_dim=2, mamba_state_dim=2, mamba_num_groups=1, hidden_size=3, mamba_expand=2
    )

    def work(collective):
        chunk = Chunk({"in_proj.weight": ones(rows, 3)}, config)
        bridge = Bridge([chunk.task("in_proj.weight", mapping("MambaInProjMapping", "in_proj"))])
        bridge.export = lambda tasks: [("in_proj", chunk.get_parameter("in_proj.weight"))]
        return refits(collective, [chunk], bridge, catalog, lambda: chunk.get_parameter("in_proj.weight")[9, 1].add_(1))

    ((source, sent),) = ran(1, work)
    assert sent == {"in_proj": [28]}
    if rows == 14:  # 4 + 4 + 2 + 2 + 2
        assert not source.residual
    else:
        assert "expects [14, 3]" in source.residual["in_proj"], "what does not fit is left to Bridge, and says why"
