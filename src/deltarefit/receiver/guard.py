"""Did anything of the model move or change behind the hook's back? (paper A.2)"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deltarefit import kernels
from deltarefit.bits import dtype_name
from deltarefit.canonical import TensorDigest
from deltarefit.pieces import Piece, StridedView
from deltarefit.placement.storages import ModelStorage, StorageMap, state_tensors

__all__ = ["DerivedTensors", "ModelGuard", "Place", "StorageFence", "layout_fingerprint", "layout_of", "storage_digest"]

_CHUNK_NBYTES = 64 * 2**20

Place = tuple[int, int, tuple[int, ...], tuple[int, ...], str]


def layout_of(model: torch.nn.Module) -> dict[str, Place]:
    """Where every parameter and buffer lies: storage address, offset, shape, stride, dtype."""
    return {
        name: (
            tensor.untyped_storage().data_ptr(),
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            dtype_name(tensor.dtype),
        )
        for name, tensor in state_tensors(model).items()
    }


def storage_digest(storage: ModelStorage, *, copied: bool = False) -> TensorDigest:
    """A digest of all bytes of a storage, read in chunks through the host.

    ``copied``: never share memory with numpy, for torch frees no storage early that once did.
    """
    width = 8 if storage.nbytes % 8 == 0 else 1
    words = storage.words(width)
    total = TensorDigest()
    step = _CHUNK_NBYTES // width
    for start in range(0, words.numel(), step):
        part = words[start : start + step].to("cpu", copy=copied).numpy().view(np.dtype(f"<u{width}"))
        view = StridedView(start, (part.size,), (1,))
        total += kernels.digest(part, [Piece(view, StridedView(0, (part.size,), (1,)))])
    return total


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """Where a module keeps a parameter or buffer."""

    table: dict[str, Any]
    leaf: str
    held: torch.Tensor
    data: torch.Tensor


class StorageFence:
    """Tells cheaply, for every payload, whether parameters and buffers still lie where prewarm found them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._slots = [(slot.table, slot.leaf, slot.data.data_ptr()) for slot in _slots(model)]

    def first_moved(self) -> str | None:
        """The last part of the name of a tensor that was moved, replaced or removed; None if none was."""
        for table, leaf, address in self._slots:
            held = table.get(leaf)
            if held is None or held.data_ptr() != address:
                return leaf
        return None


class DerivedTensors:
    """Tensors that hang on modules beside their parameters and buffers: do they still lie where prewarm found them?"""

    def __init__(self, find: Callable[[], Mapping[str, torch.Tensor]], tensors: Mapping[str, torch.Tensor]) -> None:
        """``find``: looks them up now, by path. ``tensors``: as they are now; others are not watched."""
        self._find = find
        self._places = {path: _view_of(tensor) for path, tensor in tensors.items()}

    def moved(self) -> list[str]:
        """Paths of tensors that were moved, replaced or removed."""
        if not self._places:
            return []
        now = self._find()
        return sorted(path for path, place in self._places.items() if path not in now or _view_of(now[path]) != place)


def _view_of(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape)


class ModelGuard:
    """Remembers a model's layout and bytes, tells what differs, and puts back what it can."""

    def __init__(self, model: torch.nn.Module, storages: StorageMap, *, snapshot_nbytes: int) -> None:
        self._model = model
        self._storages = storages
        self._layout = layout_of(model)
        self._slots = list(_slots(model))
        self._digests = {storage.key: storage_digest(storage, copied=True) for storage in storages.storages}
        self._copies: dict[str, torch.Tensor] | None = None
        if storages.nbytes <= snapshot_nbytes:
            self._copies = {storage.key: storage.words(1).clone() for storage in storages.storages}

    @property
    def can_restore(self) -> bool:
        """Whether changed bytes can be put back."""
        return self._copies is not None

    def moved(self) -> list[str]:
        """Names whose tensor is not where it was, or is gone, or is new."""
        now = layout_of(self._model)
        return sorted(name for name in {*now, *self._layout} if now.get(name) != self._layout.get(name))

    def changed(self) -> list[ModelStorage]:
        """Storages whose bytes differ."""
        return [s for s in self._storages.storages if storage_digest(s, copied=True) != self._digests[s.key]]

    def restore(self) -> None:
        """Put tensors back in their places, and bytes too where they were copied."""
        for slot in self._slots:
            if (
                slot.held.untyped_storage().data_ptr() != slot.data.untyped_storage().data_ptr()
                or slot.held.shape != slot.data.shape
            ):
                slot.held.data = slot.data
            slot.table[slot.leaf] = slot.held
        if self._copies is not None:
            for storage in self._storages.storages:
                storage.words(1).copy_(self._copies[storage.key])


def _slots(model: torch.nn.Module) -> list[_Slot]:
    found: list[_Slot] = []
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            entries: dict[str, Any] = table
            found.extend(_Slot(entries, leaf, held, held.detach()) for leaf, held in entries.items() if held is not None)
    return found


def layout_fingerprint(layout: dict[str, Place], *parts: str) -> str:
    """32 hex digits over a layout and whatever else decides placement. Addresses count: moved storage needs a new prewarm."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(layout):
        digest.update(f"{name}\0{layout[name]}\n".encode())
    for part in parts:
        digest.update(f"{part}\0".encode())
    return digest.hexdigest()
