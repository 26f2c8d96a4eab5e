"""Learn where post-load steps leave every canonical bit, by running load and post-load on probes.

A pass spells one digit of each granule's number in raw bits; what a final granule holds after all passes says where it came
from. That is believed only after random loads came out as foretold, bit by bit: engines also sum, scale and take maxima, and
near-constant bytes of such results look like moved ones for a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltarefit.canonical import Catalog, TensorSpec, Words
from deltarefit.errors import RejectedError
from deltarefit.placement.bit_homes import GranulePairs, fit_bit_homes, inverse
from deltarefit.placement.digits import ordinary_words, random_words
from deltarefit.placement.granules import (
    BitHome,
    all_of_byte,
    any_of_byte,
    any_of_granule,
    bytes_of_granules,
    granules_of_bytes,
    marked_ranges,
)
from deltarefit.placement.units import RawBytes, UnitRig

__all__ = ["HiddenState", "UnitMap", "learn_unit"]

_RANDOM_PASSES = 20
"""Loads of random bits. Three are too few: compensation sums then pass for constants."""
_ORDINARY_PASSES = 4
"""Further loads of ordinary numbers: among random bits are NaN, which swallow maxima and sums."""
_PART = 2**22
_SEED = 0
_MIN_ADDRESS = 2**31
"""Whole numbers from here on are taken for addresses, which differ from load to load without meaning anything."""
_INFLUENCE_TRIES = 8
"""Other contents tried before a tensor is said to show nowhere: of three scales only the largest shows."""
_LEVELS = (8, 4, 1)
_MAX_GRANULES = 2**28
"""Above so many granules no finer level is tried: numbers of 4 bytes each are kept while learning."""

_Mask = NDArray[np.bool_]
Ids = NDArray[Any]
"""Of 4 bytes as long as they suffice, else of 8."""
Outputs = Mapping[str, RawBytes]


@dataclass(frozen=True, slots=True)
class HiddenState:
    """State of a unit that no refit could keep right."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path} {self.problem}"


@dataclass(slots=True)
class UnitMap:
    """What a unit's post-load steps do to stored bits."""

    homes: dict[str, tuple[BitHome, ...]] = field(default_factory=dict)
    """Tensors whose every held bit was found again; all places that hold them."""
    lost: dict[str, str] = field(default_factory=dict)
    """Tensors of which bits cannot be read back from what serves, but show in recomputed bytes; with the reason."""
    unseen: dict[str, str] = field(default_factory=dict)
    """Tensors of which bits show nowhere; with the reason."""
    hidden: HiddenState | None = None
    """Something that the unit holds and that cannot be followed."""
    recomputed: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Per path byte ranges that post-load computes, shape [ranges, 2]: first and end."""
    nbytes: dict[str, int] = field(default_factory=dict)
    """Of every storage that depends on canonical tensors, by path."""


@dataclass(slots=True, eq=False)
class _Final:
    """One storage after post-load."""

    bits: int
    """Size of its granules: as small as was probed, or as large as all of it hangs together."""
    ids: Ids
    """Number of the source granule per granule, from 1; 0 for none."""
    before: NDArray[Any]
    """Granules after a load of zeros."""
    wrong: _Mask
    """Granules that are not what their numbers foretell."""

    def computed(self) -> _Mask:
        """Per byte, whether post-load computes it. Where anything is computed, bytes that look constant count as computed."""
        mask = any_of_byte(self.wrong, self.bits)
        if mask.any():
            mask |= any_of_byte(self.ids == 0, self.bits)
        return mask


@dataclass(slots=True, eq=False)
class _Level:
    """What one granule size showed."""

    bits: int
    finals: dict[str, _Final]
    recomputed: dict[str, _Mask]
    """Per byte."""
    reached: _Mask
    """Per source byte."""
    varies: set[str]


def learn_unit(rig: UnitRig, catalog: Catalog) -> UnitMap:
    """Learn one unit. Memory while learning: about 17 bytes for each byte of the unit where granules are bytes.

    Raises:
        RejectedError: load or post-load fails on a probe, or leaves other tensors from one time to the next.
    """
    return _Learning(rig, catalog).learn()


class _Learning:
    def __init__(self, rig: UnitRig, catalog: Catalog) -> None:
        self._rig = rig
        self._specs = [catalog[name] for name in rig.placed]
        self._computed = [catalog[name] for name in rig.computed]
        self._starts = np.cumsum([0, *(spec.nbytes for spec in self._specs)])
        self._reference: dict[str, RawBytes] | None = None
        self._steady_numbers: dict[str, str] = {}
        """By path, numbers of Python that are the same after each load, as far as was seen."""
        self._computed_number = ""
        """The path of one that is not."""

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
        if self._computed_number and result.hidden is None:
            problem = "is a number of Python that post-load computes from weights"
            result.hidden = HiddenState(self._computed_number, problem)
        return result

    # --- running probes -------------------------------------------------------------------------------------------

    def _run(self, stream: RawBytes, computed: Mapping[str, Words] | None = None) -> dict[str, RawBytes]:
        words = {
            spec.name: stream[start : start + spec.nbytes].view(spec.word_dtype)
            for spec, start in zip(self._specs, self._starts, strict=False)
        }
        outputs = self._rig.run({**words, **(computed or {})})
        found = self._rig.reached.numbers
        for path, text in self._steady_numbers.items():
            if path in found and repr(found[path]) != text:
                self._computed_number = path
        return outputs

    def _random(self, generator: np.random.Generator, turn: int) -> tuple[RawBytes, dict[str, Words]]:
        def words(spec: TensorSpec) -> Words:
            if turn >= _RANDOM_PASSES:
                return ordinary_words(spec.dtype, spec.num_elements, generator)
            return random_words(spec.dtype, spec.num_elements, generator, turn=turn)

        parts = [words(spec).view(np.uint8) for spec in self._specs]
        return np.concatenate(parts or [np.zeros(0, np.uint8)]), {spec.name: words(spec) for spec in self._computed}

    def _hidden(self, constants: Outputs) -> HiddenState | None:
        """What cannot be seen: opaque objects, and bytes that differ between two equal loads, such as addresses."""
        first = self._rig.reached  # kept until the second run is over, so that an address is not taken twice
        again = self._run(np.zeros(self._nbytes, np.uint8))
        self._steady_numbers = _steady(first.numbers, self._rig.reached.numbers)
        _require_same(constants, again)
        if first.opaque:
            path, kind = next(iter(first.opaque.items()))
            return HiddenState(path, f"is a {kind}, whose content cannot be read")
        for path, raw in constants.items():
            if not np.array_equal(raw, again[path]):
                return HiddenState(path, "differs between two equal loads, as handles and addresses do")
        return None

    def _expected(self) -> _Mask:
        """Per source byte, whether this rank loads it."""
        parts = [np.repeat(self._rig.held(spec.name), spec.element_nbytes) for spec in self._specs]
        return np.concatenate(parts or [np.zeros(0, bool)])

    # --- one granule size -----------------------------------------------------------------------------------------

    def _level(self, bits: int, constants: Outputs) -> _Level:
        finals = {path: self._joined(ids, bits, constants[path]) for path, ids in self._numbers(bits, constants).items()}
        varies = self._check(finals)
        recomputed = {path: final.computed() for path, final in finals.items()}
        masks = {size: np.zeros(self._nbytes * 8 // size + 1, bool) for size in {final.bits for final in finals.values()}}
        for path, final in finals.items():
            final.ids[any_of_granule(recomputed[path], final.bits)] = 0
            masks[final.bits][final.ids] = True
        reached = np.zeros(self._nbytes, bool)
        for size, mask in masks.items():
            reached |= all_of_byte(mask[1:], size)
        return _Level(bits, finals, recomputed, reached, varies)

    def _numbers(self, bits: int, constants: Outputs) -> dict[str, Ids]:
        """Per path the number of the source granule per granule, from 1; 0 where digits made no sense, or none."""
        count = self._nbytes * 8 // bits
        width: Any = np.dtype(np.int32 if count < 2**31 - 1 else np.int64)
        before = {path: granules_of_bytes(raw, bits) for path, raw in constants.items()}
        ids: dict[str, Ids] = {path: np.zeros(granules.size, width) for path, granules in before.items()}
        for digit in range(-(-count.bit_length() // bits)):
            outputs = self._run(bytes_of_granules(_spelt(count, bits, digit), bits))
            _require_same(constants, outputs)
            for path, raw in outputs.items():
                found = granules_of_bytes(raw, bits)
                for part in _parts(found.size):
                    ids[path][part] |= (found[part] ^ before[path][part]).astype(width) << (bits * digit)
        for array in ids.values():
            array[(array < 0) | (array > count)] = 0
        return ids

    def _joined(self, ids: Ids, bits: int, constants: RawBytes) -> _Final:
        """A storage in the largest granules, up to an element of every tensor, whose parts lie side by side all over it."""
        widest = min((spec.element_nbytes * 8 for spec in self._specs), default=bits)
        while bits < widest:
            ratio = {1: 4}.get(bits, 2)
            if ids.size % ratio:
                break
            rows = ids.reshape(-1, ratio)
            first = rows[:, 0]
            is_none, is_run = first == 0, first % ratio == 1
            for place in range(1, ratio):
                is_none &= rows[:, place] == 0
                is_run &= rows[:, place] == first + place
            if not (is_none | is_run).all():
                break
            ids = np.where(is_none, ids.dtype.type(0), (rows[:, 0] - 1) // ratio + 1)
            bits *= ratio
        return _Final(bits, ids, granules_of_bytes(constants, bits), np.zeros(ids.size, bool))

    def _check(self, finals: Mapping[str, _Final]) -> set[str]:
        """Random loads must leave what the numbers foretell. Returns the storages that any load changed."""
        generator = np.random.default_rng(_SEED)
        varies = {path for path, final in finals.items() if final.ids.any()}
        sizes = {path: final.before.nbytes * final.bits // (8 * final.before.itemsize) for path, final in finals.items()}
        for turn in range(_RANDOM_PASSES + _ORDINARY_PASSES):
            stream, computed = self._random(generator, turn)
            outputs = self._run(stream, computed)
            _require_sizes(sizes, outputs)
            sources: dict[int, NDArray[Any]] = {}
            for path, final in finals.items():
                if final.bits not in sources:
                    granules = granules_of_bytes(stream, final.bits)
                    sources[final.bits] = np.concatenate([np.zeros(1, granules.dtype), granules])
                expected = sources[final.bits][final.ids] ^ final.before
                differs = granules_of_bytes(outputs[path], final.bits) != expected
                if differs.any():
                    varies.add(path)
                    final.wrong |= differs
        return varies

    # --- what it means --------------------------------------------------------------------------------------------

    def _sort(self, level: _Level, expected: _Mask, result: UnitMap) -> None:
        result.nbytes = {path: int(level.recomputed[path].size) for path in level.varies}
        reached = level.reached | ~expected
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
        self._count_as_computed(level, result.lost)
        result.recomputed = {path: marked_ranges(mask) for path, mask in level.recomputed.items() if mask.any()}

    def _count_as_computed(self, level: _Level, names: Mapping[str, str]) -> None:
        """What is left of tensors that are not written in place, such as a scale of which only NaN changed on its way."""
        for path, final in level.finals.items():
            starts = self._starts * 8 // final.bits
            for spec, start, end in zip(self._specs, starts, starts[1:], strict=False):
                if spec.name in names:
                    level.recomputed[path] |= any_of_byte((final.ids > start) & (final.ids <= end), final.bits)

    def _without_unseen(self, level: _Level, expected: _Mask) -> _Mask:
        """The expected bytes without tensors that show nowhere: finer granules would not show them either."""
        wanted = expected.copy()
        reached = level.reached | ~expected
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
        stream, computed = self._random(np.random.default_rng(_SEED + 1), _RANDOM_PASSES)
        if self._reference is None:
            self._reference = self._run(stream, computed)
        for turn in range(_INFLUENCE_TRIES):
            other, other_computed = self._random(np.random.default_rng(_SEED + 2 + turn), turn if turn % 2 else _RANDOM_PASSES)
            changed = stream.copy()
            for spec, start in zip(self._specs, self._starts, strict=False):
                if spec.name == name:
                    changed[start : start + spec.nbytes] = other[start : start + spec.nbytes]
            after = self._run(changed, {**computed, name: other_computed[name]} if name in computed else computed)
            differing = {path: raw != after[path] for path, raw in self._reference.items()}
            if any(mask.any() for mask in differing.values()):
                return {path: mask for path, mask in differing.items() if mask.any()}
        return {}

    def _homes(self, level: _Level, missing: Mapping[str, str]) -> tuple[dict[str, tuple[BitHome, ...]], dict[str, str]]:
        homes: dict[str, list[BitHome]] = {}
        tangled: dict[str, str] = {}
        for path, final in level.finals.items():
            starts = self._starts * 8 // final.bits
            numbers, positions = inverse(final.ids, int(starts[-1]))
            starts = starts.astype(numbers.dtype)
            bounds = np.searchsorted(numbers, starts)
            for spec, start, low, high in zip(self._specs, starts, bounds, bounds[1:], strict=False):
                if low == high or spec.name in missing or spec.name in tangled:
                    continue
                mine = numbers[low:high]
                pairs = GranulePairs(mine - int(start) if start else mine, positions[low:high])
                found = fit_bit_homes(spec, path, pairs, final.before, final.bits)
                if isinstance(found, str):
                    tangled[spec.name] = found
                else:
                    homes.setdefault(spec.name, []).extend(found)
        return {name: tuple(found) for name, found in homes.items() if name not in tangled}, tangled


def _parts(size: int) -> Iterator[slice]:
    """Parts of a long array, so that what is computed on the way stays small."""
    return (slice(low, min(low + _PART, size)) for low in range(0, size, _PART))


def _spelt(count: int, bits: int, digit: int) -> NDArray[np.uint8]:
    """One digit of the numbers of all granules, from 1 on."""
    digits = np.empty(count, np.uint8)
    for part in _parts(count):
        digits[part] = (np.arange(part.start + 1, part.stop + 1) >> (bits * digit)) & ((1 << bits) - 1)
    return digits


def _steady(first: Mapping[str, complex], second: Mapping[str, complex]) -> dict[str, str]:
    """Numbers that two equal loads leave alike and that are no addresses, as texts: NaN equals itself there."""
    return {
        path: repr(value)
        for path, value in first.items()
        if path in second and repr(second[path]) == repr(value) and not (isinstance(value, int) and abs(value) >= _MIN_ADDRESS)
    }


def _require_same(first: Outputs, second: Outputs) -> None:
    _require_sizes({path: raw.size for path, raw in first.items()}, second)


def _require_sizes(sizes: Mapping[str, int], outputs: Outputs) -> None:
    found = {path: raw.size for path, raw in outputs.items()}
    if sizes != found:
        differing = sorted(path for path in {*sizes, *found} if sizes.get(path) != found.get(path))
        raise RejectedError(f"post-load leaves other tensors from one load to the next, first {differing[:3]}")


def _share(level: _Level, expected: _Mask) -> float:
    """Part of the loaded source bytes that were found again whole."""
    wanted = int(expected.sum())
    return 1.0 if not wanted else int((level.reached & expected).sum()) / wanted
