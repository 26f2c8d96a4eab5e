"""State that SGLang's models compute from their weights after a load and keep outside parameters and buffers.

MLA splits ``kv_b_proj`` into two copies, ``w_kc`` and ``w_vc``, plain attributes of the attention module; the model's hook
``post_load_weights`` makes them, and its ``load_weights`` calls that hook at its end. A refit writes ``kv_b_proj`` where it
lies, so the hook must run after it. Whether running it is enough is tried before the first refit, not assumed: once as it is,
once over poison.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltarefit.errors import RejectedError
from deltarefit.integrations.exchange.layout import fingerprint
from deltarefit.placement.storages import StorageMap, state_tensors
from deltarefit.receiver.guard import ModelGuard
from deltarefit.wording import some_of

__all__ = ["DerivedState", "note_constants"]

_HOOK = "post_load_weights"
_POISON = 0x5A
_SHOWN = 5
_CONSTANTS: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, _Look]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Look:
    """A tensor as it is now: written to since then, it looks different."""

    address: int
    num_writes: int
    """As torch counts them; writes through ``data`` are not counted."""
    bits: int


def note_constants(model: torch.nn.Module) -> None:
    """Remember what hangs on a model beside its parameters and buffers before any weight is loaded: what still looks like
    that after the load was not derived from weights."""
    _CONSTANTS.pop(model, None)  # what is noted already would not be found again
    _CONSTANTS[model] = {name: _look(tensor) for name, tensor in DerivedState(model).tensors().items()}


class DerivedState:
    """The derived state of one model, and the engine's hook that computes it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    @property
    def has_hook(self) -> bool:
        return any(True for _ in self._hooked())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors that modules hold as plain attributes, views of parameters and buffers left out, and constants too."""
        owned = {_address(tensor) for tensor in state_tensors(self._model).values()}
        constants = _CONSTANTS.get(self._model, {})
        found: dict[str, torch.Tensor] = {}
        for prefix, module in self._model.named_modules():
            for leaf, tensor in _attributes(module):
                name = f"{prefix}.{leaf}" if prefix else leaf
                is_own = tensor.numel() and tensor.device.type != "meta" and _address(tensor) not in owned
                if is_own and (name not in constants or constants[name] != _look(tensor)):
                    found[name] = tensor
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

    def check(self, limit_nbytes: int) -> frozenset[int]:
        """Try that the hook computes all derived state from the weights alone, and nothing else. Leaves every bit as it was.

        Args:
            limit_nbytes: bytes that may be kept aside. Of what the hook writes beyond that only a digest is; then a hook that
                misbehaves leaves bytes spoilt, and the error says so.

        Returns:
            Addresses of the storages that the hook is given.

        Raises:
            RejectedError: some state would keep values of old weights, or the hook does more than that.
        """
        before = self.tensors()
        if not self.has_hook:
            _refuse([_not_computed(name) for name in before])
            return frozenset()
        trial = _Trial(self._model, before, limit_nbytes)
        problems = trial.run_as_it_is(self.rerun) or trial.run_over_poison(self.rerun)
        now = self.tensors()
        problems += [f"{name}: appears only when {_HOOK} runs again" for name in now.keys() - before.keys()]
        _refuse(problems, trial.spoilt)
        return frozenset(trial.access.touched)

    def _hooked(self) -> Iterator[Any]:
        """Outermost modules with the hook; they call those inside."""
        inside: set[int] = set()
        for module in self._model.modules():
            if id(module) not in inside and callable(getattr(type(module), _HOOK, None)):
                inside.update(id(child) for child in module.modules())
                yield module


class _Trial:
    """Runs the hook while a model serves nobody, and sees what became of the model."""

    def __init__(self, model: torch.nn.Module, derived: Mapping[str, torch.Tensor], limit_nbytes: int) -> None:
        self._model = model
        self._derived = derived
        self._look_again = DerivedState(model).tensors
        self._limit_nbytes = limit_nbytes
        self._bits = {name: fingerprint(tensor) for name, tensor in derived.items()}
        owned = state_tensors(model)
        self._guard = ModelGuard(model, StorageMap(owned), snapshot_nbytes=0)
        self.access = _Access({_address(tensor) for tensor in (*derived.values(), *owned.values())}, limit_nbytes)
        self.spoilt: list[str] = []

    def run_as_it_is(self, hook: Callable[[], None]) -> list[str]:
        """Nothing may change, for the weights are those that the state was computed from."""
        problems = self._run(hook) + self._replaced()
        problems += [f"{name}: {_HOOK} moves or replaces it when it runs again" for name in self._guard.moved()]
        problems += [f"{storage.key}: {_HOOK} changes it when it runs again" for storage in self._guard.changed()]
        if not problems:
            problems += [_not_computed(name) for name in self._differing()]
        if problems:
            self.access.put_back()
            self._note_spoilt()
        return problems

    def run_over_poison(self, hook: Callable[[], None]) -> list[str]:
        """What the hook computes comes back; what it does not stays poisoned, and is put back here.

        Whole numbers that the hook does not write before it reads them are never poisoned: they may be indices.
        """
        kept: dict[str, torch.Tensor] = {}
        poisoned, left_nbytes = [], self._limit_nbytes
        for name, tensor in self._derived.items():
            if fits := tensor.nbytes <= left_nbytes:
                left_nbytes -= tensor.nbytes
            if self.access.is_computed(tensor) or (fits and tensor.is_floating_point()):
                poisoned.append(name)
                if fits:
                    kept[name] = _bytes(tensor).clone()
        problems = [_not_computed(name) for name in self._derived if name not in poisoned]
        for name in poisoned:
            _fill(self._derived[name], _POISON)
        problems += self._run(hook) + self._replaced()
        problems += [_not_computed(name) for name in self._differing()]
        if problems:
            self.access.put_back()
            for name, stored in kept.items():
                _restore(self._derived[name], stored)
            self._note_spoilt()
        return problems

    def _run(self, hook: Callable[[], None]) -> list[str]:
        try:
            with self.access:
                hook()
        except Exception as error:
            return [f"{type(self._model).__name__}: {_HOOK} fails when it runs again: {type(error).__name__}: {error}"]
        return []

    def _differing(self) -> list[str]:
        return [name for name, tensor in self._derived.items() if fingerprint(tensor) != self._bits[name]]

    def _note_spoilt(self) -> None:
        self.spoilt += [storage.key for storage in self._guard.changed()] + self._differing()

    def _replaced(self) -> list[str]:
        now = self._look_again()
        return [
            f"{name}: {_HOOK} replaces it, and captured graphs would go on reading the old one"
            for name, tensor in self._derived.items()
            if name not in now or now[name].data_ptr() != tensor.data_ptr() or now[name].stride() != tensor.stride()
        ]


class _Access(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its dispatch modes untyped
    """Notes which storages operations are given, which they write, and keeps the bytes that a write is about to replace."""

    def __init__(self, watched: set[int], limit_nbytes: int) -> None:
        """``watched``: addresses of the storages that are kept; temporaries are not."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.touched: set[int] = set()
        self._computed: set[int] = set()
        self._watched = watched
        self._left_nbytes = limit_nbytes
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def is_computed(self, tensor: torch.Tensor) -> bool:
        """Whether the first that happened to this tensor's storage was a write."""
        return _address(tensor) in self._computed

    def put_back(self) -> None:
        """Undo the writes that were kept."""
        for storage, stored in self._kept.values():
            storage.copy_(stored)

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written: list[torch.Tensor] = []
        for alias, value in _arguments(func, args, kwargs or {}):
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            if alias is None:
                self.touched.update(_address(tensor) for tensor in tensors)
            elif alias.is_write:
                written += tensors  # the rest are views taken of them, which neither read nor write
        for tensor in written:
            address = _address(tensor)
            if address not in self.touched:
                self._computed.add(address)
            self.touched.add(address)
            self._keep(address, tensor)
        return func(*args, **(kwargs or {}))

    def _keep(self, address: int, tensor: torch.Tensor) -> None:
        raw = tensor.untyped_storage()
        if address in self._watched and address not in self._kept and raw.nbytes() <= self._left_nbytes:
            storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(raw)
            self._kept[address] = storage, storage.clone()
            self._left_nbytes -= raw.nbytes()


def _arguments(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Values with what the operation's schema says of writing to them; None if it says nothing."""
    schema = func._schema.arguments
    yield from ((schema[number].alias_info, value) for number, value in enumerate(args))
    by_name = {argument.name: argument.alias_info for argument in schema}
    yield from ((by_name.get(name), value) for name, value in kwargs.items())


def _refuse(problems: list[str], spoilt: Iterable[str] = ()) -> None:
    if not problems:
        return
    listed, lost = some_of(problems, _SHOWN, joint="\n  "), sorted(set(spoilt))
    after = f"\nThe bytes of {some_of(lost, _SHOWN)} are spoilt: load the model again before it serves" if lost else ""
    raise RejectedError(f"{len(problems)} tensors that this SGLang model derives from its weights:\n  {listed}{after}")


def _not_computed(name: str) -> str:
    return (
        f"{name}: is kept outside parameters and buffers, and {_HOOK} does not compute it anew; it might go on holding what "
        "older weights gave"
    )


def _attributes(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for name, value in vars(module).items():
        if name in {"_parameters", "_buffers", "_modules"}:
            continue
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, list | tuple | dict):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{name}.{key}", item) for key, item in items if isinstance(item, torch.Tensor))


def _look(tensor: torch.Tensor) -> _Look:
    num_writes = -1 if tensor.is_inference() else tensor._version
    return _Look(tensor.data_ptr(), num_writes, fingerprint(tensor))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


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
