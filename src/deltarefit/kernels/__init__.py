"""Hot loops over stored bits: scan, code, decode, apply, commit, digest. Compiled C++ with a numpy twin of each.

May import the leaves only (errors, canonical, pieces, records) and numpy. The C++ half is loaded with ctypes, so the global
interpreter lock is released while a kernel runs. Design notes 0004 (digest) and 0005 (kernels).
"""

from __future__ import annotations

from deltarefit.kernels.api import (
    apply,
    apply_item,
    available_isas,
    count_nans,
    digest,
    digest_records,
    gather,
    plane_totals,
    scan,
    scan_many,
)
from deltarefit.kernels.batch import BoundDigest, PreparedApply, PreparedDigests, commit_many, digest_many
from deltarefit.kernels.bound import BoundPieces
from deltarefit.kernels.coding import code_records, decode_positions, decode_values, has_fitting_columns
from deltarefit.kernels.isa import Isa
from deltarefit.kernels.item_table import ItemRows, ItemTable
from deltarefit.kernels.scan_batch import ScanJob
from deltarefit.kernels.table import PieceTable

__all__ = [
    "BoundDigest",
    "BoundPieces",
    "Isa",
    "ItemRows",
    "ItemTable",
    "PieceTable",
    "PreparedApply",
    "PreparedDigests",
    "ScanJob",
    "apply",
    "apply_item",
    "available_isas",
    "code_records",
    "commit_many",
    "count_nans",
    "decode_positions",
    "decode_values",
    "digest",
    "digest_many",
    "digest_records",
    "gather",
    "has_fitting_columns",
    "plane_totals",
    "scan",
    "scan_many",
]
