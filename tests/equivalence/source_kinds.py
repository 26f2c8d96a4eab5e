"""Training jobs of many kinds around the same three policies, each rank a thread: whole, 32 bits, computed, sharded, Megatron.

No kind knows how another places things: shards are cut by torch, Megatron's parameters are assembled as real Megatron had them.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from fsdp_layouts import make, rank_of
from megatron_cases import read_recorded
from test_recorded import Rank, facts_of_rank

from deltarefit import payload
from deltarefit.bits import logical_words, spec_of
from deltarefit.canonical import Catalog
from deltarefit.ids import AttemptId, OwnerId, PolicyVersion
from deltarefit.integrations.fsdp import fsdp_adapter
from deltarefit.integrations.megatron import MegatronAdapter
from deltarefit.integrations.torch import torch_adapter
from deltarefit.integrations.torch.local import local_part
from deltarefit.source import SourceSettings, open_source
from deltarefit.testing.checkpoints import load_tensors, three_versions, write_checkpoint, write_tiny_checkpoint
from deltarefit.testing.collective import ThreadCollective

ONE_THREAD = SourceSettings(scan_threads=1)
VERSIONS = range(3)


class Policies:
    """Three policies of one architecture, as checkpoint tensors and as transformers models."""

    def __init__(self, architecture, work):
        self.architecture = architecture
        self.directory = work / "v0"
        write_tiny_checkpoint(self.directory, architecture)
        self.tensors = three_versions(load_tensors(self.directory))
        self._work = work
        self._models = {}

    @property
    def catalog(self):
        return Catalog(spec_of(name, tensor) for name, tensor in self.tensors[0].items())

    def model(self, version):
        """A transformers model that loaded the policy by its own means. Shared: copy it before changing it."""
        if version not in self._models:
            from transformers import AutoModelForCausalLM

            path = self.directory
            if version:
                path = write_checkpoint(self._work / f"v{version}", self.tensors[version], like=self.directory)
            self._models[version] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        return self._models[version]


@dataclass
class Job:
    """A training job that can be put at any of the policies."""

    ranks: list[Any]
    """One per rank, each with ``adapter(collective)`` and ``load(version)``."""
    published: Any
    """From a policy's checkpoint tensors to those that are published."""
    sources: Any = None
    """Every rank's source, once opened."""

    def open(self):
        """Audit the ranks' sources, at policy 0."""
        world = ThreadCollective.world(len(self.ranks))

        def open_rank(number):
            self.ranks[number].load(0)
            return open_source(self.ranks[number].adapter(world[number]), world[number], ONE_THREAD)

        self.sources = _on_ranks(open_rank, len(self.ranks))
        return self

    def load(self, version):
        for rank in self.ranks:
            rank.load(version)

    def commit(self):
        for source in self.sources:
            source.owner.commit()


def _on_ranks(work, count):
    """Do something on all ranks together."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def build(job, plan, mode):
    """All payloads of an attempt, as bytes, in declared order."""
    ranks = _on_ranks(lambda number: list(job.sources[number].owner.build(plan, mode)), len(job.sources))
    sent = [(sequence, owner, bucket) for owner, buckets in enumerate(ranks) for sequence, bucket in enumerate(buckets)]
    return [
        payload.encode(
            bucket.items,
            attempt=AttemptId("v000001-a1-test"),
            owner=OwnerId(owner),
            sequence=sequence,
            base_version=PolicyVersion(0),
            target_version=PolicyVersion(1),
            plan_digest=plan.digest,
        )
        for sequence, owner, bucket in sorted(sent, key=lambda one: one[:2])
    ]


class Whole:
    """A copy of the whole model; in 32 bits, published in 16, with what rounds away; or with an export that computes."""

    def __init__(self, policies, *, dtype=torch.bfloat16, export=None):
        self._policies = policies
        self._options = {"export": export, "export_by_layer": True} if export else {}
        if dtype is torch.float32:
            self._options["manifest"] = policies.catalog
        self._model = copy.deepcopy(policies.model(0)).to(dtype)

    def adapter(self, collective):
        return torch_adapter(self._model, collective=collective, **self._options)

    def load(self, version):
        wanted = dict(self._policies.model(version).named_parameters())
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                value = wanted[name].to(parameter.dtype)
                parameter.copy_(value * (1 + 2**-14) if parameter.dtype is torch.float32 else value)


class Sharded:
    """One rank's DTensor shards; torch cuts every policy anew."""

    def __init__(self, policies, layout, world_size, rank):
        self._place = (world_size, rank)
        with rank_of(world_size, rank):
            self._models = [make(layout, world_size, copy.deepcopy(policies.model(version))) for version in VERSIONS]
            self._shards = [
                {name: local_part(parameter.detach()).clone() for name, parameter in model.named_parameters()}
                for model in self._models
            ]
            self._adapter = fsdp_adapter(self._models[0], collective=ThreadCollective.world(world_size)[rank])
            self._adapter.catalog()

    def adapter(self, collective):
        self._adapter._collective = collective
        return self._adapter

    def load(self, version):
        with torch.no_grad():
            for name, parameter in self._models[0].named_parameters():
                local_part(parameter.detach()).copy_(self._shards[version][name])


class Megatron:
    """One rank of a recorded Megatron job."""

    def __init__(self, policies, recorded, rank):
        self._manifest, ranks = read_recorded(recorded)
        facts = [one for one, _ in facts_of_rank(ranks[rank])]
        every = sorted({one.name for listed in ranks for one, _ in facts_of_rank(listed)})
        assert self._manifest == policies.catalog
        self._policies = policies
        self._rank = Rank(facts, every, self._manifest)

    def adapter(self, collective):
        return MegatronAdapter([self._rank.model], self._rank.bridge, collective, self._manifest)

    def load(self, version):
        self._rank.load({name: logical_words(tensor).copy() for name, tensor in self._policies.tensors[version].items()})


def doubled_norms(state):
    """An export that computes the norms and hands on everything else."""
    return {name: tensor * 2 if "norm" in name else tensor for name, tensor in state.items()}


def _same(tensors):
    return tensors


def _whole(world_size, published=_same, **options):
    return lambda policies: Job([Whole(policies, **options) for _ in range(world_size)], published)


def _sharded(layout, world_size):
    return lambda policies: Job([Sharded(policies, layout, world_size, rank) for rank in range(world_size)], _same)


def _megatron(recorded, world_size):
    return lambda policies: Job([Megatron(policies, recorded, rank) for rank in range(world_size)], _same)


SOURCES = {
    "whole, two copies": _whole(2),
    "32-bit masters": _whole(1, dtype=torch.float32),
    "computed norms, two copies": _whole(2, published=doubled_norms, export=doubled_norms),
    "FSDP2 over 3": _sharded("fsdp", 3),
    "HSDP 2 by 2": _sharded("hsdp", 4),
    "tensor parallel by FSDP2, 2 by 2": _sharded("tp_fsdp", 4),
    "experts over 3": _sharded("ep", 3),
    "fused experts over 2": _sharded("fused_tp", 2),
    "Megatron TP2 EP2 expert-TP2": _megatron("experts_tp2_ep2_etp2_dp2", 4),
    "Megatron EP2 DP2": _megatron("experts_ep2_dp2", 2),
}
"""Jobs that train a mixture of experts."""
HYBRID_SOURCES = {
    "whole, two copies": _whole(2),
    "FSDP2 over 3": _sharded("fsdp", 3),
    "Megatron TP2": _megatron("hybrid_tp2", 2),
}
"""Jobs that train a hybrid of Mamba and attention."""
