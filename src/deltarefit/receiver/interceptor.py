"""What becomes of a loader's final copies while an item is applied through it (paper 6.1, A.2).

Each policy is one column of the paper's Table A.2. They run under the hook of ``placement``, on live storage or on a shadow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from deltarefit.bits import DTYPES
from deltarefit.canonical import DTYPE_NBYTES, TensorSpec
from deltarefit.errors import LoaderContractError
from deltarefit.placement.inputs import Inputs
from deltarefit.placement.overlap import Claim, colliding
from deltarefit.placement.shadow import Shadow
from deltarefit.placement.storages import StorageMap
from deltarefit.placement.watch import LoadWatch, Write, WriteKind
from deltarefit.records import Encoding

__all__ = [
    "BitsPlaceholder",
    "CopyInterceptor",
    "DenseCopy",
    "MaskCopy",
    "NanPlaceholder",
    "OverwriteCopy",
    "WriteKey",
    "bit_view",
]

WriteKey = tuple[str, Any, str]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAN_BITS = {"F8_E4M3": (0x7F, 0x7F), "F8_E4M3FNUZ": (0xFF, 0x80), "F8_E5M2FNUZ": (0xFF, 0x80), "F8_E8M0": (0xFF, 0xFF)}
"""Mask and pattern of NaN in dtypes that have no infinity."""


def bit_view(tensor: torch.Tensor) -> torch.Tensor:
    """The stored bits of a tensor as integers of its width; shares memory."""
    return tensor.view(_INTEGERS[tensor.element_size()])


class CopyPolicy(Protocol):
    """Decides what a final copy does. One object per item."""

    written: int

    def copy(self, target: torch.Tensor, source: torch.Tensor, write: Write) -> None:
        """Make the copy of ``source`` into ``target``, which is expanded to its shape, or refuse it."""


class CopyInterceptor(LoadWatch):  # type: ignore[no-untyped-call]  # torch leaves its dispatch modes untyped
    """Runs a policy at every final copy. Constants that prewarm saw are left alone: they are there already."""

    def __init__(
        self,
        storages: StorageMap,
        inputs: Inputs,
        policy: CopyPolicy,
        *,
        known_fills: frozenset[WriteKey] = frozenset(),
        expected: frozenset[WriteKey] | None = None,
        shadow: Shadow | None = None,
    ) -> None:
        super().__init__(storages, inputs, shadow)
        self._policy = policy
        self._known_fills = known_fills
        self._expected = expected
        self.violation: LoaderContractError | None = None
        """Kept here too: a loader may swallow what is raised inside it."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, operation: str) -> None:
        write = self.describe(WriteKind.COPY, operation, target, source)
        self.writes.append(write)
        if write.view.num_elements:
            self._apply(write, source if self._shadow is None else self._shadow.redirect(source))

    def fill(self, target: torch.Tensor, value: Any, operation: str) -> None:
        write = self.describe(WriteKind.FILL, operation, target, None)
        self.writes.append(write)
        if write.view.num_elements and write.key not in self._known_fills:
            self._apply(write, torch.full((), value, dtype=target.dtype, device=target.device))

    def _apply(self, write: Write, value: torch.Tensor) -> None:
        place = self._live(write) if self._shadow is None else self._shadowed(write)
        if place is None or (self._expected is not None and write.key not in self._expected):
            raise self._refused(f"{write.operation} writes {write.storage.key} where prewarm saw no write")
        try:
            self._policy.copy(place, value.expand(place.shape), write)
        except LoaderContractError as error:
            self.violation = error
            raise

    def update(self, write: Write, make: Callable[[], object]) -> None:
        is_known = self._expected is None or write.key in self._expected
        if self._shadow is not None and self._shadowed(write) is None:
            is_known = False
        if not is_known:
            raise self._refused(f"{write.operation} writes {write.storage.key}; prewarm did not see it")
        if not isinstance(self._policy, DenseCopy):
            self.violation = LoaderContractError(
                f"{write.operation} computes in place in {write.storage.key}, with elements that have no entry too"
            )
            raise self.violation
        make()

    def other(self, write: Write) -> None:
        raise self._refused(f"{write.operation} writes {write.storage.key}; prewarm did not see it")

    def _live(self, write: Write) -> torch.Tensor:
        empty = torch.empty(0, dtype=DTYPES[write.dtype], device=write.storage.device)
        return empty.set_(write.storage.raw, write.view.offset, write.view.shape, write.view.stride)

    def _refused(self, what: str) -> LoaderContractError:
        name = self._inputs.current
        self.violation = LoaderContractError(f"tensor {name}: {what}; run prewarm again, then repair with overwrites")
        return self.violation


class DenseCopy:
    """Every element is active: the loader's own copy."""

    def __init__(self) -> None:
        self.written = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, write: Write) -> None:
        target.copy_(source)
        self.written += target.numel()


class MaskCopy:
    """Combines a difference or xor mask with the resident bits (paper 6.1). 0 is the placeholder and changes nothing."""

    def __init__(self, spec: TensorSpec, encoding: Encoding, *, verify: bool = False) -> None:
        self._spec = spec
        self._encoding = encoding
        self._verify = verify
        self._claims: list[Claim] = []
        self.written = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, write: Write) -> None:
        mask = self._mask(source, write)
        self._claims.append(Claim("item", write.storage.key, write.view, DTYPE_NBYTES[write.dtype]))
        if len(self._claims) > 1 and colliding(self._claims):
            raise LoaderContractError(
                f"tensor {self._spec.name}: the loader writes {write.storage.key} twice within one {self._encoding.name} item"
            )
        resident = bit_view(target)
        before = resident.clone() if self._verify else None
        updated = resident ^ mask if self._encoding is Encoding.XOR else resident + mask
        resident.copy_(updated)
        self.written += int(torch.count_nonzero(mask))
        if before is not None:
            restored = resident ^ mask if self._encoding is Encoding.XOR else resident - mask
            _require_equal(self._spec, restored, before, write)

    def _mask(self, source: torch.Tensor, write: Write) -> torch.Tensor:
        if write.source is None or write.source.name != self._spec.name:
            raise LoaderContractError(
                f"tensor {self._spec.name}: the loader copies into {write.storage.key} from a temporary; a "
                f"{self._encoding.name} mask must come straight from the scratch tensor"
            )
        if write.source.dtype != self._spec.dtype:
            raise LoaderContractError(f"tensor {self._spec.name}: the loader reads its mask as {write.source.dtype}")
        bits = bit_view(source.contiguous())
        if write.dtype == self._spec.dtype:
            return bits
        if (self._spec.dtype, write.dtype) == ("BF16", "F32"):
            return bits.to(torch.int32) << 16
        raise LoaderContractError(
            f"tensor {self._spec.name}: {self._encoding.name} needs equal dtypes, the loader copies {self._spec.dtype} "
            f"into {write.storage.key}, which is {write.dtype}"
        )


class Placeholder(Protocol):
    """Tells active elements from those without an entry, in the source of a copy."""

    def active(self, source: torch.Tensor) -> torch.Tensor:
        """A bool tensor of the source's shape."""


class NanPlaceholder:
    """NaN marks elements without an entry, or, inverted, the elements with one (paper A.2)."""

    def __init__(self, *, inverted: bool = False) -> None:
        self._inverted = inverted

    def active(self, source: torch.Tensor) -> torch.Tensor:
        return is_nan(source) == self._inverted


class BitsPlaceholder:
    """One bit pattern marks elements without an entry; for paths that keep stored bits."""

    def __init__(self, spec: TensorSpec, pattern: int) -> None:
        self._spec = spec
        self._pattern = pattern

    def active(self, source: torch.Tensor) -> torch.Tensor:
        width = source.element_size()
        shift = 16 if (width, self._spec.dtype) == (4, "BF16") else 0
        if width != self._spec.element_nbytes and not shift:
            raise LoaderContractError(f"tensor {self._spec.name}: the loader changes the width of its elements")
        pattern = self._pattern << shift
        signed = pattern - (1 << 8 * width) if pattern >> (8 * width - 1) else pattern
        return bit_view(source.contiguous()) != signed


class OverwriteCopy:
    """Writes active elements only. A view's first copy says which are active; later writes to it reuse that (paper A.2)."""

    def __init__(self, spec: TensorSpec, placeholder: Placeholder, *, verify: bool = False) -> None:
        self._spec = spec
        self._placeholder = placeholder
        self._verify = verify
        self._active: dict[WriteKey, torch.Tensor] = {}
        self.written = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, write: Write) -> None:
        active = self._active.get(write.key)
        if active is None:
            active = self._active[write.key] = self._placeholder.active(source).clone()
            self.written += int(torch.count_nonzero(active))
        value = bit_view(source.to(device=target.device, dtype=target.dtype).contiguous())
        resident = bit_view(target)
        resident.copy_(torch.where(active.to(target.device), value, resident))
        if self._verify:
            _require_equal(self._spec, resident[active], value[active], write)


def is_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Where a floating-point tensor of any width is NaN, by its bits."""
    for dtype, (mask, pattern) in _NAN_BITS.items():
        if tensor.dtype == DTYPES.get(dtype):
            return (tensor.view(torch.uint8) & mask) == pattern
    return torch.isnan(tensor.float() if tensor.element_size() == 1 else tensor)


def _require_equal(spec: TensorSpec, got: torch.Tensor, want: torch.Tensor, write: Write) -> None:
    wrong = torch.nonzero((got != want).reshape(-1))
    if wrong.numel():
        raise LoaderContractError(
            f"tensor {spec.name}: post-apply check fails at element {int(wrong[0])} of the view written in {write.storage.key} "
            f"({wrong.numel()} elements differ)"
        )
