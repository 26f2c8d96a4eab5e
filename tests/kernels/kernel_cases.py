"""Builders shared by the kernels' tests: shards with pieces, changes of a wanted density, guarded memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from deltarefit.canonical import WORDS, TensorSpec
from deltarefit.kernels import Isa, available_isas
from deltarefit.pieces import Cast, Piece, StridedView, whole

DTYPES = {1: "F8_E4M3", 2: "BF16", 4: "F32", 8: "F64"}
COMPILED = [isa for isa in available_isas() if isa is not Isa.NUMPY]
GUARD = 0xA5
GUARD_NBYTES = 192


@dataclass
class Guarded:
    """Words that start at any byte, with canaries before and after them."""

    raw: np.ndarray
    words: np.ndarray

    @classmethod
    def of(cls, words: np.ndarray, misaligned_by: int = 0) -> Guarded:
        raw = np.full(2 * GUARD_NBYTES + misaligned_by + words.nbytes, GUARD, np.uint8)
        start = GUARD_NBYTES + misaligned_by
        inner = raw[start : start + words.nbytes].view(words.dtype)
        inner[:] = words
        return cls(raw, inner)

    def intact(self) -> bool:
        start = self.words.__array_interface__["data"][0] - self.raw.__array_interface__["data"][0]
        after = self.raw[start + self.words.nbytes :]
        return bool((self.raw[:start] == GUARD).all() and (after == GUARD).all())


def random_words(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    return np.frombuffer(rng.bytes(count * width), WORDS[width]).copy()


def special_words(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    """Words in which -0.0, NaN payloads, infinities, subnormals and all-ones are common."""
    top = 1 << (8 * width - 1)
    all_ones = 2 * top - 1
    values = [0, top, 1, all_ones, top - 1, {2: 0x7FC1, 4: 0x7FC00001, 8: 0x7FF8000000000001}.get(width, 0x7F)]
    words = random_words(rng, count, width)
    chosen = rng.random(count) < 0.5
    words[chosen] = rng.choice(np.array(values, np.uint64), int(chosen.sum())).astype(WORDS[width])
    return words


def changed_words(rng: np.random.Generator, old: np.ndarray, density: float) -> np.ndarray:
    """A copy with about this share of words changed; a density of ``-1`` changes exactly one word."""
    new = old.copy()
    if density < 0:
        where = np.array([rng.integers(old.size)]) if old.size else np.empty(0, np.int64)
    else:
        where = np.flatnonzero(rng.random(old.size) < density)
    flips = random_words(rng, where.size, old.itemsize) | old.dtype.type(1)
    small = rng.random(where.size) < 0.7
    new[where] = np.where(small, old[where] + old.dtype.type(1), old[where] ^ flips)
    return new


@dataclass
class Shard:
    """A group of pieces of one tensor and how large the storage is that holds them."""

    spec: TensorSpec
    pieces: tuple[Piece, ...]
    storage_elements: int


def _positions(view: StridedView) -> np.ndarray:
    """Positions of a view in row-major order, axis by axis."""
    positions = np.array([view.offset], np.int64)
    for length, stride in zip(view.shape, view.stride, strict=True):
        positions = np.add.outer(positions, np.arange(length, dtype=np.int64) * stride).reshape(-1)
    return positions


def storage_indices(pieces: tuple[Piece, ...]) -> np.ndarray:
    """Storage positions in piece order."""
    return np.concatenate([_positions(piece.normalised().storage) for piece in pieces])


def flat_indices(pieces: tuple[Piece, ...]) -> np.ndarray:
    """Flat indices in piece order."""
    return np.concatenate([_positions(piece.normalised().canonical) for piece in pieces])


def contiguous(width: int, count: int) -> Shard:
    spec = TensorSpec("whole", DTYPES[width], (count,))
    return Shard(spec, (Piece(whole((count,)), whole((count,))),), count)


def row_shard(width: int, rows: int, columns: int) -> Shard:
    """The middle third of the rows, in a storage that starts with other things."""
    spec = TensorSpec("rows", DTYPES[width], (rows, columns))
    held = max(1, rows // 3)
    canonical = StridedView(held * columns if rows > 2 else 0, (held, columns), (columns, 1))
    piece = Piece(canonical, StridedView(7, (held, columns), (columns, 1)))
    return Shard(spec, (piece,), 7 + held * columns)


def column_shard(width: int, rows: int, columns: int, held: int) -> Shard:
    spec = TensorSpec("columns", DTYPES[width], (rows, columns))
    start = (columns - held) // 2
    piece = Piece(StridedView(start, (rows, held), (columns, 1)), StridedView(3, (rows, held), (held, 1)))
    return Shard(spec, (piece,), 3 + rows * held)


def transposed(width: int, rows: int, columns: int) -> Shard:
    spec = TensorSpec("transposed", DTYPES[width], (rows, columns))
    piece = Piece(whole((rows, columns)), StridedView(1, (rows, columns), (1, rows + 2)))
    return Shard(spec, (piece,), 1 + columns * (rows + 2))


def grouped(width: int, blocks: int, length: int) -> Shard:
    """Several pieces in one group: ascending blocks of a tensor, spread backwards over the storage."""
    spec = TensorSpec("grouped", DTYPES[width], (2 * blocks * length,))
    pieces = [
        Piece(
            StridedView(2 * block * length, (length,), (1,)),
            StridedView((blocks - 1 - block) * length, (length,), (1,)),
        )
        for block in range(blocks)
    ]
    return Shard(spec, tuple(pieces), blocks * length)


def sparse_axis(width: int, count: int) -> Shard:
    """Every third element of a tensor: no run is longer than one."""
    spec = TensorSpec("thirds", DTYPES[width], (3 * count,))
    piece = Piece(StridedView(1, (count,), (3,)), StridedView(0, (count,), (2,)))
    return Shard(spec, (piece,), 2 * count)


def shards(width: int) -> list[Shard]:
    return [
        contiguous(width, 1),
        contiguous(width, 5003),
        contiguous(width, 70_001),
        row_shard(width, 40, 257),
        column_shard(width, 60, 131, 37),
        column_shard(width, 9, 5000, 1300),
        transposed(width, 53, 67),
        grouped(width, 5, 613),
        sparse_axis(width, 3001),
    ]


def box_pieces(rng: np.random.Generator, shape: tuple[int, ...], storage_width: int, cast: Cast) -> tuple[Shard, int]:
    """Random disjoint boxes that partition part of a tensor, at random places of one storage, with permuted axes."""
    boxes = [tuple((0, n) for n in shape)]
    for _ in range(int(rng.integers(0, 5))):
        box = boxes.pop(int(rng.integers(len(boxes))))
        axis = int(rng.integers(len(shape)))
        low, high = box[axis]
        if high - low < 2:
            boxes.append(box)
            continue
        cut = int(rng.integers(low + 1, high))
        boxes.append((*box[:axis], (low, cut), *box[axis + 1 :]))
        boxes.append((*box[:axis], (cut, high), *box[axis + 1 :]))
    if len(boxes) > 1 and rng.random() < 0.5:
        boxes.pop(int(rng.integers(len(boxes))))
    rng.shuffle(boxes)
    strides = TensorSpec("t", "U8", shape).strides
    pieces, place = [], int(rng.integers(0, 4))
    for box in boxes:
        lengths = tuple(int(high - low) for low, high in box)
        order = rng.permutation(len(shape))
        storage_stride, step = [0] * len(shape), int(rng.integers(1, 3))
        for axis in order:
            storage_stride[axis] = step
            step *= lengths[axis]
        offset = sum(int(low) * stride for (low, _), stride in zip(box, strides, strict=True))
        pieces.append(Piece(StridedView(offset, lengths, strides), StridedView(place, lengths, tuple(storage_stride)), cast))
        place += step + int(rng.integers(0, 4))
    spec = TensorSpec("boxes", DTYPES[storage_width if cast is Cast.SAME else 2], shape)
    return Shard(spec, tuple(pieces), place), math.prod(shape)
