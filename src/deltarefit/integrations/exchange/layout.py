"""What an engine's post-load step did to weights after its loader wrote them, found by comparing before and after.

Placement is learnt by watching the loader write. That is right only for storage whose layout the post-load step left alone:
packed, swapped, padded or emptied weights have the same names, and sometimes the same shapes, but other homes for each
element. They are found here by comparing every parameter and buffer before and after that step, bit for bit and in place.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from deltarefit.integrations.exchange.operations import named_state
from deltarefit.placement.reach import reach

__all__ = ["PostLoadWatch", "changed_after_load", "fingerprint"]

_ODD = -0x61C8864680B583EB  # 2^64 / golden ratio, made odd, as a signed number: spreads positions over all 64 bits
_BLOCK = 2**22
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RECORDS: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()


def fingerprint(tensor: torch.Tensor) -> int:
    """A sum over elements of (position, bits), in which no permutation of elements goes unseen for practical purposes."""
    if tensor.is_meta:
        return 0
    plain = tensor.detach().contiguous().reshape(-1)
    words = plain.view(_INTEGERS.get(plain.element_size(), torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _BLOCK):
        block = words[start : start + _BLOCK].to(torch.int64)
        position = torch.arange(start + 1, start + 1 + block.numel(), dtype=torch.int64, device=words.device)
        total += ((block + 1) * ((position * _ODD) | 1)).sum()
    return int(total)


_Look = tuple[tuple[int, ...], torch.dtype, int]


class PostLoadWatch:
    """Remembers a model as its loader left it; ``finish`` records what changed since."""

    def __init__(self, model: Any, *, everywhere: bool = False) -> None:
        """``everywhere``: also in plain attributes, helper objects and closures, where engines keep packed copies."""
        self._model = model
        self._everywhere = everywhere
        self._state = {name for name, _ in named_state(model)}
        tensors, self._opaque = self._held()
        self._looks = {name: _look(tensor) for name, tensor in tensors.items()}
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}

    def finish(self) -> None:
        """Record what the post-load step changed, for ``changed_after_load``."""
        tensors, opaque = self._held()
        changes: list[str] = []
        for name, before in self._looks.items():
            after = _look(tensors[name]) if name in tensors else None
            if after != before and (after is not None or name in self._state):
                changes.append(_change(name, before, after))
        changes += [
            f"{name}: was derived from other weights after loading; it would keep its old values"
            for name, tensor in tensors.items()
            if name not in self._looks and tensor.numel() and tensor.untyped_storage().data_ptr() not in self._storages
        ]
        changes += [
            f"{name}: a {kind} was made after loading; it may hold weights"
            for name, kind in opaque.items()
            if name not in self._opaque
        ]
        _RECORDS[self._model] = tuple(changes)

    def _held(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Every tensor by path, and what cannot be looked into."""
        if not self._everywhere:
            return dict(named_state(self._model)), {}
        reached = reach({"": self._model})
        return reached.tensors, reached.opaque


def _look(tensor: torch.Tensor) -> _Look:
    return tuple(tensor.shape), tensor.dtype, fingerprint(tensor)


def _change(name: str, before: _Look, after: _Look | None) -> str:
    if after is None:
        return f"{name}: was removed after loading; its values live on in a packed copy"
    if not torch.Size(after[0]).numel():
        return f"{name}: was emptied after loading; its values live on in a packed copy"
    if after[:2] != before[:2]:
        return f"{name}: was {before[1]}{list(before[0])} when loaded, is {after[1]}{list(after[0])} now"
    return f"{name}: its bits were rearranged or recomputed after loading (packed, swapped or requantised)"


def changed_after_load(model: Any) -> tuple[str, ...] | None:
    """What the post-load step changed, a line each; None if nobody watched the model being loaded."""
    return _RECORDS.get(model)
