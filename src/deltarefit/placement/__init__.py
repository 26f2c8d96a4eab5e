"""Placement: which elements of which storage hold a tensor, learned by watching loaders and conversions run on probes.

Knows torch and numpy, imports ``bits``, ``pieces`` and ``canonical``. Knows no engine, no framework and no model: whatever
moves values is a callable that was handed in.
"""

from deltarefit.placement.conversion import Parts, TracedConversion, trace_conversion, verify_placements
from deltarefit.placement.digits import IdSpace
from deltarefit.placement.fit import fit_pieces

__all__ = ["IdSpace", "Parts", "TracedConversion", "fit_pieces", "trace_conversion", "verify_placements"]
