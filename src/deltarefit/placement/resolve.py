"""Probing: run a loader on digits to learn where elements go that it moved through temporaries.

The loader really runs, but on shadows of the storage that it writes, and what counts is what it leaves there. So chains of
copies, partial rewrites and tensors that only go together are all seen as they end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import DTYPE_NBYTES, Catalog, TensorSpec, Words
from deltarefit.pieces import Cast, Piece
from deltarefit.placement.digits import Ids, IdSpace, add_digit, random_words
from deltarefit.placement.fit import fit_pieces
from deltarefit.placement.inputs import LoadWeights
from deltarefit.placement.run import Home, OpaqueWrites, group_homes, run_loader
from deltarefit.placement.shadow import Shadow, byte_bounds
from deltarefit.placement.storages import ModelStorage, StorageMap
from deltarefit.placement.watch import Write, WriteKind

__all__ = ["Resolved", "resolve_by_probing"]

_BATCH_NBYTES = 256 * 2**20
"""Canonical bytes that one probing call carries at most, unless one tensor alone is larger."""
_VERIFY_PASSES = 3
"""Passes of random bits; with 8-bit elements a wrong place survives all of them with chance 2^-24."""
_SMALL = 256
"""Smaller tensors get more passes, until every special pattern had its turn."""
_MAX_VERIFY_PASSES = 12

_Mask = NDArray[np.bool_]


@dataclass(slots=True)
class Resolved:
    """What probing found out."""

    homes: dict[str, tuple[Home, ...]] = field(default_factory=dict)
    opaque: dict[str, OpaqueWrites] = field(default_factory=dict)
    constants: list[Write] = field(default_factory=list)
    """Writes that leave the same bits whatever the tensor holds."""


def resolve_by_probing(
    load_weights: LoadWeights,
    storages: StorageMap,
    catalog: Catalog,
    names: Sequence[str],
    writes: Mapping[str, Sequence[Write]],
    *,
    seed: int,
) -> Resolved:
    """Find homes of ``names``, which are in catalog order and whose survey writes are ``writes``."""
    result = Resolved()
    for batch in _batches(names, catalog, writes):
        for wider in _widening(batch, catalog):
            probing = _Probing(load_weights, storages, wider, {name: writes[name] for name in batch}, seed)
            found = probing.resolve()
            if not probing.misses_others:
                break
        result.homes.update(found.homes)
        result.opaque.update(found.opaque)
        result.constants += found.constants
    return result


def _batches(names: Sequence[str], catalog: Catalog, writes: Mapping[str, Sequence[Write]]) -> Iterator[list[str]]:
    """Neighbours in name order together, so that tensors that a loader joins are most likely probed together.

    Tensors that write the same view are kept apart: only the last would be seen.
    """
    batch: list[str] = []
    nbytes = 0
    taken: set[object] = set()
    for name in names:
        keys = {write.key for write in writes[name]}
        if batch and (nbytes + catalog[name].nbytes > _BATCH_NBYTES or keys & taken):
            yield batch
            batch, nbytes, taken = [], 0, set()
        batch.append(name)
        nbytes += catalog[name].nbytes
        taken |= keys
    if batch:
        yield batch


def _widening(batch: Sequence[str], catalog: Catalog) -> Iterator[list[TensorSpec]]:
    """The batch, then with the tensors of the same module, then of the module above: a loader may want several in one call."""
    seen = 0
    for levels in (0, 1, 2):
        prefixes = tuple({".".join(name.split(".")[: -levels or None]) for name in batch})
        wanted = [spec for spec in catalog.values() if _starts(spec.name, prefixes, levels) or spec.name in batch]
        if len(wanted) > seen and (not levels or sum(spec.nbytes for spec in wanted) <= _BATCH_NBYTES):
            seen = len(wanted)
            yield wanted


def _starts(name: str, prefixes: tuple[str, ...], levels: int) -> bool:
    return levels > 0 and any(not prefix or name.startswith(prefix + ".") for prefix in prefixes)


@dataclass(slots=True, eq=False)
class _View:
    """One written view and what the passes said about its elements, each shape [elements]."""

    write: Write
    ids: Ids
    wrong: _Mask
    """Elements that do not hold the bits of the element that their id names."""
    steady: _Mask
    """Elements that held the same bits in every pass of random bits: constants."""
    last: Words | None = None

    @property
    def owner(self) -> str | None:
        return self.write.source.name if self.write.source is not None else self.write.current


class _Probing:
    """One batch."""

    def __init__(
        self,
        load_weights: LoadWeights,
        storages: StorageMap,
        specs: Sequence[TensorSpec],
        writes: Mapping[str, Sequence[Write]],
        seed: int,
    ) -> None:
        self._load_weights = load_weights
        self._storages = storages
        self._specs = specs
        self._writes = writes
        self._space = IdSpace.of(specs)
        self._views: dict[object, _View] = {}
        for write in (write for listed in writes.values() for write in listed):
            size = write.view.num_elements
            self._views[write.key] = _View(write, np.zeros(size, np.int64), np.zeros(size, bool), np.ones(size, bool))
        self._generator = np.random.default_rng(seed)
        self.misses_others = False
        """Whether the loader did not write what it writes when it gets all tensors."""

    def resolve(self) -> Resolved:
        problem = self._learn_ids() or self._verify()
        if problem is not None:
            return self._opaque(dict.fromkeys(self._writes, problem))
        reasons = self._reasons()
        grouped = self._fit(reasons)
        result = self._opaque(reasons)
        result.homes = {name: group_homes(found) for name, found in grouped.items() if name not in reasons}
        result.constants = [view.write for view in self._views.values() if view.steady.all() and not view.ids.any()]
        return result

    def _opaque(self, reasons: Mapping[str, str]) -> Resolved:
        opaque = {name: OpaqueWrites(tuple(self._writes.get(name, ())), reason) for name, reason in reasons.items()}
        return Resolved(opaque=opaque)

    def _run(self, content: Callable[[TensorSpec], Words]) -> tuple[Shadow, str | None]:
        ranges = [
            (view.write.storage, *byte_bounds(view.write.view, DTYPE_NBYTES[view.write.dtype])) for view in self._views.values()
        ]
        shadow = Shadow(self._storages, ranges)
        run = run_loader(self._load_weights, self._storages, self._specs, content=content, shadow=shadow)
        if run.failure is not None:
            self.misses_others = True
            return shadow, f"the loader fails on a probe: {run.failure}"
        written = {write.key for write in run.writes}
        if any(view.write.kind is WriteKind.COPY and key not in written for key, view in self._views.items()):
            self.misses_others = True
            return shadow, "the loader writes it only together with other tensors"
        return shadow, None

    def _learn_ids(self) -> str | None:
        for digit in range(self._space.num_digits):
            shadow, problem = self._run(lambda spec, d=digit: self._space.digit(spec.name, d))  # type: ignore[misc]
            if problem is not None:
                return problem
            for view in self._views.values():
                write = view.write
                add_digit(view.ids, write.dtype, shadow.read(write.storage, write.view, write.dtype), digit)
        return None

    def _verify(self) -> str | None:
        """Random bits must arrive where the digits did."""
        smallest = min((spec.num_elements for spec in self._specs if spec.num_elements), default=1)
        passes = min(_MAX_VERIFY_PASSES, max(_VERIFY_PASSES, _SMALL // smallest))
        for turn in range(passes):
            bits = {spec.name: random_words(spec.dtype, spec.num_elements, self._generator, turn=turn) for spec in self._specs}
            shadow, problem = self._run(lambda spec, b=bits: b[spec.name].copy())  # type: ignore[misc]
            if problem is not None:
                return problem
            for view in self._views.values():
                words = shadow.read(view.write.storage, view.write.view, view.write.dtype)
                view.wrong |= self._expected_differs(view, bits, words)
                if view.last is not None:
                    view.steady &= words == view.last
                view.last = words
        return None

    def _expected_differs(self, view: _View, bits: Mapping[str, Words], words: Words) -> _Mask:
        differs = np.ones(words.size, bool)
        for name, places, flat_index in self._space.split(view.ids):
            cast = _bit_cast(self._space.specs[name].dtype, view.write.dtype)
            expected = bits[name][flat_index]
            if cast is Cast.WIDEN:
                expected = expected.astype(words.dtype) << words.dtype.type(16)
            if cast is not None:
                differs[places] = expected != words[places]
        return differs

    def _reasons(self) -> dict[str, str]:
        """Names whose bits do not arrive unchanged. Constants belong to no name and lose their ids."""
        reasons: dict[str, str] = {}
        for view in self._views.values():
            computed = view.wrong & ~view.steady
            if computed.any() and view.owner is not None:
                reasons[view.owner] = f"the loader computes what it writes to {view.write.storage.key} ({view.write.dtype})"
            view.ids[view.wrong] = 0
        return reasons

    def _fit(self, reasons: dict[str, str]) -> dict[str, dict[tuple[str, int], tuple[ModelStorage, list[Piece]]]]:
        """Pieces per name, by storage and width; names that fit none are added to ``reasons``."""
        grouped: dict[str, dict[tuple[str, int], tuple[ModelStorage, list[Piece]]]] = {}
        for view, positions, ids in self._distinct_elements():
            width = DTYPE_NBYTES[view.write.dtype]
            for name, places, flat_index in self._space.split(ids):
                cast = _bit_cast(self._space.specs[name].dtype, view.write.dtype)
                pieces = None if cast is None else fit_pieces(flat_index, positions[places], cast)
                if pieces is None:
                    reasons[name] = f"the loader scatters it over {view.write.storage.key} in no strided way"
                    continue
                home = grouped.setdefault(name, {}).setdefault((view.write.storage.key, width), (view.write.storage, []))
                home[1].extend(pieces)
        return grouped

    def _distinct_elements(self) -> Iterator[tuple[_View, Ids, Ids]]:
        """Views with their elements' positions and ids; an element of several views counts in the first."""
        seen: dict[tuple[str, int], list[Ids]] = {}
        for view in self._views.values():
            positions = view.write.view.positions()
            ids = view.ids
            earlier = seen.setdefault((view.write.storage.key, DTYPE_NBYTES[view.write.dtype]), [])
            low, high = view.write.view.first, view.write.view.last
            for other in earlier:
                if other[0] <= high and other[-1] >= low:
                    ids = np.where(np.isin(positions, other), 0, ids)
            earlier.append(np.sort(positions))
            yield view, positions, ids


def _bit_cast(canonical: str, stored: str) -> Cast | None:
    if DTYPE_NBYTES[canonical] == DTYPE_NBYTES[stored]:
        return Cast.SAME
    return Cast.WIDEN if (canonical, stored) == ("BF16", "F32") else None
