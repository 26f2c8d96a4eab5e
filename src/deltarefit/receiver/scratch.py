"""Applying an item through the engine's loader: the paper's path (6.1), for tensors that fit no piece, and the plain twin."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from deltarefit.canonical import TensorSpec, Words
from deltarefit.errors import LoaderContractError, RejectedError
from deltarefit.placement.inputs import Inputs, LoadWeights
from deltarefit.placement.shadow import Shadow
from deltarefit.placement.storages import StorageMap
from deltarefit.receiver.interceptor import (
    BitsPlaceholder,
    CopyInterceptor,
    CopyPolicy,
    DenseCopy,
    MaskCopy,
    NanPlaceholder,
    OverwriteCopy,
    WriteKey,
)
from deltarefit.records import Encoding

__all__ = ["LoaderPath", "ScratchBuffer", "nan_words"]

_QUIET_NAN = {
    "F16": 0x7E00, "BF16": 0x7FC0, "F32": 0x7FC00000, "F64": 0x7FF8000000000000, "F8_E4M3": 0x7F, "F8_E5M2": 0x7E,
    "F8_E4M3FNUZ": 0x80, "F8_E5M2FNUZ": 0x80, "F8_E8M0": 0xFF,
}  # fmt: skip
_NAN_RULE = {
    "F16": (0x7FFF, 0x7C00), "BF16": (0x7FFF, 0x7F80), "F32": (0x7FFFFFFF, 0x7F800000), "F8_E5M2": (0x7F, 0x7C),
    "F64": (0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000), "F8_E4M3": (0x7F, 0x7E), "F8_E8M0": (0xFF, 0xFE),
}  # fmt: skip
"""Mask and the largest masked pattern that is no NaN."""
_ONE = {
    "F16": 0x3C00, "BF16": 0x3F80, "F32": 0x3F800000, "F64": 0x3FF0000000000000, "F8_E4M3": 0x38, "F8_E5M2": 0x3C,
    "F8_E4M3FNUZ": 0x40, "F8_E5M2FNUZ": 0x40, "F8_E8M0": 0x7F,
}  # fmt: skip


def nan_words(spec: TensorSpec, words: Words) -> NDArray[np.bool_]:
    """Which stored bits spell NaN."""
    if spec.dtype in ("F8_E4M3FNUZ", "F8_E5M2FNUZ"):
        return np.asarray(words == 0x80)
    if spec.dtype not in _NAN_RULE:
        return np.zeros(words.shape, dtype=bool)
    mask, limit = _NAN_RULE[spec.dtype]
    return np.asarray((words & words.dtype.type(mask)) > limit)


class ScratchBuffer:
    """Reusable host memory for one canonical tensor at a time. Its address never changes."""

    def __init__(self, nbytes: int) -> None:
        self._memory = np.zeros(nbytes + 8, dtype=np.uint8)
        self.nbytes = nbytes

    def fill(self, spec: TensorSpec, placeholder: int, positions: NDArray[np.int64], values: Words) -> Words:
        """The tensor's words with ``values`` at ``positions`` and the placeholder everywhere else; nothing older survives."""
        if spec.nbytes > self.nbytes:
            raise RejectedError(f"tensor {spec} needs {spec.nbytes} bytes of scratch, prewarm reserved {self.nbytes}")
        words: Words = self._memory[: spec.nbytes].view(spec.word_dtype)
        words[:] = placeholder
        words[positions] = values
        return words


class LoaderPath:
    """Applies items by calling the engine's loader with a scratch tensor under the hook."""

    def __init__(
        self,
        load_weights: LoadWeights,
        storages: StorageMap,
        scratch: ScratchBuffer,
        *,
        known_fills: frozenset[WriteKey] = frozenset(),
        expected: Mapping[str, frozenset[WriteKey]] | None = None,
        verify: bool = False,
        shadow: Shadow | None = None,
    ) -> None:
        """``expected``: what each tensor may write, as prewarm saw it; None allows everything, for trials on a shadow."""
        self._load_weights = load_weights
        self._storages = storages
        self._scratch = scratch
        self._known_fills = known_fills
        self._expected = expected
        self._verify = verify
        self._shadow = shadow

    def masks(self, spec: TensorSpec, positions: NDArray[np.int64], values: Words, encoding: Encoding) -> int:
        """Apply differences or xor masks; returns the elements changed."""
        return self._load(spec, 0, positions, values, MaskCopy(spec, encoding, verify=self._verify))

    def bits(self, spec: TensorSpec, positions: NDArray[np.int64], values: Words) -> int:
        """Overwrite through a path that keeps stored bits: any pattern that no value has is the placeholder."""
        pattern = _unused_pattern(spec, values)
        if pattern is None:
            half = values.size // 2
            return self.bits(spec, positions[:half], values[:half]) + self.bits(spec, positions[half:], values[half:])
        return self._load(
            spec, pattern, positions, values, OverwriteCopy(spec, BitsPlaceholder(spec, pattern), verify=self._verify)
        )

    def values(self, spec: TensorSpec, positions: NDArray[np.int64], values: Words) -> int:
        """Overwrite through a path that computes: NaN marks the rest, and values that are NaN follow in a load of their own."""
        nan = nan_words(spec, values)
        written = 0
        if not nan.all():
            written += self.nan_scheme(spec, positions[~nan], values[~nan])
        if nan.any():
            policy = OverwriteCopy(spec, NanPlaceholder(inverted=True), verify=self._verify)
            written += self._load(spec, _ONE[spec.dtype], positions[nan], values[nan], policy)
        return written

    def nan_scheme(self, spec: TensorSpec, positions: NDArray[np.int64], values: Words) -> int:
        """The paper's overwrite path: NaN placeholders.

        Raises:
            LoaderContractError: a value is NaN, or the dtype has none; nothing was written.
        """
        if spec.dtype not in _QUIET_NAN:
            raise LoaderContractError(f"tensor {spec}: overwrites through a computing loader need a floating-point dtype")
        nan = np.flatnonzero(nan_words(spec, values))
        if nan.size:
            raise LoaderContractError(
                f"tensor {spec}: the value for flat index {int(positions[nan[0]])} is NaN and looks like the placeholder"
            )
        policy = OverwriteCopy(spec, NanPlaceholder(), verify=self._verify)
        return self._load(spec, _QUIET_NAN[spec.dtype], positions, values, policy)

    def dense(self, spec: TensorSpec, words: Words) -> int:
        """Load every element of a tensor; ``words`` has its number of elements. A fresh copy: the loader may keep it."""
        return self._run(spec, words.copy(), DenseCopy())

    def _load(self, spec: TensorSpec, placeholder: int, positions: NDArray[np.int64], values: Words, policy: CopyPolicy) -> int:
        return self._run(spec, self._scratch.fill(spec, placeholder, positions, values), policy)

    def _run(self, spec: TensorSpec, words: Words, policy: CopyPolicy) -> int:
        inputs = Inputs([spec], lambda _: words)
        interceptor = CopyInterceptor(
            self._storages,
            inputs,
            policy,
            known_fills=self._known_fills,
            expected=None if self._expected is None else self._expected.get(spec.name, frozenset()),
            shadow=self._shadow,
        )
        try:
            with torch.no_grad(), interceptor:
                self._load_weights(iter(inputs))
        except LoaderContractError:
            raise
        except Exception as error:  # the engine's code
            raise LoaderContractError(f"tensor {spec}: the loader failed: {type(error).__name__}: {error}") from error
        if interceptor.violation is not None:
            raise interceptor.violation
        if not any(write.view.num_elements for write in interceptor.writes):
            raise LoaderContractError(f"tensor {spec}: the loader wrote nothing, although it did at prewarm")
        return policy.written


def _unused_pattern(spec: TensorSpec, values: Words) -> int | None:
    """A bit pattern that no value has, NaN by preference; None if all are taken."""
    preferred = _QUIET_NAN.get(spec.dtype, 0)
    if not bool((values == preferred).any()):
        return preferred
    limit = 2 if spec.dtype == "BOOL" else 1 << 8 * spec.element_nbytes
    taken = set(np.unique(values).tolist())
    return next((pattern for pattern in range(min(limit, values.size + 1)) if pattern not in taken), None)
