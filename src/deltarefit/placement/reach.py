"""What hangs on a module: every tensor, and every table that a post-load step may change.

Engines keep what they compute from weights not only in parameters and buffers, but in plain attributes, in helper objects and
in what a function closes over. All of these are followed; what cannot be looked into is named.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from deltarefit.errors import RejectedError

__all__ = ["Reached", "StateUndo", "reach"]

_MODULE_SLOTS = frozenset(vars(torch.nn.Module()))
_TABLES = ("_parameters", "_buffers")
_MAX_DEPTH = 6
"""Steps from a module through helper objects and containers. Weights lie at most four away in the engines seen."""
_MAX_TABLES = 100_000
_PLAIN = (str, bytes, int, float, complex, type(None), type, types.ModuleType, torch.dtype, torch.device, torch.layout)
_OPAQUE_TYPES = frozenset({"PyCapsule", "ScriptObject"})


@dataclass(slots=True)
class Reached:
    """Everything found on some modules."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By path; a tensor that is found under several paths is listed under each."""
    tables: list[Any] = field(default_factory=list)
    """Attribute tables, dicts, lists and sets."""
    opaque: dict[str, str] = field(default_factory=dict)
    """Path and type of what holds values that cannot be read here."""
    neighbours: list[torch.nn.Module] = field(default_factory=list)
    """Modules outside these that helper objects refer to; they are not entered."""


class _Walk:
    def __init__(self, roots: Mapping[str, torch.nn.Module], holders: Mapping[str, torch.nn.Module]) -> None:
        self._roots = roots
        self._holders = holders
        self._found = Reached()
        self._modules = {id(module): module for root in roots.values() for module in root.modules()}
        self._seen: set[int] = set()

    def run(self) -> Reached:
        for name, root in self._roots.items():
            for inner, module in root.named_modules():
                if self._is_new(module):
                    self._module(".".join(part for part in (name, inner) if part), module, is_whole=True)
        for name, module in self._holders.items():
            if self._is_new(module):
                self._module(name, module, is_whole=False)
        return self._found

    def _is_new(self, thing: Any) -> bool:
        if id(thing) in self._seen:
            return False
        self._seen.add(id(thing))
        return True

    def _module(self, path: str, module: torch.nn.Module, *, is_whole: bool) -> None:
        own = vars(module)
        self._table(own)
        for table in _TABLES:
            self._table(own[table])
            for leaf, tensor in own[table].items():
                if tensor is not None:
                    self._tensor(f"{path}.{leaf}" if path else leaf, tensor)
        for leaf, value in list(own.items()):
            if leaf not in _MODULE_SLOTS and (is_whole or isinstance(value, torch.Tensor)):
                self._follow(f"{path}.{leaf}" if path else leaf, value, _MAX_DEPTH)

    def _table(self, table: Any) -> None:
        self._found.tables.append(table)
        if len(self._found.tables) > _MAX_TABLES:
            raise RejectedError(f"a layer's helper objects refer to more than {_MAX_TABLES} others; name smaller steps")

    def _tensor(self, path: str, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
            self._found.opaque[path] = f"{type(tensor).__name__} of layout {tensor.layout}"
        elif tensor.device.type != "meta":
            self._found.tensors[path] = tensor

    def _follow(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, torch.nn.Module):
            if id(value) not in self._modules:  # those of these roots are walked anyway
                self._found.neighbours.append(value)
        elif isinstance(value, _PLAIN) or depth <= 0 or not self._is_new(value):
            return
        elif type(value).__name__ in _OPAQUE_TYPES:
            self._found.opaque[path] = type(value).__name__
        else:
            for inner, child in self._children(value):
                self._follow(f"{path}{inner}", child, depth - 1)

    def _children(self, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            self._table(value)
            yield from ((f"[{key}]", child) for key, child in list(value.items()))
        elif isinstance(value, list | tuple):
            if isinstance(value, list):
                self._table(value)
            yield from ((f"[{place}]", child) for place, child in enumerate(value))
        elif isinstance(value, types.FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    yield f".<{name}>", cell.cell_contents
                except ValueError:  # a cell that is not filled yet
                    continue
        elif isinstance(value, types.MethodType):
            yield ".__self__", value.__self__
        elif isinstance(value, functools.partial):
            yield from ((f".<{place}>", child) for place, child in enumerate((value.func, *value.args)))
            yield from ((f".<{key}>", child) for key, child in value.keywords.items())
        elif isinstance(own := getattr(value, "__dict__", None), dict):
            self._table(own)
            yield from ((f".{leaf}", child) for leaf, child in list(own.items()))


def reach(roots: Mapping[str, torch.nn.Module], holders: Mapping[str, torch.nn.Module] = types.MappingProxyType({})) -> Reached:
    """Everything that hangs on these modules and their children. Other modules that they refer to are not entered.

    Args:
        roots: modules by name.
        holders: further modules by name of which only their own tensors count.
    """
    return _Walk(roots, holders).run()


class StateUndo:
    """Puts back the tables and tensors of some modules as they were; the bytes of tensors are left to the caller."""

    def __init__(self, reached: Reached) -> None:
        self._tables = [(table, table.copy()) for table in reached.tables]
        distinct = {id(tensor): tensor for tensor in reached.tensors.values()}
        self._tensors = [(tensor, tensor.detach(), dict(vars(tensor))) for tensor in distinct.values()]
        self._freed: list[tuple[torch.UntypedStorage, int]] = []

    def hollow(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Free these storages until ``restore``. What lay in them keeps its shape; writing to it is an error."""
        for raw in storages:
            if raw.nbytes() and raw.resizable():
                self._freed.append((raw, raw.nbytes()))
        freed = {id(raw) for raw, _ in self._freed}
        for tensor, data, _ in self._tensors:
            if id(data.untyped_storage()) in freed:
                no_stride = (0,) * data.dim()
                tensor.data = torch.empty_strided(data.shape, no_stride, dtype=data.dtype, device=data.device)
        for raw, _ in self._freed:
            raw.resize_(0)

    def restore(self) -> None:
        """As often as wanted."""
        while self._freed:
            raw, nbytes = self._freed.pop()
            raw.resize_(nbytes)
        for table, saved in self._tables:
            if isinstance(table, list):
                table[:] = saved
            elif table.keys() != saved.keys() or any(table[key] is not value for key, value in saved.items()):
                table.clear()
                table.update(saved)
        for tensor, data, attributes in self._tensors:
            if not _is_same_view(tensor, data):
                tensor.data = data
            if vars(tensor) != attributes:
                vars(tensor).clear()
                vars(tensor).update(attributes)


def _is_same_view(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    return (
        tensor.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
        and tensor.dtype == data.dtype
        and tensor.shape == data.shape
        and tensor.stride() == data.stride()
        and tensor.storage_offset() == data.storage_offset()
    )
