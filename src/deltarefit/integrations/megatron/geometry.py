"""From facts about a parameter to pieces: which part of which checkpoint tensors it holds, and where.

Each class of mapping is described once, for the parameter as it would be if one rank held all of it (*gathered*): where the
elements of checkpoint tensors lie in it, and which intervals of it a rank holds. Cutting pieces to shards is the business of
``deltarefit.source``. Checked against Bridge's own export in the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.errors import RejectedError
from deltarefit.integrations.megatron.facts import TaskFacts
from deltarefit.pieces import Piece, StridedView, whole

__all__ = ["Geometry", "geometry_of"]

Intervals = tuple[tuple[int, int], ...]
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters whose rows Megatron pads, so that they divide among the ranks."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """One rank's part of a gathered parameter."""

    shape: tuple[int, ...]
    """Of the gathered parameter."""
    held: tuple[Intervals, ...]
    """Per dimension the intervals that this rank holds, in its own order."""
    pieces: Mapping[str, tuple[Piece, ...]]
    """Per checkpoint tensor where its elements lie in the gathered parameter, row-major. Padding is in none."""


class UnmappedError(RejectedError):
    """A parameter's shape is not what its mapping would make of the checkpoint's."""


def geometry_of(facts: TaskFacts, manifest: Catalog) -> Geometry:
    """The geometry of a parameter that can be sent directly.

    Raises:
        UnmappedError: shapes of parameter and checkpoint do not fit the mapping; the text names both.
        RejectedError: the checkpoint has no such tensor.
    """
    specs = {role: manifest[name] for role, name in facts.targets.items() if name in manifest}
    if missing := sorted(set(facts.targets.values()) - set(manifest)):
        raise RejectedError(f"parameter {facts.name}: Bridge maps it to {', '.join(missing)}, which the checkpoint lacks")
    return _KINDS[facts.kind](facts, specs)


def _whole_dims(shape: Sequence[int]) -> tuple[Intervals, ...]:
    return tuple(((0, length),) if length else () for length in shape)


def _rows(facts: TaskFacts, parts: Sequence[int]) -> tuple[tuple[int, ...], tuple[Intervals, ...]]:
    """Shape and held intervals of a parameter made of parts of rows, each of which is cut evenly among the ranks."""
    held: list[tuple[int, int]] = []
    start = 0
    for rows in parts:
        each, rest = divmod(rows, facts.tp_size)
        if rest:
            raise UnmappedError(f"parameter {facts.name}: {rows} rows do not divide among {facts.tp_size} ranks")
        held.append((start + facts.tp_rank * each, start + (facts.tp_rank + 1) * each))
        start += rows
    shape = (start, *facts.shape[1:])
    _expect(facts, (sum(stop - begin for begin, stop in held), *facts.shape[1:]))
    return shape, (tuple(held), *_whole_dims(shape[1:]))


def _expect(facts: TaskFacts, shape: tuple[int, ...]) -> None:
    if facts.shape != shape:
        raise UnmappedError(
            f"parameter {facts.name}: has shape {list(facts.shape)} on rank {facts.tp_rank} of {facts.tp_size}; {facts.kind} "
            f"of {', '.join(facts.targets.values())} expects {list(shape)}"
        )


def _expect_spec(facts: TaskFacts, spec: TensorSpec, shape: tuple[int, ...]) -> None:
    if spec.shape != shape:
        raise UnmappedError(
            f"parameter {facts.name}: the checkpoint has {spec}; {facts.kind} on {facts.tp_size} ranks makes {list(shape)}"
        )


def _same(spec: TensorSpec, *, offset: int = 0, at: int = 0, shape: tuple[int, ...] | None = None) -> tuple[Piece, ...]:
    """Consecutive elements of a checkpoint tensor that lie consecutively in the gathered parameter."""
    view = whole(spec.shape if shape is None else shape)
    return (Piece(StridedView(offset, view.shape, view.stride), StridedView(at, view.shape, view.stride)),)


def _only(specs: Mapping[str, TensorSpec]) -> TensorSpec:
    return specs[""]


def _replicated(facts: TaskFacts, specs: Mapping[str, TensorSpec]) -> Geometry:
    spec = _only(specs)
    return Geometry(facts.shape, _whole_dims(facts.shape), {spec.name: _permuted(facts, spec, facts.shape)})


def _column(facts: TaskFacts, specs: Mapping[str, TensorSpec]) -> Geometry:
    """Rows are cut; those past the checkpoint's vocabulary are padding."""
    spec = _only(specs)
    if not facts.shape:
        raise UnmappedError(f"parameter {facts.name}: {facts.kind} of a single number")
    rows = facts.shape[0] * facts.tp_size
    shape, held = _rows(facts, (rows,))
    if facts.name.endswith(_VOCABULARY) and spec.shape[:1] < (rows,) and spec.shape[1:] == facts.shape[1:]:
        return Geometry(shape, held, {spec.name: _same(spec)})
    return Geometry(shape, held, {spec.name: _permuted(facts, spec, shape)})


def _row(facts: TaskFacts, specs: Mapping[str, TensorSpec]) -> Geometry:
    """Columns are cut; what has one dimension is copied."""
    if len(facts.shape) < 2:
        return _replicated(facts, specs)
    spec = _only(specs)
    shape, held = _columns(facts)
    return Geometry(shape, held, {spec.name: _permuted(facts, spec, shape)})


def _columns(facts: TaskFacts) -> tuple[tuple[int, ...], tuple[Intervals, ...]]:
    each = facts.shape[1]
    shape = (facts.shape[0], each * facts.tp_size, *facts.shape[2:])
    held = list(_whole_dims(shape))
    held[1] = ((facts.tp_rank * each, (facts.tp_rank + 1) * each),)
    return shape, tuple(held)


def _permuted(facts: TaskFacts, spec: TensorSpec, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """The whole of both tensors, where the checkpoint may have the gathered parameter's dimensions in another order."""
    order = facts.permutation or tuple(range(len(shape)))
    if sorted(order) != list(range(len(shape))):
        raise UnmappedError(f"parameter {facts.name}: permutation {order} of a shape {list(shape)}")
    _expect_spec(facts, spec, tuple(shape[place] for place in order))
    gathered = whole(shape)
    stride = tuple(gathered.stride[place] for place in order)
    return (Piece(whole(spec.shape), StridedView(0, spec.shape, stride)),)


def _gated(facts: TaskFacts, specs: Mapping[str, TensorSpec]) -> Geometry:
    gate, up = specs["gate"], specs["up"]
    if gate.shape != up.shape or not gate.shape:
        raise UnmappedError(f"parameter {facts.name}: {gate} and {up} differ in shape")
    shape, held = _rows(facts, (gate.shape[0], up.shape[0]))
    _expect_spec(facts, gate, (gate.shape[0], *facts.shape[1:]))
    return Geometry(shape, held, {gate.name: _same(gate), up.name: _same(up, at=gate.num_elements)})


def _stacked(facts: TaskFacts, specs: Mapping[str, TensorSpec]) -> tuple[TensorSpec, int]:
    """A tensor that stacks all experts, and where in it this expert begins."""
    spec = _only(specs)
    if len(spec.shape) != len(facts.shape) + 1 or not 0 <= facts.expert < spec.shape[0]:
        raise UnmappedError(f"parameter {facts.name}: {spec} is no stack of experts with number {facts.expert}")
    return spec, facts.expert * math.prod(spec.shape[1:])


def _stacked_gated(facts: TaskFacts, specs: Mapping[str, TensorSpec]) -> Geometry:
    spec, offset = _stacked(facts, specs)
    rows = facts.shape[0] * facts.tp_size
    shape, held = _rows(facts, (rows // 2, rows - rows // 2))
    return Geometry(shape, held, {spec.name: _one_expert(facts, spec, shape, offset)})


def _stacked_expert(facts: TaskFacts, specs: Mapping[str, TensorSpec]) -> Geometry:
    spec, offset = _stacked(facts, specs)
    if facts.is_row:
        shape, held = _columns(facts) if len(facts.shape) > 1 else (facts.shape, _whole_dims(facts.shape))
    else:
        shape, held = _rows(facts, (facts.shape[0] * facts.tp_size,))
    return Geometry(shape, held, {spec.name: _one_expert(facts, spec, shape, offset)})


def _one_expert(facts: TaskFacts, spec: TensorSpec, shape: tuple[int, ...], offset: int) -> tuple[Piece, ...]:
    """One expert of a stack, exchanged in its last two dimensions if that is how the shapes fit."""
    if spec.shape[1:] == shape:
        return _same(spec, offset=offset, shape=shape)
    exchanged = (*shape[:-2], shape[-1], shape[-2]) if len(shape) > 1 else shape
    if not facts.may_transpose or spec.shape[1:] != exchanged:
        raise UnmappedError(f"parameter {facts.name}: one expert of {spec} is not the gathered shape {list(shape)}")
    one, gathered = whole(spec.shape[1:]), whole(shape)
    stride = (*gathered.stride[:-2], gathered.stride[-1], gathered.stride[-2])
    return (Piece(StridedView(offset, one.shape, one.stride), StridedView(0, one.shape, stride)),)


def _attention_rows(facts: TaskFacts, parts: Mapping[str, Sequence[int]]) -> tuple[tuple[int, ...], tuple[Intervals, ...], int]:
    """Shape, held intervals and elements of a row, for groups of heads. ``parts`` are heads per group, by role."""
    rows = facts.groups * sum(sum(counts) for counts in parts.values()) * facts.head_size
    shape = (rows, *facts.shape[1:])
    each, rest = divmod(rows, facts.tp_size)
    if rest:
        raise UnmappedError(f"parameter {facts.name}: {rows} rows do not divide among {facts.tp_size} ranks")
    _expect(facts, (each, *facts.shape[1:]))
    held: Intervals = ((facts.tp_rank * each, (facts.tp_rank + 1) * each),)
    return shape, (held, *_whole_dims(shape[1:])), math.prod(facts.shape[1:])


def _fused_attention(facts: TaskFacts, roles: Sequence[str]) -> tuple[Geometry, dict[str, int]]:
    """The gathered parameter group after group, each with its heads role after role; pieces by role, and rows of each role.

    Within a checkpoint tensor the groups' heads follow each other. A query's output gate lies behind the group's queries here,
    and behind its own head there.
    """
    per_group = facts.heads // facts.groups
    heads = {"q": (per_group, per_group) if facts.has_output_gate else (per_group,), "k": (1,), "v": (1,)}
    parts = {role: heads[role] for role in roles}
    shape, held, row = _attention_rows(facts, parts)
    head = facts.head_size * row
    in_group = sum(sum(counts) for counts in parts.values()) * head
    found: dict[str, tuple[Piece, ...]] = {}
    at = 0
    for role, counts in parts.items():
        width = len(counts)  # blocks of one head size that the checkpoint keeps together
        count = counts[0]
        found[role] = tuple(
            Piece(
                StridedView(block * head, (facts.groups, count, head), (count * width * head, width * head, 1)),
                StridedView(at + block * count * head, (facts.groups, count, head), (in_group, head, 1)),
            )
            for block in range(width)
        )
        at += sum(counts) * head
    rows = {role: facts.groups * sum(counts) * facts.head_size for role, counts in parts.items()}
    return Geometry(shape, held, found), rows


def _queries_keys_values(facts: TaskFacts, specs: Mapping[str, TensorSpec]) -> Geometry:
    fused, rows = _fused_attention(facts, tuple(specs))
    for role, spec in specs.items():
        _expect_spec(facts, spec, (rows[role], *facts.shape[1:]))
    return Geometry(fused.shape, fused.held, {specs[role].name: pieces for role, pieces in fused.pieces.items()})


def _concatenated(facts: TaskFacts, specs: Mapping[str, TensorSpec]) -> Geometry:
    """The checkpoint lays all queries, all keys and all values end to end."""
    spec = _only(specs)
    fused, rows = _fused_attention(facts, ("q", "k", "v"))
    _expect_spec(facts, spec, fused.shape)
    row = math.prod(facts.shape[1:])
    moved: list[Piece] = []
    start = 0
    for role, pieces in fused.pieces.items():
        for piece in pieces:
            view = piece.canonical
            moved.append(Piece(StridedView(view.offset + start * row, view.shape, view.stride), piece.storage))
        start += rows[role]
    return Geometry(fused.shape, fused.held, {spec.name: tuple(moved)})


def _components(facts: TaskFacts, specs: Mapping[str, TensorSpec]) -> Geometry:
    spec = _only(specs)
    shape, held = _rows(facts, facts.components)
    _expect_spec(facts, spec, shape)
    return Geometry(shape, held, {spec.name: _same(spec)})


_KINDS: Mapping[str, Callable[[TaskFacts, Mapping[str, TensorSpec]], Geometry]] = {
    "DirectMapping": _replicated,
    "ReplicatedMapping": _replicated,
    "ColumnParallelMapping": _column,
    "RowParallelMapping": _row,
    "GatedMLPMapping": _gated,
    "QKVMapping": _queries_keys_values,
    "KVMapping": _queries_keys_values,
    "ConcatenatedQKVMapping": _concatenated,
    "MambaInProjMapping": _components,
    "MambaConv1dMapping": _components,
    "GDNConv1dMapping": _components,
    "FusedExpertMapping": _stacked_expert,
    "FusedGatedExpertMapping": _stacked_gated,
}
