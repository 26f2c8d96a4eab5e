"""Copies of parts of model storage on which a loader can be run for trial, without a byte of the model changing."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import torch

from deltarefit.bits import DTYPES, logical_words
from deltarefit.canonical import Words
from deltarefit.pieces import StridedView
from deltarefit.placement.storages import ModelStorage, StorageMap

__all__ = ["Shadow", "byte_bounds"]

_ALIGNMENT = 16


def byte_bounds(view: StridedView, width: int) -> tuple[int, int]:
    """First byte and the byte after the last of a view of elements of ``width`` bytes."""
    return view.first * width, (view.last + 1) * width


class Shadow:
    """Shadows of byte ranges of storages; tensors that lie inside one are redirected to it."""

    def __init__(self, storages: StorageMap, ranges: Iterable[tuple[ModelStorage, int, int]]) -> None:
        self._storages = storages
        self._parts: dict[str, tuple[list[int], list[tuple[int, torch.Tensor]]]] = {}
        by_key: dict[str, tuple[ModelStorage, list[tuple[int, int]]]] = {}
        self._origins: dict[int, tuple[ModelStorage, int]] = {}
        for storage, low, high in ranges:
            span = low // _ALIGNMENT * _ALIGNMENT, min(storage.nbytes, -(-high // _ALIGNMENT) * _ALIGNMENT)
            by_key.setdefault(storage.key, (storage, []))[1].append(span)
        for key, (storage, spans) in by_key.items():
            merged = _merge(spans)
            live = storage.words(1)
            copies = [(high, live[low:high].clone()) for low, high in merged]
            self._parts[key] = ([low for low, _ in merged], copies)
            for (low, _), (_, copy) in zip(merged, copies, strict=True):
                self._origins[copy.untyped_storage().data_ptr()] = (storage, low)

    @property
    def nbytes(self) -> int:
        return sum(part.numel() for _, parts in self._parts.values() for _, part in parts)

    def view(self, storage: ModelStorage, view: StridedView, dtype: torch.dtype) -> torch.Tensor | None:
        """The shadow of a view of elements of ``dtype``; None if it does not lie inside one shadow."""
        width = dtype.itemsize
        low, high = byte_bounds(view, width)
        starts, parts = self._parts.get(storage.key, ([], []))
        place = bisect.bisect_right(starts, low) - 1
        if place < 0 or high > parts[place][0]:
            return None
        raw = parts[place][1].untyped_storage()
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        offset = view.offset - starts[place] // width
        return empty.set_(raw, offset, view.shape, view.stride)

    def redirect(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shadow of a tensor that lies in shadowed model memory; any other tensor itself."""
        found = self._storages.find(tensor)
        if found is None or not tensor.numel():
            return tensor
        storage, start = found
        width = tensor.element_size()
        if start % width:
            return tensor
        view = StridedView(int(tensor.storage_offset()) + start // width, tuple(tensor.shape), tuple(tensor.stride()))
        return tensor if (shadow := self.view(storage, view, tensor.dtype)) is None else shadow

    def origin(self, tensor: torch.Tensor) -> tuple[ModelStorage, int] | None:
        """The model storage that a shadow stands for, and the byte in it where the shadow begins; None for other tensors."""
        return self._origins.get(tensor.untyped_storage().data_ptr())

    def read(self, storage: ModelStorage, view: StridedView, dtype: str) -> Words:
        """The stored bits of a shadowed view in row-major order of its shape, copied."""
        shadow = self.view(storage, view, DTYPES[dtype])
        if shadow is None:
            raise LookupError(f"no shadow of {view} in {storage.key}")
        return logical_words(shadow).copy()

    def snapshot(self) -> dict[str, list[bytes]]:
        """All shadowed bytes."""
        return {key: [part.cpu().numpy().tobytes() for _, part in parts] for key, (_, parts) in self._parts.items()}


def _merge(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged
