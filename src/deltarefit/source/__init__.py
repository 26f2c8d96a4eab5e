"""The training side: who owns which shard, what changed in it, and in which buckets it travels (paper 4, A.1).

May import ``placement``, ``kernels``, ``bits`` and the leaves; numpy, msgspec and torch. Never ``torch.distributed`` (a
``Collective`` is handed in), transports, the control plane or a training framework: adapters live in ``integrations``.
"""

from __future__ import annotations

from deltarefit.source.audit import agree_on_catalog, audit_coverage, audit_replicas, check_manifest
from deltarefit.source.baseline import SourceBaseline, TaskTracker
from deltarefit.source.buckets import cut_into_buckets, cut_into_chunks
from deltarefit.source.collective import Collective, LocalCollective, together
from deltarefit.source.conversion import ExplainedConverter, ResidualConverter, ResidualPart, assembler_of, required_tensors
from deltarefit.source.coverage import CoverageReport, CoverageRow, ParallelDegrees, coverage_of
from deltarefit.source.joint import JointAdapter
from deltarefit.source.owner import BuildStats, Owner
from deltarefit.source.ownership import elect_owners, owned_tasks, stable_hash
from deltarefit.source.parts import PART_NBYTES, cut_into_parts
from deltarefit.source.regions import onto_shard, onto_view, pack, window
from deltarefit.source.replicas import find_replicas
from deltarefit.source.residual import ResidualBaseline, ResidualStage
from deltarefit.source.settings import SourceSettings
from deltarefit.source.setup import Source, open_source
from deltarefit.source.task import ConversionTask, ResidualSource, SourceAdapter

__all__ = [
    "PART_NBYTES",
    "BuildStats",
    "Collective",
    "ConversionTask",
    "CoverageReport",
    "CoverageRow",
    "ExplainedConverter",
    "JointAdapter",
    "LocalCollective",
    "Owner",
    "ParallelDegrees",
    "ResidualBaseline",
    "ResidualConverter",
    "ResidualPart",
    "ResidualSource",
    "ResidualStage",
    "Source",
    "SourceAdapter",
    "SourceBaseline",
    "SourceSettings",
    "TaskTracker",
    "agree_on_catalog",
    "assembler_of",
    "audit_coverage",
    "audit_replicas",
    "check_manifest",
    "coverage_of",
    "cut_into_buckets",
    "cut_into_chunks",
    "cut_into_parts",
    "elect_owners",
    "find_replicas",
    "onto_shard",
    "onto_view",
    "open_source",
    "owned_tasks",
    "pack",
    "required_tensors",
    "stable_hash",
    "together",
    "window",
]
