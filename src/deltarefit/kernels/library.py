"""Loads the compiled kernels, once per process, and says which instruction sets run here.

Without the library everything works on the numpy twins; that is logged once, as a warning.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, c_int64, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltarefit.errors import RejectedError
from deltarefit.kernels.isa import Isa

__all__ = [
    "APPLY_CALL",
    "ApplyCall",
    "CopyCall",
    "DigestCall",
    "ScanCall",
    "address",
    "available_isas",
    "best_isa",
    "library",
    "resolve",
]

_ABI = 12
"""Must equal ``deltarefit_abi()`` in kernels.cpp."""
_PATH = Path(__file__).with_name("_kernels.so")
_log = logging.getLogger(__name__)

_Planes = c_void_p * 8


class ScanCall(Structure):
    """``struct ScanCall`` of common.h, field by field; the comments are there."""

    _fields_ = (
        ("candidate", c_void_p),
        ("baseline", c_void_p),
        ("table", c_void_p),
        ("scratch", c_void_p),
        ("locations", _Planes),
        ("values", _Planes),
        ("pieces", c_int64),
        ("elements", c_int64),
        ("width", c_int64),
        ("encoding", c_int64),
        ("form", c_int64),
        ("everything", c_int64),
        ("may_be_dense", c_int64),
        ("escape_allowance", c_int64),
        ("location_capacity", c_int64),
        ("value_capacity", c_int64),
        ("scanned", c_int64),
        ("count", c_int64),
        ("location_nbytes", c_int64),
        ("first", c_int64),
        ("last", c_int64),
        ("escapes", c_int64),
        ("max_gap", c_int64),
        ("pending_gap", c_int64),
        ("pending_count", c_int64),
        ("pending_nbytes", c_int64),
        ("lane0", c_uint64),
        ("lane1", c_uint64),
    )


SCAN_CALL = np.dtype(ScanCall)
"""The same for numpy: many calls are filled column by column."""


class ScanCalls(Structure):
    """``struct ScanCalls`` of common.h."""

    _fields_ = (
        ("calls", c_void_p),
        ("locations", c_void_p),
        ("values", _Planes),
        ("num_calls", c_int64),
        ("location_capacity", c_int64),
        ("value_capacity", c_int64),
        ("short_count", c_int64),
        ("short_mean", c_int64),
        ("short_escapes", c_int64),
        ("next", c_int64),
        ("location_nbytes", c_int64),
        ("count", c_int64),
    )


class ApplyCall(Structure):
    """``struct ApplyCall`` of common.h."""

    _fields_ = (
        ("storage", c_void_p),
        ("table", c_void_p),
        ("positions", c_void_p),
        ("words", c_void_p),
        ("locations", _Planes),
        ("values", _Planes),
        ("pieces", c_int64),
        ("width", c_int64),
        ("widen", c_int64),
        ("encoding", c_int64),
        ("form", c_int64),
        ("start", c_int64),
        ("count", c_int64),
        ("location_nbytes", c_int64),
        ("num_elements", c_int64),
    )


APPLY_CALL = np.dtype(ApplyCall)


class DigestCall(Structure):
    """``struct DigestCall`` of common.h."""

    _fields_ = (
        ("storage", c_void_p),
        ("table", c_void_p),
        ("scratch", c_void_p),
        ("pieces", c_int64),
        ("width", c_int64),
        ("widen", c_int64),
        ("offender", c_int64),
        ("lane0", c_uint64),
        ("lane1", c_uint64),
    )


class CopyCall(Structure):
    """``struct CopyCall`` of common.h."""

    _fields_ = (
        ("to", c_void_p),
        ("storage", c_void_p),
        ("table", c_void_p),
        ("pieces", c_int64),
        ("width", c_int64),
        ("counts", c_int64),
        ("rule", c_uint64 * 3),
        ("counted", c_int64),
    )


class PlaneTotals(Structure):
    """``struct PlaneTotals`` of common.h."""

    _fields_ = (("sum", c_int64), ("escapes", c_int64), ("highest", c_int64))


PLANE_TOTALS = np.dtype(PlaneTotals)
_STRUCTURES = (ScanCall, ScanCalls, ApplyCall, DigestCall, CopyCall, PlaneTotals)


def _load(path: Path) -> ctypes.CDLL | None:
    """The library at ``path``, or None with the reason logged."""
    try:
        loaded = ctypes.CDLL(str(path))
        loaded.deltarefit_abi.restype = c_int64
        loaded.deltarefit_call_nbytes.restype = c_int64
        loaded.deltarefit_call_nbytes.argtypes = (c_int64,)
        sizes = tuple(loaded.deltarefit_call_nbytes(which) for which in range(len(_STRUCTURES)))
        expected = tuple(ctypes.sizeof(structure) for structure in _STRUCTURES)
        if loaded.deltarefit_abi() != _ABI or sizes != expected:
            reason = f"it was built from other sources (ABI {loaded.deltarefit_abi()}, structures {sizes})"
        else:
            _declare(loaded)
            return loaded
    except (OSError, AttributeError) as error:
        reason = str(error)
    _log.warning(
        "deltarefit's compiled kernels are not usable: %s. Slow numpy kernels are used instead, with the same results; "
        "reinstall deltarefit where a C++ compiler is installed, or run `python hatch_build.py` in a checkout",
        reason,
    )
    return None


def _declare(loaded: ctypes.CDLL) -> None:
    for name, result, arguments in (
        ("best_isa", c_int64, ()),
        ("scan_scratch_nbytes", c_int64, (c_int64, c_int64, c_int64)),
        ("scan", c_int64, (POINTER(ScanCall), c_int64)),
        ("scan_many", c_int64, (POINTER(ScanCalls), c_int64)),
        ("apply", c_int64, (POINTER(ApplyCall), c_int64)),
        ("apply_many", None, (c_void_p, c_int64, c_void_p, c_int64)),
        ("copy_many", None, (c_void_p, c_int64, c_void_p, c_int64)),
        ("digest_many", None, (c_void_p, c_int64, c_void_p, c_int64)),
        ("plane_totals", None, (c_void_p, c_int64, c_int64, c_int64, c_void_p)),
        ("totals_of_parts", None, (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)),
        ("shortened_nbytes", c_int64, (c_void_p, c_int64, c_int64)),
        ("shorten_gaps", None, (c_void_p, c_int64, c_int64, c_int64)),
        ("read_both", c_uint64, (c_void_p, c_void_p, c_int64, c_int64)),
        ("digest", None, (POINTER(DigestCall), c_int64)),
        ("digest_elements", None, (c_void_p, c_void_p, c_int64, c_int64, c_void_p)),
        ("panel_nbytes", c_int64, ()),
    ):
        function = getattr(loaded, f"deltarefit_{name}")
        function.restype = result
        function.argtypes = arguments


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    return _load(_PATH)


@lru_cache(maxsize=1)
def best_isa() -> Isa:
    """The fastest implementation that runs on this machine."""
    loaded = _library()
    return Isa.NUMPY if loaded is None else Isa(loaded.deltarefit_best_isa())


def available_isas() -> tuple[Isa, ...]:
    """The implementations that run on this machine, slowest first; ``Isa.NUMPY`` is always among them."""
    return tuple(isa for isa in Isa if isa <= best_isa())


def resolve(isa: Isa | None) -> Isa:
    """The implementation to use: the given one, or the best here.

    Raises:
        RejectedError: the given one does not run on this machine.
    """
    if isa is None:
        return best_isa()
    if isa > best_isa():
        raise RejectedError(f"kernels for {isa.name}: expected one of {', '.join(i.name for i in available_isas())} here")
    return isa


def library() -> ctypes.CDLL:
    """The loaded library; callers resolved an implementation other than ``Isa.NUMPY`` before."""
    loaded = _library()
    if loaded is None:
        raise RejectedError("the compiled kernels are not installed, expected Isa.NUMPY")
    return loaded


def address(array: NDArray[Any]) -> int:
    """Where a contiguous array's first byte lies; several times quicker than ``array.ctypes.data``."""
    if array.size and array.flags.writeable:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # four times quicker again: no dict is built
    start: int = array.__array_interface__["data"][0]
    return start
