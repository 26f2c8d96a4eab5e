"""Keeps an optimizer from stepping while its parameters are being published, and counts what was written to them."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deltarefit.errors import RejectedError
from deltarefit.integrations.torch.local import is_sharded, own_tensors

__all__ = ["WriteGuard", "write_guard"]


class WriteGuard:
    """Of one model's parameters and persistent buffers, which is what is published. Safe from any thread."""

    def __init__(self, model: Any) -> None:
        """``model``: a torch module, or a list of them."""
        self._modules = model if isinstance(model, list) else [model]
        self._shards: dict[tuple[int, str, str], torch.Tensor] = {}
        self._lock = threading.Lock()
        self._why = ""
        self._hook: Any = None

    def refuse(self, why: str) -> None:
        """Until ``allow``, a step of any torch optimizer over one of the parameters raises RejectedError and does nothing."""
        self._tensors()  # notes the shards, as long as none is gathered
        with self._lock:
            self._why = why
            if self._hook is None:
                self._hook = register_optimizer_step_pre_hook(self._before_step)

    def allow(self) -> None:
        """Steps go on as usual. May be called again."""
        with self._lock:
            hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def count_writes(self) -> object:
        """Where each tensor lies, and how often it was written in place, as torch counts; writes through ``.data`` are not
        among them. Unlike any earlier answer if there are tensors whose writes torch does not count."""
        parts = [getattr(tensor, "_local_tensor", tensor) for tensor in self._tensors()]
        if any(part.is_inference() for part in parts):
            return object()
        return tuple((part.data_ptr(), int(part._version)) for part in parts)

    def _tensors(self) -> list[torch.Tensor]:
        """Those that the model has now, as trainers rebind them; shards also while their module has them gathered."""
        found = []
        for number, module in enumerate(self._modules):
            for path, part in module.named_modules():
                for name, tensor in own_tensors(part):
                    key = number, path, name
                    if is_sharded(tensor):
                        self._shards[key] = tensor
                    found.append(self._shards.get(key, tensor))
        return found

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        mine = {id(tensor) for tensor in self._tensors()}
        if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            raise RejectedError(f"optimizer step refused: {self._why}")


def write_guard(model: Any) -> WriteGuard:
    """A guard of a torch model."""
    return WriteGuard(model)
