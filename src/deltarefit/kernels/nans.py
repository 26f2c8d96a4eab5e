"""Which stored bits of a dtype are NaN: one comparison of unsigned integers for every format."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["NAN_RULES", "NanRule"]

NanRule = tuple[int, int, int]
"""(add, mask, limit): an element of bits x is NaN if ``(x + add) & mask`` exceeds ``limit``, in the element's width."""

NAN_RULES: Mapping[str, NanRule] = {
    "BF16": (0, 0x7FFF, 0x7F80),
    "F16": (0, 0x7FFF, 0x7C00),
    "F32": (0, 0x7FFF_FFFF, 0x7F80_0000),
    "F64": (0, 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "F8_E5M2": (0, 0x7F, 0x7C),
    "F8_E4M3": (0, 0x7F, 0x7E),  # no infinity: 0x7F and 0xFF
    "F8_E8M0": (0, 0xFF, 0xFE),  # unsigned powers of two: 0xFF alone
    "F8_E4M3FNUZ": (0x7F, 0xFF, 0xFE),  # 0x80 alone, where others have -0
    "F8_E5M2FNUZ": (0x7F, 0xFF, 0xFE),
}
"""By the dtype's name in safetensors files; integers have no NaN, and complex elements are not looked into."""
