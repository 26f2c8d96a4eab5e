"""Offline room: exact deltas between checkpoints on disk, without a cluster and without torch.

``FORMAT.md`` beside this file is normative for the delta file. May import the leaves, ``kernels`` and ``payload``; takes no
clock and prints nothing. Every command reads in slices of a fixed size on all cores, so memory follows ``Settings`` and not
the model; results appear complete or not at all.
"""

from deltarefit.offline.apply import ApplyReport, apply_deltas
from deltarefit.offline.catalog import catalog_of_checkpoint
from deltarefit.offline.diff import DiffReport, diff_checkpoints
from deltarefit.offline.fold import fold_deltas
from deltarefit.offline.inplace import apply_in_place, resume_in_place
from deltarefit.offline.inspect import InspectReport, inspect_delta
from deltarefit.offline.patched import PatchedCheckpoint, is_delta
from deltarefit.offline.pool import MIN_MEMORY_NBYTES, Meter, Settings
from deltarefit.offline.verify import VerifyReport, verify_deltas

__all__ = [
    "MIN_MEMORY_NBYTES",
    "ApplyReport",
    "DiffReport",
    "InspectReport",
    "Meter",
    "PatchedCheckpoint",
    "Settings",
    "VerifyReport",
    "apply_deltas",
    "apply_in_place",
    "catalog_of_checkpoint",
    "diff_checkpoints",
    "fold_deltas",
    "inspect_delta",
    "is_delta",
    "resume_in_place",
    "verify_deltas",
]
