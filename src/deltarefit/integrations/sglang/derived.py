"""State that SGLang's models compute from their weights after a load and keep outside parameters and buffers.

MLA splits ``kv_b_proj`` into two copies, ``w_kc`` and ``w_vc``, plain attributes of the attention module; the model's hook
``post_load_weights`` makes them, and its ``load_weights`` calls that hook at its end. A refit writes ``kv_b_proj`` where it
lies, so the hook must run after it. Whether running it is enough is tried before the first refit, not assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltarefit.errors import RejectedError
from deltarefit.integrations.exchange.operations import named_state
from deltarefit.wording import some_of

__all__ = ["DerivedState"]

_HOOK = "post_load_weights"
_POISON = 0x5A


class DerivedState:
    """The derived state of one model, and the engine's hook that computes it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    @property
    def has_hook(self) -> bool:
        return any(True for _ in self._hooked())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Floating-point tensors that modules hold as plain attributes, views of parameters and buffers left out."""
        owned = {tensor.untyped_storage().data_ptr() for _, tensor in named_state(self._model)}
        found: dict[str, torch.Tensor] = {}
        for prefix, module in self._model.named_modules():
            for name, tensor in _attributes(module):
                is_own = tensor.numel() and tensor.untyped_storage().data_ptr() not in owned
                if is_own and tensor.is_floating_point() and tensor.device.type != "meta":
                    found[f"{prefix}.{name}" if prefix else name] = tensor
        return found

    def rerun(self) -> None:
        """Compute the derived state anew, by the engine's own hook."""
        with torch.no_grad():
            for module in self._hooked():
                module.post_load_weights()

    @contextmanager
    def hook_held(self) -> Iterator[None]:
        """While open, a load does not run the hook: what it would write follows from weights that a refit writes later."""
        held = [module for module in self._model.modules() if callable(getattr(type(module), _HOOK, None))]
        for module in held:
            vars(module)[_HOOK] = _nothing
        try:
            yield
        finally:
            for module in held:
                del vars(module)[_HOOK]

    def check(self) -> frozenset[int]:
        """Try that the hook computes all derived state from the weights alone, and nothing else. Leaves every bit as it was.

        Returns:
            Addresses of the storages that the hook reads.

        Raises:
            RejectedError: some state would keep values of old weights, or the hook does more than that.
        """
        before = self.tensors()
        bits = {name: _bytes(tensor).clone() for name, tensor in before.items()}
        owned = {name: _bytes(tensor).clone() for name, tensor in named_state(self._model)} if self.has_hook else {}
        reads = _Reads()
        try:
            for tensor in before.values():
                _fill(tensor, _POISON)
            with reads:
                self.rerun()
            problems = self._problems(before, bits, owned)
        finally:
            for name, tensor in before.items():
                _restore(tensor, bits[name])
            for name, tensor in named_state(self._model):
                if name in owned and not torch.equal(_bytes(tensor), owned[name]):
                    _restore(tensor, owned[name])
        if problems:
            lines = some_of(problems, 5, joint="\n  ")
            raise RejectedError(f"{len(problems)} tensors that this SGLang model derives from its weights:\n  {lines}")
        return frozenset(reads.storages)

    def _problems(
        self, before: dict[str, torch.Tensor], bits: dict[str, torch.Tensor], owned: dict[str, torch.Tensor]
    ) -> list[str]:
        after, problems = self.tensors(), []
        for name, tensor in before.items():
            now = after.get(name)
            if now is None or now.data_ptr() != tensor.data_ptr() or now.stride() != tensor.stride():
                problems.append(f"{name}: {_HOOK} replaces it, and captured graphs would go on reading the old one")
            elif not torch.equal(_bytes(now), bits[name]):
                problems.append(
                    f"{name}: is kept outside parameters and buffers, and {_HOOK} does not compute it anew; it might go on "
                    "holding what older weights gave"
                )
        problems += [f"{name}: appears only when {_HOOK} runs again" for name in after.keys() - before.keys()]
        problems += [
            f"{name}: {_HOOK} changes it when it runs again"
            for name, tensor in named_state(self._model)
            if name in owned and not torch.equal(_bytes(tensor), owned[name])
        ]
        return problems

    def _hooked(self) -> Iterator[Any]:
        """Outermost modules with the hook; they call those inside."""
        inside: set[int] = set()
        for module in self._model.modules():
            if id(module) not in inside and callable(getattr(type(module), _HOOK, None)):
                inside.update(id(child) for child in module.modules())
                yield module


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its dispatch modes untyped
    """Notes the storages of all tensors that operations are given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self.storages.add(value.untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))


def _attributes(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, list | tuple) and name not in {"_parameters", "_buffers", "_modules"}:
            for number, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    yield f"{name}.{number}", item


def _nothing(*args: object, **kwargs: object) -> None:
    """Stands in for the hook while a load is watched."""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The stored bytes in logical order; a copy unless the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _fill(tensor: torch.Tensor, pattern: int) -> None:
    _restore(tensor, torch.full_like(_bytes(tensor), pattern))


def _restore(tensor: torch.Tensor, stored: torch.Tensor) -> None:
    """Put bytes back in place, whatever the tensor's strides."""
    with torch.no_grad():
        tensor.detach().copy_(stored.view(tensor.dtype).reshape(tensor.shape))
