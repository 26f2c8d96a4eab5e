"""Putting a residual tensor together from the parts that ranks converted (paper A.1)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from deltarefit.canonical import TensorSpec, Words
from deltarefit.errors import AttemptFailedError
from deltarefit.pieces import StridedView, whole
from deltarefit.source.conversion import ResidualPart

__all__ = ["assemble", "decode_parts", "encode_parts"]


class _PartWire(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    views: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    words: bytes


def encode_parts(parts: Sequence[ResidualPart]) -> bytes:
    """Parts as one message between training ranks."""
    return msgspec.msgpack.encode(
        [
            _PartWire(
                part.spec.name,
                part.spec.dtype,
                part.spec.shape,
                tuple((view.offset, view.shape, view.stride) for view in part.views),
                np.ascontiguousarray(part.words).tobytes(),
            )
            for part in parts
        ]
    )


def decode_parts(data: bytes, rank: int) -> list[ResidualPart]:
    """The parts of one message.

    Raises:
        AttemptFailedError: it is not one.
    """
    try:
        wires = msgspec.msgpack.decode(data, type=list[_PartWire])
        return [_part(wire) for wire in wires]
    except (msgspec.DecodeError, ValueError) as error:
        raise AttemptFailedError(f"residual parts from rank {rank}: {error}; expected what encode_parts writes") from error


def _part(wire: _PartWire) -> ResidualPart:
    spec = TensorSpec(wire.name, wire.dtype, wire.shape)
    views = tuple(StridedView(*view) for view in wire.views)
    return ResidualPart(spec, views, np.frombuffer(wire.words, spec.word_dtype))


def assemble(spec: TensorSpec, parts: Sequence[tuple[int, ResidualPart]]) -> Words:
    """The whole tensor from (rank, part), as words in flat order; shares memory with a part that is whole.

    Raises:
        AttemptFailedError: a part is of another shape or dtype or reaches past the tensor, overlapping parts differ in a bit,
            or an element is covered by none.
    """
    for rank, part in parts:
        _check_part(spec, rank, part)
    for _, part in parts[:1]:
        if len(parts) == 1 and part.views == (whole(spec.shape),):
            return part.words
    words = np.zeros(spec.num_elements, spec.word_dtype)
    writer = np.full(spec.num_elements, -1, np.int32)
    for rank, part in parts:
        taken = 0
        for view in part.views:
            positions = view.positions()
            values = part.words[taken : taken + positions.size]
            taken += positions.size
            differing = (writer[positions] >= 0) & (words[positions] != values)
            if differing.any():
                first = int(positions[differing][0])
                raise AttemptFailedError(
                    f"residual tensor {spec}: ranks {int(writer[first])} and {rank} give different bits for flat index "
                    f"{first}; expected overlapping parts to be equal bit for bit"
                )
            words[positions] = values
            writer[positions] = rank
    missing = np.flatnonzero(writer < 0)
    if missing.size:
        raise AttemptFailedError(
            f"residual tensor {spec}: {missing.size} elements are in no part, first flat index {int(missing[0])}; "
            f"ranks {sorted({rank for rank, _ in parts})} gave parts"
        )
    return words


def _check_part(spec: TensorSpec, rank: int, part: ResidualPart) -> None:
    if part.spec != spec:
        raise AttemptFailedError(f"residual tensor {spec}: rank {rank} converted it as {part.spec}")
    covered = sum(view.num_elements for view in part.views)
    if part.words.size != covered or part.words.dtype != spec.word_dtype:
        raise AttemptFailedError(
            f"residual tensor {spec}: rank {rank} gives {part.words.size} words of {part.words.dtype} for {covered} elements"
        )
    reach = max((view.last for view in part.views), default=-1)
    if reach >= spec.num_elements:
        raise AttemptFailedError(f"residual tensor {spec}: rank {rank} gives flat index {reach}, past the tensor's end")
