"""What hangs on a module is found wherever Python keeps it, put back after a step changed it, or named if it cannot be seen."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
import zstandard

from deltarefit.placement.reach import StateUndo, reach

pytestmark = pytest.mark.torch


class Slots:
    __slots__ = ("first", "second")

    def __init__(self, first: object) -> None:
        self.first = first


class MoreSlots(Slots):
    __slots__ = ("__private", "first")

    def __init__(self, value: object) -> None:
        super().__init__(value)
        self.__private = value


@dataclass(frozen=True, slots=True)
class Frozen:
    value: object


class Named(dict):
    """A dict that has attributes too."""


def named(value: object) -> Named:
    found = Named()
    found.value = value
    return found


def remembering(value: object):
    @functools.cache
    def remembered(key: int) -> object:
        return SimpleNamespace(value=value)

    remembered(1)
    return remembered


def nested(value: object, steps: int) -> object:
    for number in range(steps):
        value = {"deeper": value} if number % 2 else SimpleNamespace(deeper=value)
    return value


HOLDERS = {
    "itself": lambda t: t,
    "dict": lambda t: {"a": [1, t]},
    "key of a dict": lambda t: {t: 1},
    "ordered dict": lambda t: OrderedDict(a=t),
    "attribute of a dict": named,
    "tuple": lambda t: (1, (t,)),
    "set": lambda t: {t},
    "frozen set": lambda t: frozenset({t}),
    "deque": lambda t: deque([t]),
    "read-only mapping": lambda t: MappingProxyType({"a": t}),
    "slot": Slots,
    "private slot": MoreSlots,
    "frozen slots": Frozen,
    "closure": lambda t: lambda: t,
    "default": lambda t: lambda x, packed=t: packed,
    "keyword default": lambda t: lambda *, packed=t: packed,
    "attribute of a function": lambda t: functools.wraps(lambda: t)(lambda: 0),
    "method": lambda t: Slots(t).__init__,
    "method of the tensor": lambda t: t.matmul,
    "partial": lambda t: functools.partial(print, t),
    "keyword of a partial": lambda t: functools.partial(print, end=t),
    "cache": remembering,
    "weak reference": lambda t: SimpleNamespace(t=t, weak=weakref.ref(t)).weak,
    "iterator": lambda t: iter([t]),
    "seven steps away": lambda t: nested(t, 7),
    "thirty steps away": lambda t: nested(t, 30),
}


def holding(value: object) -> torch.nn.Module:
    module = torch.nn.Module()
    module.helper = value
    return module


@pytest.mark.parametrize("name", HOLDERS)
def test_a_tensor_is_found(name: str) -> None:
    tensor = torch.ones(3)
    found = reach({"layer": holding(HOLDERS[name](tensor))})
    assert any(one is tensor for one in found.tensors.values())
    assert all(path.startswith("layer.helper") for path in found.tensors)
    assert found.opaque == {}


@pytest.mark.parametrize("name", HOLDERS)
def test_paths_are_those_of_another_model(name: str) -> None:
    first, second = (reach({"layer": holding(HOLDERS[name](torch.ones(3)))}) for _ in range(2))
    assert first.tensors.keys() == second.tensors.keys()


def test_an_array_is_found_as_a_tensor_over_its_memory() -> None:
    array = np.zeros(3, np.int16)
    (tensor,) = reach({"": holding({"packed": array})}).tensors.values()
    tensor += 1
    assert array.tolist() == [1, 1, 1]


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (bytearray(4), "bytearray"),
        (memoryview(b"abcd"), "memoryview"),
        (zstandard.ZstdCompressor(), "ZstdCompressor"),
        ((k for k in [torch.ones(1)]), "generator"),
        (read_only(np.zeros(3)), "numpy array of float64 that torch cannot share"),
        ({torch.ones(1), torch.ones(2)}, "in a set of several things"),
        (torch.ones(2).to_sparse(), "of layout torch.sparse_coo"),
    ],
)
@pytest.mark.parametrize("steps", [0, 20])
def test_what_cannot_be_looked_into_is_named(value: object, kind: str, steps: int) -> None:
    found = reach({"layer": holding(nested(value, steps))})
    assert any(kind in text for text in found.opaque.values()), found.opaque
    assert found.tensors == {}


@pytest.mark.parametrize(
    "value",
    [
        torch.bfloat16, torch.device("cpu"), torch.Generator(), torch.ops.aten.copy_.default, torch.nn.functional.linear,
        np.float32(1), np.dtype("u1"), np.array(["a"]), 1.5, "text", range(3), slice(1), {1, 2, 3}, len, torch.Size([2]),
    ],
)  # fmt: skip
def test_plain_values_hide_nothing(value: object) -> None:
    found = reach({"": holding(value)})
    assert (found.tensors, found.opaque) == ({}, {})


class Changing:
    def __init__(self) -> None:
        self.slots = Slots(torch.ones(1))
        self.set, self.list, self.dict = {1}, [1], {"a": torch.ones(2)}


def test_what_a_step_changed_is_put_back() -> None:
    helper = Changing()
    module = holding(helper)
    first, kept = helper.slots.first, helper.dict["a"]
    undo = StateUndo(reach({"": module}))
    helper.slots.first, helper.slots.second = torch.zeros(2), 5
    helper.set.add(torch.zeros(1))
    helper.list.append(2)
    helper.dict.clear()
    kept.data = torch.zeros(7)
    module.more = 1
    undo.restore()
    assert helper.slots.first is first
    assert not hasattr(helper.slots, "second")
    assert (helper.set, helper.list) == ({1}, [1])
    assert helper.dict["a"] is kept
    assert kept.tolist() == [1, 1]
    assert not hasattr(module, "more")


def test_tables_that_lie_far_away_are_not_touched() -> None:
    """There lie what engines share: putting it back would undo what others did."""
    shared: dict[str, int] = {}
    undo = StateUndo(reach({"": holding(nested(shared, 20))}))
    shared["requests"] = 1
    undo.restore()
    assert shared == {"requests": 1}


def test_modules_outside_are_neighbours_only_if_they_are_near() -> None:
    other = torch.nn.Linear(1, 1)
    helper = SimpleNamespace(other=[other])
    assert [module is other for module in reach({"": holding(helper)}).neighbours] == [True]
    assert reach({"": holding(nested(helper, 20))}).neighbours == []
