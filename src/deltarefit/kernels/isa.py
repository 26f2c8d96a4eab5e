"""Instruction sets that a kernel can run on."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Isa"]


class Isa(IntEnum):
    """Which implementation of a kernel runs. All of them give the same bits; they differ in speed only."""

    NUMPY = 0
    """The plain twin in chunked numpy: the oracle of the tests and the fallback when nothing was compiled."""
    PORTABLE = 1
    """Compiled C++ without intrinsics; runs on every 64-bit little-endian machine."""
    AVX2 = 2
    """Compiled for AVX2 and BMI2."""
    AVX512 = 3
    """Compiled for AVX-512 F, BW, DQ, VL and VBMI2 (Ice Lake, Zen 4 and later)."""
