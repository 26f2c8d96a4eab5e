"""Trace a training framework's own conversion: where every element of its outputs comes from.

The conversion is run on probes instead of weights. What it does to values is believed only where two kinds of probes agree:
digits that say which element each is, and random stored bits that must arrive unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deltarefit.bits import logical_words, spec_of, tensor_from_words
from deltarefit.canonical import TensorSpec, Words
from deltarefit.errors import RejectedError
from deltarefit.pieces import Piece, strided
from deltarefit.placement.digits import IdSpace, add_digit, random_words
from deltarefit.placement.fit import MAX_PIECES, fit_pieces

__all__ = ["Convert", "Parts", "TracedConversion", "trace_conversion", "verify_placements"]

Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
Parts = tuple[tuple[str, tuple[Piece, ...]], ...]
"""Of an output, per input that it takes elements from: pieces."""
_Outputs = dict[str, tuple[TensorSpec, Words]]

_VERIFY_PASSES = 2
"""Passes of random bits. Each misses a wrong 16-bit element with chance 2^-16, a wrong 8-bit element with 2^-8."""
_SMALL = 256
"""Where an output has fewer elements, more passes of random bits are run, until about so many patterns were tried."""
_MAX_VERIFY_PASSES = 12


@dataclass(frozen=True, slots=True)
class TracedConversion:
    """What a conversion does to its inputs."""

    placements: dict[str, Parts]
    """Per output, per input it takes elements from: pieces. Their canonical side counts in the output, their storage side in
    the input taken as a contiguous row-major tensor of its shape."""
    opaque: dict[str, str]
    """Outputs that are no bit-preserving rearrangement of inputs, with the reason."""
    specs: dict[str, TensorSpec]
    """Names, dtypes and shapes of all outputs."""
    unread: tuple[str, ...]
    """Inputs of which no element reaches any traced output."""


def trace_conversion(
    convert: Convert,
    inputs: Mapping[str, torch.Tensor],
    *,
    guess: TracedConversion | None = None,
    seed: int = 0,
    max_pieces: int = MAX_PIECES,
) -> TracedConversion:
    """Run ``convert`` on probes shaped like ``inputs`` and fit pieces to where the elements went.

    ``convert`` gets a fresh dict of fresh host tensors at each call and must return the same names, shapes and dtypes each
    time. Only names, shapes and dtypes of ``inputs`` are read, so meta tensors will do. Memory: inputs and outputs once, and
    8 bytes an output element.

    ``guess`` is what it may well do, learned on other tensors of the same shapes. It is returned if the outputs are its outputs
    and random bits arrive where it says, which saves the digits; else it counts for nothing.

    Raises:
        RejectedError: two runs returned different names, shapes or dtypes.
    """
    specs = [spec_of(name, tensor) for name, tensor in inputs.items()]
    space = IdSpace.of(specs)
    if guess is not None and _is_confirmed(convert, space, guess, np.random.default_rng(seed)):
        return guess
    outputs, ids = _learn_ids(convert, space)
    reasons = _verify(convert, space, outputs, ids, np.random.default_rng(seed))
    placements: dict[str, Parts] = {}
    opaque: dict[str, str] = {}
    for name in outputs:
        fitted = reasons.get(name) or _fit(space, ids[name], max_pieces)
        if isinstance(fitted, str):
            opaque[name] = fitted
        else:
            placements[name] = fitted
    read = {source for parts in placements.values() for source, _ in parts}
    unread = tuple(spec.name for spec in specs if spec.name not in read and spec.num_elements)
    return TracedConversion(placements, opaque, outputs, unread)


def verify_placements(
    convert: Convert, inputs: Iterable[TensorSpec], placements: Mapping[str, Parts], *, seed: int = 0
) -> str | None:
    """Run ``convert`` on random bits; the first output whose bits do not arrive where its pieces say, or None.

    Outputs without placements are not looked at.
    """
    space = IdSpace.of(inputs)
    if wrong := next((name for name, parts in placements.items() if not _is_inside(space, parts)), None):
        return wrong
    sizes = (sum(piece.num_elements for _, pieces in parts for piece in pieces) for parts in placements.values())
    for bits, outputs in _random_runs(convert, space, sizes, np.random.default_rng(seed)):
        for name, parts in placements.items():
            if name not in outputs or not _arrives(bits, outputs[name][1], parts):
                return name
    return None


def _is_confirmed(convert: Convert, space: IdSpace, guess: TracedConversion, generator: np.random.Generator) -> bool:
    """Whether random bits arrive as a guess says. What it calls opaque need not: converting what is direct is no error."""
    if not all(_is_inside(space, parts) for parts in guess.placements.values()):
        return False
    sizes = (spec.num_elements for spec in guess.specs.values())
    for bits, outputs in _random_runs(convert, space, sizes, generator):
        if {name: spec for name, (spec, _) in outputs.items()} != guess.specs:
            return False
        if not all(_arrives(bits, outputs[name][1], parts) for name, parts in guess.placements.items()):
            return False
    return True


def _is_inside(space: IdSpace, parts: Parts) -> bool:
    """Whether pieces reach no further than the inputs that they name."""
    return all(
        source in space.specs and all(piece.storage.last < space.specs[source].num_elements for piece in pieces)
        for source, pieces in parts
    )


def _arrives(bits: Mapping[str, Words], words: Words, parts: Parts) -> bool:
    """Whether an output's words are the input bits that its pieces name."""
    for source, pieces in parts:
        if bits[source].dtype != words.dtype:
            return False
        for piece in pieces:
            if piece.canonical.last >= words.size:
                return False
            if not np.array_equal(strided(words, piece.canonical), strided(bits[source], piece.storage)):
                return False
    return True


def _random_runs(
    convert: Convert, space: IdSpace, sizes: Iterable[int], generator: np.random.Generator
) -> Iterator[tuple[dict[str, Words], _Outputs]]:
    """Random bits and what becomes of them, as often as outputs of these sizes need to be believed."""
    smallest = min((size for size in sizes if size), default=1)
    for turn in range(min(_MAX_VERIFY_PASSES, max(_VERIFY_PASSES, _SMALL // smallest))):
        bits = {spec.name: random_words(spec.dtype, spec.num_elements, generator, turn=turn) for spec in space.specs.values()}
        yield bits, _run(convert, space.specs.values(), lambda name, b=bits: b[name].copy())  # type: ignore[misc]


def _run(convert: Convert, specs: Iterable[TensorSpec], words: Callable[[str], Words]) -> _Outputs:
    tensors = {spec.name: tensor_from_words(words(spec.name), spec) for spec in specs}
    with torch.no_grad():
        outputs = convert(tensors)
    return {name: (spec_of(name, tensor), logical_words(tensor)) for name, tensor in outputs.items()}


def _learn_ids(convert: Convert, space: IdSpace) -> tuple[dict[str, TensorSpec], dict[str, NDArray[np.int64]]]:
    """Per output the ids of its elements, shape [elements]; 0 or less where digits made no sense."""
    specs: dict[str, TensorSpec] = {}
    ids: dict[str, NDArray[np.int64]] = {}
    for digit in range(space.num_digits):
        outputs = _run(convert, space.specs.values(), lambda name, d=digit: space.digit(name, d))  # type: ignore[misc]
        found = {name: spec for name, (spec, _) in outputs.items()}
        if digit == 0:
            specs = found
            ids = {name: np.zeros(spec.num_elements, np.int64) for name, spec in specs.items()}
        _require_same(specs, found)
        for name, (spec, words) in outputs.items():
            add_digit(ids[name], spec.dtype, words, digit)
    return specs, ids


def _require_same(specs: Mapping[str, TensorSpec], found: Mapping[str, TensorSpec]) -> None:
    if specs != found:
        differing = sorted(name for name in set(specs) | set(found) if specs.get(name) != found.get(name))
        raise RejectedError(
            f"conversion: two runs returned different outputs, first {differing[:3]}; expected the same each time"
        )


def _verify(
    convert: Convert,
    space: IdSpace,
    specs: Mapping[str, TensorSpec],
    ids: Mapping[str, NDArray[np.int64]],
    generator: np.random.Generator,
) -> dict[str, str]:
    """Check the ids against random bits; per failing output the reason."""
    reasons: dict[str, str] = {}
    for bits, outputs in _random_runs(convert, space, (array.size for array in ids.values()), generator):
        _require_same(specs, {name: spec for name, (spec, _) in outputs.items()})
        for name, (spec, words) in outputs.items():
            if name not in reasons and (reason := _mismatch(space, bits, ids[name], spec, words)):
                reasons[name] = reason
    return reasons


def _mismatch(space: IdSpace, bits: Mapping[str, Words], ids: NDArray[np.int64], spec: TensorSpec, words: Words) -> str | None:
    """Why these output bits are not the input bits that the ids name; None if they are."""
    placed = 0
    for source, places, flat_index in space.split(ids):
        origin = space.specs[source]
        if origin.element_nbytes != spec.element_nbytes:
            return f"is {spec.dtype} but takes elements of {source}, which is {origin.dtype}"
        if not np.array_equal(bits[source][flat_index], words[places]):
            return f"changes the stored bits of {source}"
        placed += places.size
    if placed < spec.num_elements:
        return f"{spec.num_elements - placed} of its {spec.num_elements} elements are computed or constant"
    return None


def _fit(space: IdSpace, ids: NDArray[np.int64], max_pieces: int) -> Parts | str:
    parts: list[tuple[str, tuple[Piece, ...]]] = []
    for source, places, flat_index in space.split(ids):
        taken = np.zeros(space.specs[source].num_elements, bool)
        taken[flat_index] = True
        if np.count_nonzero(taken) != flat_index.size:
            return f"takes elements of {source} more than once"
        pieces = fit_pieces(places.astype(np.int64), flat_index, limit=max_pieces)
        if pieces is None:
            return f"rearranges {source} in no strided way"
        parts.append((source, tuple(pieces)))
    return tuple(parts)
