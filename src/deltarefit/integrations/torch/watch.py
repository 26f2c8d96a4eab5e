"""Following a conversion through its operations, on tensors without data.

Views of an input share its storage, so their strides say where they come from; a plain copy of a view is followed through the
copy. That covers splitting, stacking undone, transposing and making contiguous at no cost in memory or time. Whatever else an
operation does to a tensor makes it unknown here, and it is traced with probes instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltarefit.bits import spec_of, storage_view
from deltarefit.canonical import TensorSpec
from deltarefit.errors import RejectedError
from deltarefit.pieces import Piece, StridedView, whole
from deltarefit.placement import Parts
from deltarefit.source import onto_view

__all__ = ["Followed", "follow"]

Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
Placements = dict[str, Parts]


@dataclass(frozen=True, slots=True)
class Followed:
    """What is known of a conversion's outputs."""

    specs: dict[str, TensorSpec]
    placements: Placements
    """Of the outputs that are rearranged inputs: pieces onto the input taken as row-major."""
    untouched: frozenset[str]
    """Of these, the outputs that are an input as it is."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """A storage holds, row-major, the elements of this view on an input."""

    source: str
    view: StridedView


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows for each storage what it is a copy of, as long as nothing writes to it."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[torch.Tensor] = list(inputs.values())  # a freed storage's identity would be used again
        self._origins: dict[int, _Origin] = {
            _storage(tensor): _Origin(name, storage_view(tensor)) for name, tensor in inputs.items()
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            for value in (*args, *(kwargs or {}).values()):
                if isinstance(value, torch.Tensor):
                    self._origins.pop(_storage(value), None)
        elif func is torch.ops.aten.clone.default:
            self._copied(args[0], result)
        return result

    def placement(self, tensor: torch.Tensor) -> tuple[str, tuple[Piece, ...]] | None:
        """Where the elements of a tensor come from; None if that is unknown."""
        origin = self._origins.get(_storage(tensor))
        if origin is None:
            return None
        try:
            return origin.source, onto_view([Piece(whole(tuple(tensor.shape)), storage_view(tensor))], origin.view)
        except RejectedError:  # an overlapping or irregular view
            return None

    def _copied(self, view: torch.Tensor, copy: torch.Tensor) -> None:
        found = self.placement(view)
        shape = tuple(view.shape)
        if found is None or storage_view(copy) != whole(shape):
            return
        origin = _as_view(found[1], shape)
        if origin is not None:
            self._origins[_storage(copy)] = _Origin(found[0], origin)
            self._kept.append(copy)


def _as_view(pieces: tuple[Piece, ...], shape: tuple[int, ...]) -> StridedView | None:
    """One piece of a whole tensor of this shape as a view on the input, dimension by dimension; None if it is not one."""
    if len(pieces) != 1 or pieces[0].canonical.offset:
        return None
    canonical, storage = pieces[0].canonical, pieces[0].storage
    steps = dict(zip(zip(canonical.shape, canonical.stride, strict=True), storage.stride, strict=True))
    strides = [
        1 if length == 1 else steps.get((length, stride)) for length, stride in zip(shape, whole(shape).stride, strict=True)
    ]
    known = tuple(stride for stride in strides if stride is not None)
    return StridedView(storage.offset, shape, known) if len(known) == len(shape) else None


def _storage(tensor: torch.Tensor) -> int:
    """Identity of a storage; tensors without data have no address."""
    return int(tensor.untyped_storage()._cdata)


def follow(convert: Convert, shapes: Mapping[str, torch.Tensor]) -> Followed:
    """Run a conversion on meta tensors and watch what it does to them.

    A conversion that needs values is run on zeros instead, and nothing of it is believed: it might do something else to other
    values.
    """
    inputs = dict(shapes)
    names = {id(tensor): name for name, tensor in inputs.items()}
    watch = _Watch(inputs)
    try:
        with torch.no_grad(), watch:
            outputs = convert(dict(inputs))
    except Exception:  # whatever a user's function raises on tensors without values
        zeros = {name: torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") for name, tensor in shapes.items()}
        with torch.no_grad():
            outputs = convert(zeros)
        return Followed({name: spec_of(name, tensor) for name, tensor in outputs.items()}, {}, frozenset())
    placements: Placements = {}
    for name, tensor in outputs.items():
        found = watch.placement(tensor)
        if found is not None and inputs[found[0]].dtype == tensor.dtype:
            placements[name] = (found,)
    untouched = frozenset(name for name in placements if id(outputs[name]) in names)
    return Followed({name: spec_of(name, tensor) for name, tensor in outputs.items()}, placements, untouched)
