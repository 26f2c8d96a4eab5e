"""Learn where post-load steps leave every canonical bit, by running load and post-load on probes (design section 4).

A pass spells one digit of each granule's number in raw bits; what a final granule holds after all passes says where it came
from. That is believed only after random loads came out as foretold, bit by bit: engines also sum, scale and take maxima, and
near-constant bytes of such results look like moved ones for a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import Catalog, TensorSpec, Words
from deltarefit.errors import RejectedError
from deltarefit.placement.digits import ordinary_words, random_words
from deltarefit.placement.fit import MAX_PIECES, fit_pieces
from deltarefit.placement.granules import BitHome, bytes_of_granules, granules_of_bytes
from deltarefit.placement.units import RawBytes, UnitRig

__all__ = ["UnitMap", "learn_unit"]

_ORDINARY_PASSES = 4
"""Further loads of ordinary numbers: among random bits are NaN, which swallow maxima and sums."""
VERIFY_PASSES = 20
"""Loads of random bits. Three are too few: compensation sums then pass for constants ."""
_LEVELS = (8, 4, 1)
_MAX_GRANULES = 2**28
"""Above so many granules no finer level is tried: numbers of 4 bytes each are kept while learning."""

_Mask = NDArray[np.bool_]
Ids = NDArray[Any]
"""Of 4 bytes as long as they suffice, else of 8."""
Outputs = Mapping[str, RawBytes]


@dataclass(slots=True)
class UnitMap:
    """What a unit's post-load steps do to stored bits."""

    homes: dict[str, tuple[BitHome, ...]] = field(default_factory=dict)
    """Tensors whose every held bit was found again; all places that hold them."""
    lost: dict[str, str] = field(default_factory=dict)
    """Tensors of which bits cannot be read back from what serves, but show in recomputed bytes; with the reason."""
    unseen: dict[str, str] = field(default_factory=dict)
    """Tensors of which bits show nowhere; with the reason."""
    hidden: str = ""
    """What the unit holds that cannot be seen, in words; empty if nothing."""
    recomputed: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Per path byte ranges that post-load computes, shape [ranges, 2]: first and end."""
    nbytes: dict[str, int] = field(default_factory=dict)
    """Of every storage that depends on canonical tensors, by path."""
    bits: int = 8
    """Size of the granules that were told apart."""
    num_passes: int = 0


@dataclass(slots=True, eq=False)
class _Level:
    """What one granule size showed."""

    bits: int
    constants: Outputs
    ids: dict[str, Ids]
    """Number of the source granule per final granule, from 1; 0 for none."""
    recomputed: dict[str, _Mask]
    """Per byte."""
    reached: _Mask
    """Per source granule."""
    varies: set[str]


def learn_unit(rig: UnitRig, catalog: Catalog, *, seed: int = 0, verify: int = VERIFY_PASSES) -> UnitMap:
    """Learn one unit. Memory while learning: about six bytes for each granule of the unit and of what it becomes.

    Raises:
        RejectedError: load or post-load fails on a probe, or leaves other tensors from one time to the next.
    """
    return _Learning(rig, catalog, seed, verify).learn()


class _Learning:
    def __init__(self, rig: UnitRig, catalog: Catalog, seed: int, verify: int) -> None:
        self._rig = rig
        self._specs = [catalog[name] for name in rig.placed]
        self._computed = [catalog[name] for name in rig.computed]
        self._seed = seed
        self._verify = verify
        self._starts = np.cumsum([0, *(spec.nbytes for spec in self._specs)])
        self._num_passes = 0
        self._reference: dict[str, RawBytes] | None = None

    @property
    def _nbytes(self) -> int:
        return int(self._starts[-1])

    def learn(self) -> UnitMap:
        result = UnitMap()
        expected = self._expected()
        constants = self._run(np.zeros(self._nbytes, np.uint8))
        result.hidden = self._hidden(constants)
        best = self._level(_LEVELS[0], constants)
        wanted = self._without_unseen(best, expected)
        for bits in _LEVELS[1:]:
            if _share(best, wanted) == 1 or self._nbytes * 8 // bits > _MAX_GRANULES:
                break
            level = self._level(bits, constants)
            if _share(level, wanted) <= _share(best, wanted):
                break  # what is still missing is not cut finer but computed, or dropped
            best = level
        self._sort(best, expected, result)
        result.num_passes = self._num_passes
        return result

    # --- running probes -------------------------------------------------------------------------------------------

    def _run(self, stream: RawBytes, computed: Mapping[str, Words] | None = None) -> dict[str, RawBytes]:
        self._num_passes += 1
        words = {
            spec.name: stream[start : start + spec.nbytes].view(spec.word_dtype)
            for spec, start in zip(self._specs, self._starts, strict=False)
        }
        return self._rig.run({**words, **(computed or {})})

    def _random(self, generator: np.random.Generator, turn: int) -> tuple[RawBytes, dict[str, Words]]:
        def words(spec: TensorSpec) -> Words:
            if turn >= self._verify:
                return ordinary_words(spec.dtype, spec.num_elements, generator)
            return random_words(spec.dtype, spec.num_elements, generator, turn=turn)

        parts = [words(spec).view(np.uint8) for spec in self._specs]
        return np.concatenate(parts or [np.zeros(0, np.uint8)]), {spec.name: words(spec) for spec in self._computed}

    def _hidden(self, constants: Outputs) -> str:
        """What cannot be seen: opaque objects, and bytes that differ between two equal loads, such as addresses."""
        first = self._rig.reached  # kept until the second run is over, so that an address is not taken twice
        again = self._run(np.zeros(self._nbytes, np.uint8))
        _require_same(constants, again)
        if first.opaque:
            path, kind = next(iter(first.opaque.items()))
            return f"{path} is a {kind}, whose content cannot be read"
        for path, raw in constants.items():
            if not np.array_equal(raw, again[path]):
                return f"{path} differs between two equal loads, as handles and addresses do"
        return ""

    def _expected(self) -> _Mask:
        """Per source byte, whether this rank loads it."""
        parts = [np.repeat(self._rig.held(spec.name), spec.element_nbytes) for spec in self._specs]
        return np.concatenate(parts or [np.zeros(0, bool)])

    # --- one granule size -----------------------------------------------------------------------------------------

    def _level(self, bits: int, constants: Outputs) -> _Level:
        count = self._nbytes * 8 // bits
        width: Any = np.dtype(np.int32 if count < 2**31 - 1 else np.int64)
        numbers: Ids = np.arange(1, count + 1, dtype=width)
        before = {path: granules_of_bytes(raw, min(bits, 8)) for path, raw in constants.items()}
        ids: dict[str, Ids] = {path: np.zeros(granules.size, width) for path, granules in before.items()}
        for digit in range(-(-count.bit_length() // bits)):
            spelt = ((numbers >> (bits * digit)) & ((1 << bits) - 1)).astype(np.uint8)
            outputs = self._run(bytes_of_granules(spelt, bits))
            _require_same(constants, outputs)
            for path, raw in outputs.items():
                ids[path] |= (granules_of_bytes(raw, bits) ^ before[path]).astype(width) << (bits * digit)
        wrong = {path: (array < 0) | (array > count) for path, array in ids.items()}
        for path, array in ids.items():
            array[wrong[path]] = 0
        varies = self._check(bits, before, ids, wrong)
        recomputed = {path: _bytewise(mask, bits) for path, mask in wrong.items()}
        reached = np.zeros(count + 1, bool)
        for path, array in ids.items():
            self._distrust(array, recomputed, path, bits)
            reached[array] = True
        return _Level(bits, constants, ids, recomputed, reached[1:], varies)

    def _check(self, bits: int, before: Outputs, ids: Mapping[str, Ids], wrong: Mapping[str, _Mask]) -> set[str]:
        """Random loads must leave what the numbers foretell. Returns the storages that any load changed."""
        generator = np.random.default_rng(self._seed)
        varies = {path for path, array in ids.items() if array.any() or wrong[path].any()}
        for turn in range(self._verify + _ORDINARY_PASSES):
            stream, computed = self._random(generator, turn)
            outputs = self._run(stream, computed)
            _require_same(before, outputs, per_byte=8 // bits)
            source = np.concatenate([np.zeros(1, np.uint8), granules_of_bytes(stream, bits)])
            for path, raw in outputs.items():
                differs = granules_of_bytes(raw, bits) != (source[ids[path]] ^ before[path])
                if differs.any():
                    varies.add(path)
                    np.logical_or(wrong[path], differs, out=wrong[path])
        return varies

    @staticmethod
    def _distrust(ids: Ids, recomputed: Mapping[str, _Mask], path: str, bits: int) -> None:
        """In a storage where anything is computed, bytes that look constant count as computed too."""
        mask = recomputed[path]
        if not mask.any():
            return
        mask |= _bytewise(ids == 0, bits)
        ids[np.repeat(mask, 8 // bits)] = 0

    # --- what it means --------------------------------------------------------------------------------------------

    def _sort(self, level: _Level, expected: _Mask, result: UnitMap) -> None:
        result.bits = level.bits
        result.nbytes = {path: int(level.constants[path].size) for path in level.varies}
        result.recomputed = {path: _ranges(mask) for path, mask in level.recomputed.items() if mask.any()}
        reached = _all_of_byte(level.reached, level.bits) | ~expected
        missing: dict[str, str] = {}
        for spec, start in zip(self._specs, self._starts, strict=False):
            count = spec.nbytes - int(reached[start : start + spec.nbytes].sum())
            if count:
                missing[spec.name] = f"{count} of its {spec.nbytes} bytes cannot be read back after post-load"
        homes, tangled = self._homes(level, missing)
        result.homes = homes
        missing |= tangled | {spec.name: "the loader computes with its values" for spec in self._computed}
        for name, reason in missing.items():
            where = self._influence(name, level)
            if where:
                result.lost[name] = f"{reason}; it shows in {where}"
            else:
                result.unseen[name] = f"{reason}, and nothing that hangs on the layer changes with it"

    def _without_unseen(self, level: _Level, expected: _Mask) -> _Mask:
        """The expected bytes without tensors that show nowhere: finer granules would not show them either."""
        wanted = expected.copy()
        reached = _all_of_byte(level.reached, level.bits) | ~expected
        for spec, start in zip(self._specs, self._starts, strict=False):
            mine = slice(start, start + spec.nbytes)
            if not reached[mine].all() and not self._differing(spec.name):
                wanted[mine] = False
        return wanted

    def _influence(self, name: str, level: _Level) -> str:
        """The first path whose recomputed bytes change with this tensor alone; empty if there is none."""
        return next((path for path, mask in self._differing(name).items() if (mask & level.recomputed[path]).any()), "")

    def _differing(self, name: str) -> dict[str, _Mask]:
        """Per path, the bytes that change when this tensor alone is loaded with other bits."""
        stream, computed = self._random(np.random.default_rng(self._seed + 1), self._verify)
        if self._reference is None:
            self._reference = self._run(stream, computed)
        other, other_computed = self._random(np.random.default_rng(self._seed + 2), self._verify)
        for spec, start in zip(self._specs, self._starts, strict=False):
            if spec.name == name:
                stream[start : start + spec.nbytes] = other[start : start + spec.nbytes]
        if name in computed:
            computed[name] = other_computed[name]
        after = self._run(stream, computed)
        differing = {path: raw != after[path] for path, raw in self._reference.items()}
        return {path: mask for path, mask in differing.items() if mask.any()}

    def _homes(self, level: _Level, missing: Mapping[str, str]) -> tuple[dict[str, tuple[BitHome, ...]], dict[str, str]]:
        homes: dict[str, list[BitHome]] = {}
        tangled: dict[str, str] = {}
        starts = self._starts * 8 // level.bits
        for path, array in level.ids.items():
            positions = np.flatnonzero(array)
            if not positions.size:
                continue
            numbers = array[positions].astype(np.int64) - 1
            order = np.argsort(numbers, kind="stable")
            numbers, positions = numbers[order], positions[order]
            bounds = np.searchsorted(numbers, starts)
            flips = granules_of_bytes(level.constants[path], level.bits)
            for spec, start, low, high in zip(self._specs, starts, bounds, bounds[1:], strict=False):
                if low == high or spec.name in missing or spec.name in tangled:
                    continue
                pairs = _Pairs(numbers[low:high] - int(start), positions[low:high])
                found = _fit(spec, path, pairs, flips, level.bits)
                if isinstance(found, str):
                    tangled[spec.name] = found
                else:
                    homes.setdefault(spec.name, []).extend(found)
        return {name: tuple(found) for name, found in homes.items() if name not in tangled}, tangled


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Canonical and final granules of one tensor in one storage, canonical ones ascending."""

    canonical: NDArray[np.int64]
    final: NDArray[np.int64]


def _fit(spec: TensorSpec, path: str, pairs: _Pairs, flips: RawBytes, bits: int) -> list[BitHome] | str:
    found: list[BitHome] = []
    for copy in _copies(pairs):
        constants = np.unique(flips[copy.final])
        coarse, size = _coarsened(copy, bits, spec.element_nbytes * 8)
        flip = int(constants[0])
        if constants.size > 1:
            return f"post-load flips bits of it in {path} in a pattern that is not followed"
        if flip and size != bits:
            flip = sum(flip << shift for shift in range(0, size, bits))
        pieces = fit_pieces(coarse.canonical, coarse.final, limit=MAX_PIECES)
        elements = _elements(coarse.canonical, spec.element_nbytes * 8 // size)
        held = None if elements is None else fit_pieces(elements, elements, limit=MAX_PIECES)
        if pieces is None or held is None:
            return f"post-load scatters it over {path} in no strided way"
        found.append(BitHome(path, size, tuple(pieces), flip, tuple(piece.canonical for piece in held)))
    return found


def _elements(granules: NDArray[np.int64], per_element: int) -> NDArray[np.int64] | None:
    """The elements that ascending granules make up; None if one is there in part only."""
    if granules.size % per_element:
        return None
    rows = granules.reshape(-1, per_element)
    is_whole = bool((rows == rows[:, :1] // per_element * per_element + np.arange(per_element)).all())
    return rows[:, 0] // per_element if is_whole else None


def _copies(pairs: _Pairs) -> Sequence[_Pairs]:
    """Cut so that no canonical granule comes twice in a part: one part per copy that post-load made within the storage."""
    again = np.concatenate([[False], pairs.canonical[1:] == pairs.canonical[:-1]])
    if not again.any():
        return [pairs]
    first = np.flatnonzero(~again)
    turn = np.arange(again.size) - np.repeat(first, np.diff(np.append(first, again.size)))
    return [_Pairs(pairs.canonical[turn == k], pairs.final[turn == k]) for k in range(int(turn.max()) + 1)]


def _coarsened(pairs: _Pairs, bits: int, element_bits: int) -> tuple[_Pairs, int]:
    """The same pairs in granules as large as possible, up to the element."""
    size = bits
    while size < element_bits:
        ratio = {1: 4, 4: 2}.get(size, 2)
        if pairs.canonical.size % ratio:
            break
        canonical, final = pairs.canonical.reshape(-1, ratio), pairs.final.reshape(-1, ratio)
        steps = np.arange(ratio)
        is_joined = not (canonical[:, 0] % ratio).any() and not (final[:, 0] % ratio).any()
        if not is_joined or (canonical - steps != canonical[:, :1]).any() or (final - steps != final[:, :1]).any():
            break
        pairs = _Pairs(canonical[:, 0] // ratio, final[:, 0] // ratio)
        size *= ratio
    return pairs, size


def _require_same(first: Outputs, second: Outputs, *, per_byte: int = 1) -> None:
    left = {path: raw.size for path, raw in first.items()}
    right = {path: raw.size * per_byte for path, raw in second.items()}
    if left != right:
        differing = sorted(path for path in {*left, *right} if left.get(path) != right.get(path))
        raise RejectedError(f"post-load leaves other tensors from one load to the next, first {differing[:3]}")


def _bytewise(granules: _Mask, bits: int) -> _Mask:
    """Per byte, whether any of its granules is marked; a copy."""
    return granules.copy() if bits == 8 else np.asarray(granules.reshape(-1, 8 // bits).any(axis=1))


def _all_of_byte(granules: _Mask, bits: int) -> _Mask:
    return granules if bits == 8 else np.asarray(granules.reshape(-1, 8 // bits).all(axis=1))


def _share(level: _Level, expected: _Mask) -> float:
    """Part of the loaded source bytes that were found again whole."""
    wanted = int(expected.sum())
    return 1.0 if not wanted else int((_all_of_byte(level.reached, level.bits) & expected).sum()) / wanted


def _ranges(mask: _Mask) -> NDArray[np.int64]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2).astype(np.int64)
