"""Recorded facts of real Megatron jobs: pieces put elements where Megatron had them, and whole jobs refit, without Megatron."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from megatron_cases import CASES, canonical_words, digest, read_recorded
from stand_ins import Bridge, Chunk, elsewhere, mapping

torch = pytest.importorskip("torch")

from deltarefit import kernels  # noqa: E402
from deltarefit.bits import tensor_from_words  # noqa: E402
from deltarefit.canonical import TensorSpec  # noqa: E402
from deltarefit.errors import RejectedError  # noqa: E402
from deltarefit.ids import EncodingMode  # noqa: E402
from deltarefit.integrations.megatron import MegatronAdapter, TaskFacts, geometry_of  # noqa: E402
from deltarefit.pieces import Piece, whole  # noqa: E402
from deltarefit.plan import RefitPlan  # noqa: E402
from deltarefit.records import Encoding  # noqa: E402
from deltarefit.source import SourceSettings, onto_shard, open_source  # noqa: E402
from deltarefit.testing.collective import run_ranks  # noqa: E402

pytestmark = pytest.mark.torch
DIRECT = [name for name in CASES if name != "converted_tp2_ep2"]


def facts_of_rank(rank):
    return [(msgspec.convert(entry["facts"], TaskFacts), entry["words"]) for entry in rank]


def spread(words, view):
    strides = tuple(stride * words.itemsize for stride in view.stride)
    return np.lib.stride_tricks.as_strided(words[view.offset :], view.shape, strides)


def local_words(facts, manifest, canonical):
    """A parameter's elements, taken from the checkpoint through pieces; padding is zero."""
    geometry = geometry_of(facts, manifest)
    local = np.zeros(int(np.prod(facts.shape)), np.uint16)
    for name, pieces in geometry.pieces.items():
        for piece in onto_shard(pieces, geometry.shape, geometry.held, whole(facts.shape)):
            spread(local, piece.storage)[...] = spread(canonical[name], piece.canonical)
    return local


@pytest.mark.parametrize("name", CASES)
def test_pieces_put_elements_where_megatron_had_them(name):
    manifest, ranks = read_recorded(name)
    canonical = {tensor: canonical_words(spec) for tensor, spec in manifest.items()}
    checked = 0
    for rank in ranks:
        for facts, recorded in facts_of_rank(rank):
            if facts.refusal:
                assert name not in DIRECT
                continue
            assert digest(local_words(facts, manifest, canonical)) == recorded, facts
            checked += 1
    assert checked > 15


# --- whole jobs, of stand-ins for Megatron's objects that say what the recorded ones said -----------------------------------


def mapping_of(facts):
    """An object of the recorded class that gives the recorded facts."""
    names = facts.targets if set(facts.targets) != {""} else facts.targets[""]
    return mapping(facts.kind, names, name=facts.name, rank=facts.tp_rank, size=facts.tp_size)


def config_of(facts):
    """A model configuration from which the adapter reads the recorded geometry again."""
    values = {}
    for one in facts:
        if one.heads:
            values |= {"num_attention_heads": one.heads, "num_query_groups": one.groups, "kv_channels": one.head_size}
        if one.kind == "MambaInProjMapping":
            inner, _, states, _, heads = one.components
            values |= {"mamba_num_heads": heads, "mamba_head_dim": inner // heads}
            values |= {"mamba_state_dim": states, "mamba_num_groups": 1}
    return SimpleNamespace(**values)


class Rank:
    """One rank's model chunk, filled with a checkpoint's elements, and a bridge that lists the whole pipeline's tasks."""

    def __init__(self, facts, order, manifest):
        self.facts = {one.name: one for one in facts}
        self.manifest = manifest
        tensors = {one.local_name: torch.zeros(one.shape, dtype=torch.bfloat16) for one in facts}
        self.model = Chunk(tensors, config_of(facts))
        self.bridge = Bridge(
            self.model.task(self.facts[name].local_name, mapping_of(self.facts[name]), global_name=name)
            if name in self.facts
            else elsewhere(name, None)
            for name in order
        )

    def load(self, canonical):
        for facts in self.facts.values():
            words = local_words(facts, self.manifest, canonical)
            parameter = self.model.get_parameter(facts.local_name)
            parameter.copy_(tensor_from_words(words, TensorSpec("local", "BF16", facts.shape)))


@pytest.mark.parametrize("name", ["dense_tp2_pp2_padded", "experts_tp2_ep2_etp2_dp2", "hybrid_tp2"])
def test_a_recorded_job_refits_exactly(name):
    manifest, recorded = read_recorded(name)
    canonical = [{tensor: canonical_words(spec, step) for tensor, spec in manifest.items()} for step in range(3)]

    def work(collective):
        facts = [one for one, _ in facts_of_rank(recorded[collective.rank])]
        every = sorted({one.name for rank in recorded for one, _ in facts_of_rank(rank)})
        rank = Rank(facts, every, manifest)
        rank.load(canonical[0])
        adapter = MegatronAdapter([rank.model], rank.bridge, collective, manifest)
        source = open_source(adapter, collective, SourceSettings(scan_threads=1))
        plan = RefitPlan(manifest, dict.fromkeys(manifest, Encoding.DIFFERENCE), collective.world_size)
        sent = []
        for step, mode in enumerate(EncodingMode, start=1):
            rank.load(canonical[step])
            sent.append([item for bucket in source.owner.build(plan, mode) for item in bucket.items])
            source.owner.commit()
        return sent

    results = run_ranks(len(recorded), work)
    assert not [result for result in results if isinstance(result, Exception)], results
    held = {tensor: words.copy() for tensor, words in canonical[0].items()}
    for step in (1, 2):
        for sent in results:
            for item in sent[step - 1]:
                view = whole(item.spec.shape)
                kernels.apply_item(held[item.spec.name], [Piece(view, view)], item)
        assert all(np.array_equal(held[tensor], canonical[step][tensor]) for tensor in manifest)


def test_a_replica_that_differs_is_refused_with_tensor_and_ranks():
    manifest, recorded = read_recorded("experts_ep2_dp2")
    canonical = {tensor: canonical_words(spec) for tensor, spec in manifest.items()}

    def work(collective):
        facts = [one for one, _ in facts_of_rank(recorded[collective.rank])]
        every = sorted({one.name for rank in recorded for one, _ in facts_of_rank(rank)})
        rank = Rank(facts, every, manifest)
        rank.load(canonical)
        if collective.rank == 1:
            rank.model.get_parameter("decoder.final_layernorm.weight")[3] = 2.0
        open_source(MegatronAdapter([rank.model], rank.bridge, collective, manifest), collective)

    results = run_ranks(2, work)
    assert all(isinstance(result, RejectedError) and "model.norm.weight" in str(result) for result in results), results
    assert "ranks [0] hold" in str(results[0])
