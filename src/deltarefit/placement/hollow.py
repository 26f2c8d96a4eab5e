"""Memory of tensors given back while nobody needs what they hold."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["HollowTensors"]


class HollowTensors:
    """Storages that were freed, and the tensors in them: these keep their shapes, but writing to them is an error."""

    def __init__(self, tensors: Iterable[torch.Tensor], storages: Iterable[torch.UntypedStorage]) -> None:
        """Free storages, all tensors over which are among ``tensors``. Those that torch cannot resize stay as they are."""
        self._freed = [(raw, raw.nbytes()) for raw in storages if raw.nbytes() and raw.resizable()]
        freed = {id(raw) for raw, _ in self._freed}
        inside = {id(tensor): tensor for tensor in tensors if id(tensor.untyped_storage()) in freed}
        self._tensors = [(tensor, tensor.detach()) for tensor in inside.values()]
        for tensor, data in self._tensors:
            no_stride = (0,) * data.dim()
            tensor.data = torch.empty_strided(data.shape, no_stride, dtype=data.dtype, device=data.device)
        for raw, _ in self._freed:
            raw.resize_(0)

    def refill(self) -> None:
        """Give all of them memory again, with undefined content."""
        for raw, nbytes in self._freed:
            raw.resize_(nbytes)
        for tensor, data in self._tensors:
            tensor.data = data
