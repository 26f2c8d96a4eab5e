"""Moving pieces between coordinate systems: from a row-major tensor onto the strided view or shard that really holds it.

A converter is watched on plain contiguous tensors, so its pieces address a parameter as if it were row-major. The parameter may
be transposed, a slice of something larger, or a shard; here its pieces are re-addressed, exactly and without touching data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from deltarefit.errors import RejectedError
from deltarefit.pieces import Piece, StridedView, whole

__all__ = ["onto_shard", "onto_view", "pack", "window"]

_MOST_CUTS = 2**20  # a piece that needs more is not laid out like a tensor of this shape


def window(pieces: Sequence[Piece]) -> tuple[int, int, tuple[Piece, ...]]:
    """First storage position, number of positions, and the pieces counted from there: the least that must be read."""
    held = [piece.storage for piece in pieces if piece.num_elements]
    if not held:
        return 0, 0, tuple(pieces)
    first = min(view.first for view in held)
    end = max(view.last for view in held) + 1
    moved = tuple(
        Piece(piece.canonical, StridedView(piece.storage.offset - first, piece.storage.shape, piece.storage.stride), piece.cast)
        for piece in pieces
        if piece.num_elements
    )
    return first, end - first, moved


def pack(pieces: Sequence[Piece]) -> tuple[tuple[Piece, ...], tuple[StridedView, ...]]:
    """The pieces on storage that holds nothing but their elements, and the views to copy there, one behind another."""
    packed: list[Piece] = []
    views: list[StridedView] = []
    start = 0
    for piece in pieces:
        if piece.num_elements:
            here = whole(piece.storage.shape)
            packed.append(Piece(piece.canonical, StridedView(start, here.shape, here.stride), piece.cast))
            views.append(piece.storage)
            start += piece.num_elements
    return tuple(packed), tuple(views)


@dataclass(frozen=True, slots=True)
class _Axis:
    length: int
    canonical_stride: int
    stride: int
    """On the row-major tensor."""


@dataclass(frozen=True, slots=True)
class _Box:
    """A piece of which the storage side is a row-major tensor, as axes that may still have to be cut."""

    canonical_offset: int
    offset: int
    axes: tuple[_Axis, ...]

    def with_axis(self, place: int, *axes: _Axis) -> _Box:
        return _Box(self.canonical_offset, self.offset, (*self.axes[:place], *axes, *self.axes[place + 1 :]))

    def cut(self, place: int, at: int) -> list[_Box]:
        """The first ``at`` steps of an axis, and the rest."""
        return [_steps(self, place, 0, at), _steps(self, place, at, self.axes[place].length)]


def onto_view(pieces: Iterable[Piece], view: StridedView) -> tuple[Piece, ...]:
    """Re-address pieces whose storage side is the row-major tensor of ``view.shape`` onto the storage that ``view`` lies in.

    Raises:
        RejectedError: a piece reaches past the tensor, or walks it in no regular way.
    """
    return onto_shard(pieces, view.shape, tuple(((0, length),) for length in view.shape), view)


def onto_shard(
    pieces: Iterable[Piece], shape: Sequence[int], held: Sequence[Sequence[tuple[int, int]]], view: StridedView
) -> tuple[Piece, ...]:
    """The parts of pieces that a shard holds, re-addressed onto the shard's own storage.

    Args:
        pieces: their storage side is the row-major tensor of ``shape``.
        shape: of the whole tensor.
        held: per dimension the intervals (start, stop) of the whole tensor that the shard holds, in the order in which they
            lie in the shard; the shard is the product of them.
        view: the shard in its storage; its shape is the sum of the intervals' lengths per dimension.

    Raises:
        RejectedError: the shard's shape does not fit, a piece reaches past the tensor, or walks it in no regular way.
    """
    lengths = tuple(sum(stop - start for start, stop in intervals) for intervals in held)
    if lengths != view.shape:
        raise RejectedError(f"shard of shape {view.shape}: its intervals {held} of {tuple(shape)} make {lengths}")
    if not view.num_elements:
        return ()
    dims = _dims(shape)
    choices = [_choices(held[dim.place]) for dim in dims]
    num_elements = math.prod(shape)
    found: list[Piece] = []
    for piece in pieces:
        if not piece.num_elements:
            continue
        if piece.storage.last >= num_elements:
            raise RejectedError(f"piece {piece}: reaches past the {num_elements} elements of shape {tuple(shape)}")
        for box in _aligned(_box(piece), dims):
            for chosen in itertools.product(*choices):
                found.extend(_placed(part, dims, chosen, view, piece) for part in _within(box, dims, chosen))
    return tuple(found)


_Choice = tuple[int, int, int]
"""Start and stop of an interval of the whole tensor, and where it starts in the shard."""


def _choices(intervals: Sequence[tuple[int, int]]) -> list[_Choice]:
    choices = []
    place = 0
    for start, stop in intervals:
        choices.append((start, stop, place))
        place += stop - start
    return choices


def _within(box: _Box, dims: Sequence[_Dim], chosen: Sequence[_Choice]) -> list[_Box]:
    """The parts of an aligned box that lie in the chosen interval of every dimension."""
    boxes = [box]
    for dim, (start, stop, _) in zip(dims, chosen, strict=True):
        boxes = [part for one in boxes for part in _clip(one, dim, dims, start, stop)]
    return boxes


def _clip(box: _Box, dim: _Dim, dims: Sequence[_Dim], start: int, stop: int) -> list[_Box]:
    first = box.offset // dim.stride % dim.length
    last = _reach(box, dim, dims)
    if last < start or first >= stop:
        return []
    if start <= first and last < stop:
        return [box]
    along = [place for place, axis in enumerate(box.axes) if _dim_of(axis, dims) is dim]
    place = max(along, key=lambda one: box.axes[one].stride)
    step = box.axes[place].stride // dim.stride
    if len(along) == 1:
        begin = max(0, -((first - start) // step))
        end = min(box.axes[place].length, (stop - 1 - first) // step + 1)
        return [_steps(box, place, begin, end)] if begin < end else []
    singles = (_steps(box, place, one, one + 1) for one in range(box.axes[place].length))
    return [part for single in singles for part in _clip(single, dim, dims, start, stop)]


def _steps(box: _Box, place: int, begin: int, end: int) -> _Box:
    """Steps ``begin`` to ``end`` (exclusive) of an axis."""
    axis = box.axes[place]
    shorter = box.with_axis(place, *([replace(axis, length=end - begin)] if end - begin > 1 else []))
    return replace(
        shorter, canonical_offset=box.canonical_offset + begin * axis.canonical_stride, offset=box.offset + begin * axis.stride
    )


def _box(piece: Piece) -> _Box:
    canonical, storage = piece.canonical, piece.storage
    axes = [
        _Axis(length, canonical_stride, stride)
        for length, canonical_stride, stride in zip(canonical.shape, canonical.stride, storage.stride, strict=True)
        if length != 1
    ]
    return _Box(canonical.offset, storage.offset, tuple(sorted(axes, key=lambda axis: -axis.stride)))


@dataclass(frozen=True, slots=True)
class _Dim:
    place: int
    """Which dimension of the tensor."""
    length: int
    stride: int
    """Row-major."""


def _dims(shape: Sequence[int]) -> tuple[_Dim, ...]:
    """Dimensions longer than 1, outermost first."""
    dims: list[_Dim] = []
    stride = 1
    for place in range(len(shape) - 1, -1, -1):
        if shape[place] != 1:
            dims.append(_Dim(place, shape[place], stride))
        stride *= shape[place]
    return tuple(reversed(dims))


def _dim_of(axis: _Axis, dims: Sequence[_Dim]) -> _Dim:
    """The dimension along which an axis steps."""
    for dim in dims:
        if dim.stride <= axis.stride:
            if axis.stride % dim.stride:
                break
            return dim
    raise RejectedError(
        f"axis of stride {axis.stride} follows no dimension of a tensor with strides {[d.stride for d in dims]}"
    )


def _aligned(box: _Box, dims: Sequence[_Dim]) -> Iterator[_Box]:
    """Cut and factor until every axis stays inside one dimension wherever the other axes stand."""
    waiting = [box]
    for _ in range(_MOST_CUTS):
        if not waiting:
            return
        one = waiting.pop()
        wrapping = _first_wrapping(one, dims)
        if wrapping is None:
            yield one
        else:
            waiting.extend(reversed(_resolve(one, wrapping, dims)))
    raise RejectedError(f"piece at {box.offset}: needs more than {_MOST_CUTS} cuts to fit dimensions {dims}")


def _reach(box: _Box, dim: _Dim, dims: Sequence[_Dim]) -> int:
    """Largest position along a dimension, if no axis wrapped."""
    digit = box.offset // dim.stride % dim.length
    along = [axis for axis in box.axes if _dim_of(axis, dims) is dim]
    return digit + sum((axis.length - 1) * (axis.stride // dim.stride) for axis in along)


def _first_wrapping(box: _Box, dims: Sequence[_Dim]) -> int | None:
    for place, axis in enumerate(box.axes):
        dim = _dim_of(axis, dims)
        if _reach(box, dim, dims) >= dim.length:
            return place
    return None


def _resolve(box: _Box, place: int, dims: Sequence[_Dim]) -> list[_Box]:
    """One step towards an axis that does not wrap: split it where it wraps, or into whole rounds of its dimension."""
    axis = box.axes[place]
    dim = _dim_of(axis, dims)
    step = axis.stride // dim.stride
    rounds = dim.length // step
    started = box.offset // dim.stride % dim.length // step
    if dim.length % step == 0:
        if started and axis.length > rounds - started:
            return box.cut(place, rounds - started)
        if not started and axis.length > rounds:
            if rest := axis.length % rounds:
                return box.cut(place, axis.length - rest)
            inner = _Axis(rounds, axis.canonical_stride, axis.stride)
            outer = _Axis(axis.length // rounds, axis.canonical_stride * rounds, axis.stride * rounds)
            return [box.with_axis(place, outer, inner)]
    return box.cut(place, 1)


def _placed(box: _Box, dims: Sequence[_Dim], chosen: Sequence[_Choice], view: StridedView, piece: Piece) -> Piece:
    offset = view.offset
    for dim, (start, _, place) in zip(dims, chosen, strict=True):
        offset += (box.offset // dim.stride % dim.length - start + place) * view.stride[dim.place]
    shape: list[int] = []
    canonical: list[int] = []
    storage: list[int] = []
    for axis in box.axes:
        if axis.length == 1:
            continue
        dim = _dim_of(axis, dims)
        shape.append(axis.length)
        canonical.append(axis.canonical_stride)
        storage.append(axis.stride // dim.stride * view.stride[dim.place])
    return Piece(
        StridedView(box.canonical_offset, tuple(shape), tuple(canonical)),
        StridedView(offset, tuple(shape), tuple(storage)),
        piece.cast,
    )
