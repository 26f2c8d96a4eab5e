"""Proofs at start: one catalog, every canonical element owned exactly once, equal replicas.

What ranks exchange are strided views and digests, never a word per element. Every rank receives the same claims and comes
to the same verdict, so all of them refuse or none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltarefit import kernels
from deltarefit.canonical import Catalog, TensorDigest, TensorSpec
from deltarefit.errors import RejectedError
from deltarefit.pieces import Piece, StridedView
from deltarefit.source.collective import Collective, together
from deltarefit.source.task import ConversionTask
from deltarefit.wording import some_of

__all__ = ["agree_on_catalog", "audit_coverage", "audit_replicas", "check_manifest"]

View = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and stride of a view on a canonical tensor, in elements."""
MessageT = TypeVar("MessageT")

_SHOWN = 5


class _Claim(msgspec.Struct, frozen=True, array_like=True):
    tensor: int
    """Position in the catalog."""
    views: tuple[View, ...]


class _ReplicaSet(msgspec.Struct, frozen=True, array_like=True):
    ranks: tuple[int, ...]
    digest: str


class _ShardDigest(msgspec.Struct, frozen=True, array_like=True):
    key: str
    ranks: tuple[int, ...]
    digest: str


def check_manifest(catalog: Catalog, manifest: Catalog) -> None:
    """Hold the catalog that an adapter derived against the checkpoint's own, in both directions.

    Raises:
        RejectedError: a tensor is missing on either side, or differs in dtype or shape; the text names the first ones.
    """
    problems = [f"{name}: the checkpoint has it, the model gives no source for it" for name in manifest if name not in catalog]
    problems += [f"{name}: the model gives it, the checkpoint lacks it" for name in catalog if name not in manifest]
    problems += [
        f"{name}: the checkpoint has {manifest[name]}, the model gives {spec}"
        for name, spec in catalog.items()
        if name in manifest and manifest[name] != spec
    ]
    if problems:
        raise RejectedError(
            f"model and checkpoint differ in {_listed(problems)}; expected the same tensors, dtypes and shapes. "
            "Load the trainer from this checkpoint, or name the one it was loaded from"
        )


def agree_on_catalog(catalog: Catalog, collective: Collective) -> None:
    """Check that every rank derived the same catalog.

    Raises:
        RejectedError: one differs; the text names ranks and first names.
    """
    digests = _exchange(collective, catalog.digest, str)
    if len(set(digests)) == 1:
        return
    theirs = Catalog.from_wire(collective.broadcast(catalog.to_wire() if collective.rank == 0 else None))
    differences = sorted(name for name in catalog.keys() | theirs.keys() if catalog.get(name) != theirs.get(name))
    listed = _exchange(collective, differences[:_SHOWN], list[str])
    shown = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in enumerate(listed) if names)
    raise RejectedError(
        f"catalogs differ from rank 0's on training ranks: {shown}; expected every rank to train the same model"
    )


def audit_coverage(
    catalog: Catalog, owned: Sequence[ConversionTask], collective: Collective, *, residual: AbstractSet[str] = frozenset()
) -> None:
    """Prove that the owners' tasks together cover every canonical element exactly once, and ``residual`` tensors not at all.

    Raises:
        RejectedError: an element has no owner or more than one, or a task's tensor is not in the catalog. The text names the
            first tensors with the flat index and the ranks.
    """
    together(collective, "listing owned tensors", lambda: _check_known(catalog, owned))
    places = {name: place for place, name in enumerate(catalog)}
    views: dict[str, list[View]] = {}
    for task in owned:
        views.setdefault(task.spec.name, []).extend(_view(piece) for piece in task.pieces if piece.num_elements)
    mine = [_Claim(places[name], tuple(found)) for name, found in views.items()]
    claims = _exchange(collective, mine, list[_Claim])
    by_tensor: dict[int, list[tuple[int, tuple[View, ...]]]] = {}
    for rank, listed in enumerate(claims):
        for claim in listed:
            by_tensor.setdefault(claim.tensor, []).append((rank, claim.views))
    problems = _coverage_problems(catalog, by_tensor, residual)
    if problems:
        raise RejectedError(
            f"ownership covers {_listed(problems)}; expected exactly one owner for every canonical element. "
            "The adapter's shards or replica sets are wrong for this layout"
        )


def audit_replicas(tasks: Sequence[ConversionTask], collective: Collective) -> None:
    """Check that the copies of every shard are equal bit for bit: ownership relies on it (paper 4.1).

    Reads all weights that this rank holds. Ranks first exchange one digest per replica set, and details only where one differs.

    Raises:
        RejectedError: copies differ, or ranks disagree on who holds copies; the text names tensors and ranks.
    """
    if collective.world_size == 1:
        return
    digests = together(collective, "reading replicas", lambda: _replica_digests(tasks))
    mine = [_ReplicaSet(ranks, _combined(shards)) for ranks, shards in digests.items()]
    gathered = _exchange(collective, mine, list[_ReplicaSet])
    suspect = _disagreeing({entry.ranks: entry.digest for entry in listed} for listed in gathered)
    if not suspect:
        return
    details = [
        _ShardDigest(key, ranks, digest.hex())
        for ranks, shards in digests.items()
        if ranks in suspect
        for key, digest in sorted(shards.items())
    ]
    listed_details = _exchange(collective, details, list[_ShardDigest])
    raise RejectedError(
        f"replicas differ in {_listed(_replica_problems(listed_details))}; expected bitwise equal copies. "
        "Find out where the ranks diverged, or reload them from one checkpoint"
    )


def _replica_digests(tasks: Sequence[ConversionTask]) -> dict[tuple[int, ...], dict[str, TensorDigest]]:
    digests: dict[tuple[int, ...], dict[str, TensorDigest]] = {}
    for task in tasks:
        if len(task.replicas) > 1:
            pieces = [piece.normalised() for piece in task.pieces if piece.num_elements]
            digest = kernels.digest(task.words(), pieces) if pieces else TensorDigest()
            digests.setdefault(task.replicas, {})[task.key] = digest
    return digests


def _combined(shards: Mapping[str, TensorDigest]) -> str:
    lines = "".join(f"{key}\0{shards[key].hex()}\n" for key in sorted(shards))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def _disagreeing(by_rank: Iterable[Mapping[tuple[int, ...], str]]) -> set[tuple[int, ...]]:
    """Replica sets of which the members do not all report the same digest; a member that reports none disagrees."""
    listed = list(by_rank)
    sets = {ranks for reported in listed for ranks in reported}
    bad = set()
    for ranks in sets:
        reports = [listed[rank].get(ranks) if rank < len(listed) else None for rank in ranks]
        if None in reports or len(set(reports)) > 1:
            bad.add(ranks)
    return bad


def _replica_problems(by_rank: Sequence[Sequence[_ShardDigest]]) -> list[str]:
    shards: dict[tuple[str, tuple[int, ...]], dict[int, str]] = {}
    for rank, listed in enumerate(by_rank):
        for entry in listed:
            shards.setdefault((entry.key, entry.ranks), {})[rank] = entry.digest
    problems = []
    for (key, ranks), found in sorted(shards.items()):
        absent = [rank for rank in ranks if rank not in found]
        if absent:
            problems.append(f"{key}: ranks {sorted(found)} list copies on ranks {list(ranks)}, ranks {absent} do not")
        elif len(set(found.values())) > 1:
            held: dict[str, list[int]] = {}
            for rank, digest in sorted(found.items()):
                held.setdefault(digest, []).append(rank)
            problems.append(f"{key}: " + ", ".join(f"ranks {same} hold {digest[:8]}" for digest, same in held.items()))
    return problems


def _check_known(catalog: Catalog, owned: Sequence[ConversionTask]) -> None:
    for task in owned:
        if catalog.get(task.spec.name) != task.spec:
            raise RejectedError(f"task {task.key}: {task.spec} is not in the catalog, which has {catalog.get(task.spec.name)}")


def _coverage_problems(
    catalog: Catalog, by_tensor: Mapping[int, Sequence[tuple[int, tuple[View, ...]]]], residual: AbstractSet[str]
) -> list[str]:
    problems = []
    verdicts: dict[tuple[int, tuple[View, ...]], tuple[str, int] | None] = {}
    for place, spec in enumerate(catalog.values()):
        claims = by_tensor.get(place, ())
        views = tuple(sorted(view for _, listed in claims for view in listed))
        if spec.name in residual:
            if views:
                problems.append(
                    f"{spec}: declared residual, but owned directly by ranks {sorted({rank for rank, _ in claims})}"
                )
            continue
        shape = (spec.num_elements, views)  # layers repeat one geometry, so few tensors need the full check
        if shape not in verdicts:
            verdicts[shape] = _check_cover(spec.num_elements, views)
        found = verdicts[shape]
        if found is not None:
            problems.append(_describe(spec, found, claims))
    return problems


def _describe(spec: TensorSpec, found: tuple[str, int], claims: Sequence[tuple[int, tuple[View, ...]]]) -> str:
    kind, flat_index = found
    ranks = sorted(rank for rank, listed in claims for view in listed if _contains(view, flat_index))
    if kind == "none":
        holders = sorted({rank for rank, listed in claims if listed})
        if not holders:
            return f"{spec}: no rank has any part of it; no parameter of the model is mapped to this name"
        return f"{spec}: flat index {flat_index} is owned by no rank (ranks {holders} own other parts)"
    return f"{spec}: flat index {flat_index} is owned more than once, by ranks {ranks}"


def _check_cover(num_elements: int, views: Sequence[View]) -> tuple[str, int] | None:
    """None if the views cover each of ``num_elements`` flat indices exactly once; else what is wrong where."""
    runs = [_runs(view) for view in views]
    starts = np.concatenate([starts for starts, _ in runs]) if runs else np.empty(0, np.int64)
    lengths = np.concatenate([np.full(starts.size, length, np.int64) for starts, length in runs]) if runs else starts
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (starts + lengths)[order]
    before = np.concatenate([np.zeros(1, np.int64), ends])
    after = np.concatenate([starts, np.full(1, num_elements, np.int64)])
    wrong = np.flatnonzero(before != after)
    if not wrong.size:
        return None
    at = int(wrong[0])
    if before[at] < after[at]:
        return "none", int(before[at])
    return "twice", int(after[at]) if at < starts.size else num_elements


def _runs(view: View) -> tuple[NDArray[np.int64], int]:
    """The view as runs of consecutive flat indices: their starts and their common length."""
    offset, shape, stride = view
    axes = list(zip(shape, stride, strict=True))
    length = axes.pop()[0] if axes and axes[-1][1] == 1 else 1
    starts = np.full(1, offset, np.int64)
    for axis_length, axis_stride in axes:
        starts = np.add.outer(starts, np.arange(axis_length, dtype=np.int64) * axis_stride).reshape(-1)
    return starts, length


def _contains(view: View, flat_index: int) -> bool:
    offset, shape, stride = view
    rest = flat_index - offset
    for length, step in zip(shape, stride, strict=True):  # descending strides, each wider than all behind it
        digit = min(rest // step, length - 1)
        if digit < 0:
            return False
        rest -= digit * step
    return rest == 0


def _view(piece: Piece) -> View:
    normal: StridedView = piece.normalised().canonical
    return normal.offset, normal.shape, normal.stride


def _exchange(collective: Collective, mine: MessageT, kind: type[MessageT]) -> list[MessageT]:
    data = collective.all_gather(msgspec.msgpack.encode(mine))
    return [msgspec.msgpack.decode(part, type=kind) for part in data]


def _listed(problems: Sequence[str]) -> str:
    noun = "place" if len(problems) == 1 else "places"
    return f"{len(problems)} {noun}: {some_of(problems, _SHOWN, joint='; ')}"
