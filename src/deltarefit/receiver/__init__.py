"""The rollout side of one rank: learn where an engine's loader puts weights, then change stored bits in place.

Knows torch; imports ``placement``, ``kernels``, ``payload`` and ``bits``. Imports no engine: a module and its loader are
handed in. Paper 6, A.2; design note 0006.
"""

from deltarefit.receiver.joint import JointAfterLoad, JointModel, Target
from deltarefit.receiver.outcomes import TensorOutcome, outcomes_of, tensor_outcomes
from deltarefit.receiver.rank import RankReceiver
from deltarefit.receiver.ready import ReadyPayload
from deltarefit.receiver.report import (
    MergedReport,
    PartDigest,
    PrewarmReport,
    RankDigest,
    RankSurvey,
    TensorRoute,
    merge_digests,
    merge_reports,
    survey_ranks,
)
from deltarefit.receiver.settings import ApplyPath, ReceiverSettings

__all__ = [
    "ApplyPath",
    "JointAfterLoad",
    "JointModel",
    "MergedReport",
    "PartDigest",
    "PrewarmReport",
    "RankDigest",
    "RankReceiver",
    "RankSurvey",
    "ReadyPayload",
    "ReceiverSettings",
    "Target",
    "TensorOutcome",
    "TensorRoute",
    "merge_digests",
    "merge_reports",
    "outcomes_of",
    "survey_ranks",
    "tensor_outcomes",
]
