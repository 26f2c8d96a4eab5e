"""Keeps an optimizer from stepping while its parameters are being published, and counts what was written to them."""

from __future__ import annotations

import threading
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from deltarefit.errors import RejectedError

__all__ = ["WriteGuard", "write_guard"]


class WriteGuard:
    """Of one model's parameters and buffers. Safe from any thread."""

    def __init__(self, model: Any) -> None:
        """``model``: a torch module, or a list of them."""
        modules = model if isinstance(model, list) else [model]
        self._tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        self._names = {id(tensor) for tensor in self._tensors}
        self._lock = threading.Lock()
        self._why = ""
        self._hook: Any = None

    def refuse(self, why: str) -> None:
        """Until ``allow``, a step of any torch optimizer over one of the parameters raises RejectedError and does nothing."""
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

    def count_writes(self) -> tuple[int, ...]:
        """How often each tensor was written in place, as torch counts; writes through ``.data`` are not among them."""
        return tuple(int(getattr(tensor, "_local_tensor", tensor)._version) for tensor in self._tensors)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if any(id(parameter) in self._names for group in optimizer.param_groups for parameter in group["params"]):
            raise RejectedError(f"optimizer step refused: {self._why}")


def write_guard(model: Any) -> WriteGuard:
    """A guard of a torch model."""
    return WriteGuard(model)
