"""What hangs on a module: every tensor, and every table that a post-load step may change.

Engines keep what they compute from weights not only in parameters and buffers, but in plain attributes, in helper objects and
in what a function closes over. All of these are followed, however far; what cannot be looked into is named. Class attributes
and globals of modules belong to no layer and are not looked at.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from deltarefit.errors import RejectedError
from deltarefit.placement.members import Table, children_of, is_plain, opaque_kind, table_of

__all__ = ["Reached", "StateUndo", "reach"]

_MODULE_SLOTS = frozenset(vars(torch.nn.Module()))
_TABLES = ("_parameters", "_buffers")
_NEAR = 6
"""Steps from a module through helper objects and containers within which a post-load step is expected to change things. Tables
further away are read but not put back, and modules further away are no neighbours: there lie what engines share, such as
configurations and registries of all layers. Weights lie at most four steps away in the engines seen."""
_MAX_TABLES = 100_000
_MAX_OBJECTS = 1_000_000


@dataclass(slots=True)
class Reached:
    """Everything found on some modules."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By path; a tensor that is found under several paths is listed under each. Arrays of numpy count as tensors."""
    tables: list[Table] = field(default_factory=list)
    """Attribute tables, slots, dicts, lists and sets, not far away."""
    numbers: dict[str, complex] = field(default_factory=dict)
    """Numbers of Python by path, not far away."""
    opaque: dict[str, str] = field(default_factory=dict)
    """Path and type of what holds values that cannot be read here."""
    neighbours: list[torch.nn.Module] = field(default_factory=list)
    """Modules outside these that helper objects refer to; they are not entered."""


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """Something to look at."""

    path: str
    value: Any
    distance: int
    """From its module."""
    is_unordered: bool
    """Whether it was found among several things in a set, so that its path may be another's in another model."""


class _Walk:
    def __init__(self, roots: Mapping[str, torch.nn.Module], holders: Mapping[str, torch.nn.Module]) -> None:
        self._roots = roots
        self._holders = holders
        self._found = Reached()
        self._modules = {id(module): module for root in roots.values() for module in root.modules()}
        self._seen: dict[int, Any] = {}
        """Kept, so that no other object gets the same address meanwhile."""

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
        self._seen[id(thing)] = thing
        if len(self._seen) > _MAX_OBJECTS:
            raise RejectedError(f"a layer's helper objects refer to more than {_MAX_OBJECTS} others; name smaller steps")
        return True

    def _module(self, path: str, module: torch.nn.Module, *, is_whole: bool) -> None:
        own = vars(module)
        self._table(own)
        for table in _TABLES:
            self._table(own[table])
            for leaf, tensor in own[table].items():
                if tensor is not None:
                    self._tensor(_Step(f"{path}.{leaf}" if path else leaf, tensor, 0, is_unordered=False))
        for leaf, value in list(own.items()):
            if leaf not in _MODULE_SLOTS and (is_whole or isinstance(value, torch.Tensor)):
                self._follow(_Step(f"{path}.{leaf}" if path else leaf, value, 1, is_unordered=False))

    def _table(self, table: Table) -> None:
        self._found.tables.append(table)
        if len(self._found.tables) > _MAX_TABLES:
            raise RejectedError(f"a layer's helper objects refer to more than {_MAX_TABLES} tables; name smaller steps")

    def _tensor(self, step: _Step) -> None:
        tensor = step.value
        if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
            self._found.opaque[step.path] = f"{type(tensor).__name__} of layout {tensor.layout}"
        elif step.is_unordered:
            self._found.opaque[step.path] = "tensor in a set of several things, which have no order"
        elif tensor.device.type != "meta":
            self._found.tensors[step.path] = tensor

    def _follow(self, first: _Step) -> None:
        """Everything that can be reached from here, in the order in which it is found."""
        waiting = [first]
        while waiting:
            step = waiting.pop()
            value = step.value
            if isinstance(value, torch.Tensor):
                self._tensor(step)
            elif isinstance(value, torch.nn.Module):
                if id(value) not in self._modules and step.distance <= _NEAR:  # those of these roots are walked anyway
                    self._found.neighbours.append(value)
            elif isinstance(value, int | float | complex):
                if step.distance <= _NEAR:
                    self._found.numbers[step.path] = value
            elif not is_plain(value) and self._is_new(value):
                waiting += reversed(self._inside(step))

    def _inside(self, step: _Step) -> list[_Step]:
        value = step.value
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._array(step)
            return []
        if kind := opaque_kind(value):
            self._found.opaque[step.path] = kind
            return []
        if step.distance <= _NEAR and (tables := table_of(value)):
            for table in tables:
                self._table(table)
        children = children_of(value)
        is_unordered = step.is_unordered or (isinstance(value, set | frozenset) and len(children) > 1)
        return [_Step(step.path + label, child, step.distance + 1, is_unordered) for label, child in children]

    def _array(self, step: _Step) -> None:
        if step.value.dtype.kind in "biufc" and step.value.flags.writeable and step.value.dtype.isnative:
            self._tensor(_Step(step.path, torch.from_numpy(step.value), step.distance, step.is_unordered))
        elif step.value.dtype.kind not in "SU":
            self._found.opaque[step.path] = f"numpy array of {step.value.dtype} that torch cannot share"


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

    def restore(self) -> None:
        """As often as wanted."""
        for table, saved in self._tables:
            _put_back(table, saved)
        for tensor, data, attributes in self._tensors:
            if not _is_same_view(tensor, data):
                tensor.data = data
            if vars(tensor) != attributes:
                vars(tensor).clear()
                vars(tensor).update(attributes)


def _put_back(table: Any, saved: Any) -> None:
    if isinstance(table, list):
        table[:] = saved
    elif isinstance(table, set):
        if {id(value) for value in table} != {id(value) for value in saved}:
            table.clear()
            table.update(saved)
    elif table.keys() != saved.keys() or any(table[key] is not value for key, value in saved.items()):
        table.clear()
        table.update(saved)


def _is_same_view(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    return (
        tensor.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
        and tensor.dtype == data.dtype
        and tensor.shape == data.shape
        and tensor.stride() == data.stride()
        and tensor.storage_offset() == data.storage_offset()
    )
