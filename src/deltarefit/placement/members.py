"""What a Python object holds: its children by a label, the tables that can be put back, and whether it hides anything.

Objects of every kind are told apart here: containers, attributes, slots, closures, what extension types show to the garbage
collector. An object that shows nothing, and is of no type known to hold no weights, is opaque.
"""

from __future__ import annotations

import array
import ctypes
import functools
import gc
import mmap
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import torch

__all__ = ["SlotTable", "Table", "children_of", "is_plain", "opaque_kind", "table_of"]

Table: TypeAlias = "dict[Any, Any] | list[Any] | set[Any] | SlotTable"

_PLAIN = (
    str, bytes, int, float, complex, type(None), type, types.ModuleType, types.CodeType, types.EllipsisType,
    types.NotImplementedType, Enum, range, np.generic, np.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch._ops.OperatorBase, torch._ops.OpOverloadPacket,
)  # fmt: skip
_NUMBERS = (float, int, complex)
_MEMORY = (bytearray, memoryview, array.array, mmap.mmap, ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)
_RUNNING = (types.FrameType, types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, types.TracebackType)
_HIDING = frozenset({"PyCapsule", "ScriptObject", "ScriptFunction", "ScriptMethod"})
_BUILTIN_METHODS = (types.BuiltinMethodType, types.MethodWrapperType)
_FUNCTION_RECORDS = ("PyCapsule", "pybind11_detail_function_record")
"""What functions that pybind11 binds call their own: no object that anybody made."""
_NO_WEIGHTS = ("torch._C", "torch.cuda", "torch.distributed")
"""Modules of extension types that hold no weights: process groups, stores, streams, events, random generators."""


class SlotTable:
    """An object's slots with a dict's face."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._slots = dict(_slots(type(owner)))

    def _items(self) -> Iterator[tuple[str, Any]]:
        for name, member in self._slots.items():
            try:
                yield name, member.__get__(self._owner)
            except AttributeError:  # an empty slot
                continue

    def copy(self) -> dict[str, Any]:
        """Slots that are filled."""
        return dict(self._items())

    def keys(self) -> set[str]:
        return {name for name, _ in self._items()}

    def __getitem__(self, name: str) -> Any:
        return self._slots[name].__get__(self._owner)

    def clear(self) -> None:
        for name in self.keys():
            self._slots[name].__delete__(self._owner)

    def update(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._slots[name].__set__(self._owner, value)


def _slots(kind: type) -> Iterator[tuple[str, Any]]:
    """Of classes written in Python; under the names that keep those of base classes apart."""
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType):
                    yield f"{base.__qualname__}.{name}" if base is not kind else name, member


def is_plain(value: Any) -> bool:
    """Whether a value holds nothing else, or nothing that belongs to a layer."""
    return isinstance(value, _PLAIN)


def opaque_kind(value: Any) -> str:
    """The type of what holds values that cannot be read here, in words; empty for everything else."""
    kind = type(value)
    if isinstance(value, _MEMORY + _RUNNING) or kind.__name__ in _HIDING:
        return kind.__name__
    if _shows_members(value) or gc.is_tracked(value):
        return ""
    module = kind.__module__
    if module.partition(".")[0] in sys.stdlib_module_names or module.startswith(_NO_WEIGHTS):
        return ""
    return f"{module}.{kind.__qualname__}"


def _shows_members(value: Any) -> bool:
    return (
        isinstance(value, dict | list | tuple | set | frozenset | types.FunctionType | types.MethodType)
        or isinstance(getattr(value, "__dict__", None), dict)
        or next(_slots(type(value)), None) is not None
    )


def table_of(value: Any) -> list[Table]:
    """The tables of an object that a step may change."""
    tables: list[Table] = []
    if isinstance(value, dict | list | set):
        tables.append(value)
    if isinstance(own := getattr(value, "__dict__", None), dict):
        tables.append(own)
    if next(_slots(type(value)), None) is not None:
        tables.append(SlotTable(value))
    return tables


def children_of(value: Any) -> list[tuple[str, Any]]:
    """What an object refers to, each with a label that leads to the same in another model; of plain values, numbers only."""
    found = [*_contents(value), *_attributes(value)]
    if not found and not _shows_members(value) and gc.is_tracked(value):
        found = [(f".<{place}>", child) for place, child in enumerate(gc.get_referents(value))]
    return [(label, child) for label, child in found if isinstance(child, _NUMBERS) or not is_plain(child)]


def _contents(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from _items(value)
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{place}]", child) for place, child in enumerate(list(value)))
    elif isinstance(value, set | frozenset):
        yield from ((f"{{{place}}}", child) for place, child in enumerate(list(value)))
    elif isinstance(value, np.ndarray):
        yield from ((f"[{place}]", child) for place, child in enumerate(value.flat))
    elif isinstance(value, types.FunctionType):
        yield from _function(value)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif isinstance(value, _BUILTIN_METHODS):
        if not type(value.__self__).__name__.startswith(_FUNCTION_RECORDS):
            yield ".__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((f".<{place}>", child) for place, child in enumerate((value.func, *value.args)))
        yield from ((f".<{key}>", child) for key, child in value.keywords.items())
    elif isinstance(value, weakref.ref):
        yield "()", value()


def _items(value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for place, (key, child) in enumerate(list(value.items())):
        yield f"[{key if is_plain(key) else place}]", child
        if not is_plain(key):
            yield f"[key {place}]", key


def _function(value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield f".<{name}>", cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            continue
    yield from ((f".<default {place}>", child) for place, child in enumerate(value.__defaults__ or ()))
    yield from ((f".<default {name}>", child) for name, child in (value.__kwdefaults__ or {}).items())


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(own := getattr(value, "__dict__", None), dict):
        yield from ((f".{leaf}", child) for leaf, child in list(own.items()))
    yield from ((f".{leaf}", child) for leaf, child in SlotTable(value).copy().items())
