"""Straight to storage: changed elements through pieces to the words that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deltarefit import kernels
from deltarefit.canonical import WORDS, TensorDigest, TensorSpec, Words
from deltarefit.errors import LoaderContractError
from deltarefit.pieces import Cast, Piece, StridedView, merge_pieces, strided
from deltarefit.placement.locate import locate
from deltarefit.placement.overlap import Claim, colliding
from deltarefit.placement.run import Home
from deltarefit.receiver.bit_writers import BitTarget
from deltarefit.records import CodedItem, Encoding

__all__ = ["HostTarget", "TorchTarget", "WordsTarget", "targets_of"]


@dataclass(frozen=True, slots=True, eq=False)
class HostTarget:
    """Pieces over words in host memory."""

    key: str
    words: Words
    pieces: tuple[Piece, ...]
    """Disjoint in the canonical tensor and in the storage, unless the target is only read."""
    bound: kernels.BoundPieces | None = None
    """What items are applied with; None if the target is only read."""

    def apply(self, item: CodedItem) -> int:
        """Apply an item; returns the storage elements that were changed."""
        if self.bound is None:
            raise LookupError(f"pieces in {self.key} are for reading only")
        return self.bound.apply_item(item)

    def read(self, flat_index: NDArray[np.int64]) -> tuple[NDArray[np.int64], Words]:
        """Resident words of those flat indices that are held here: places in ``flat_index`` and words."""
        found = [locate(piece, flat_index) for piece in self.pieces]
        places = np.concatenate([place for place, _ in found])
        return places, self.words[np.concatenate([position for _, position in found])]

    def copy_to(self, words: Words) -> None:
        """Fill in the canonical words that lie here; ``words`` has all elements of the tensor."""
        for piece in self.pieces:
            _copy_out(strided(self.words, piece.storage), piece, words)

    def digest(self, pieces: Sequence[Piece]) -> TensorDigest:
        return kernels.digest(self.words, pieces)

    def low_bits_are_zero(self) -> bool:
        """Whether widened elements carry nothing in their low 16 bits, so that they are canonical bits and no more."""
        return all(not (kernels.gather(self.words, [p]) & np.uint32(0xFFFF)).any() for p in self.pieces)


@dataclass(frozen=True, slots=True, eq=False)
class TorchTarget:
    """Pieces over the memory of any device, written with torch operations. Plain, and the way for accelerators for now."""

    key: str
    flat: torch.Tensor
    """All words of the storage as integers, shape [words]."""
    pieces: tuple[Piece, ...]

    @property
    def _width(self) -> int:
        return self.flat.element_size()

    def apply(self, item: CodedItem) -> int:
        positions, values = kernels.decode_positions(item), kernels.decode_values(item)
        written = 0
        for piece in self.pieces:
            places, targets = locate(piece, positions)
            if not places.size:
                continue
            chosen = values[places]
            if piece.cast is Cast.WIDEN:
                chosen = chosen.astype(np.uint32) << np.uint32(16)
            bits = torch.from_numpy(chosen.view(f"i{self._width}") if self._width > 1 else chosen).to(self.flat.device)
            index = torch.from_numpy(targets).to(self.flat.device)
            if item.encoding is Encoding.DIFFERENCE:
                bits = self.flat[index] + bits
            elif item.encoding is Encoding.XOR:
                bits = self.flat[index] ^ bits
            self.flat[index] = bits
            written += places.size
        return written

    def read(self, flat_index: NDArray[np.int64]) -> tuple[NDArray[np.int64], Words]:
        found = [locate(piece, flat_index) for piece in self.pieces]
        index = torch.from_numpy(np.concatenate([position for _, position in found])).to(self.flat.device)
        words = self.flat[index].cpu().numpy().view(WORDS[self._width])
        return np.concatenate([place for place, _ in found]), words

    def copy_to(self, words: Words) -> None:
        for piece in self.pieces:
            _copy_out(self._gather(piece).reshape(piece.storage.shape), piece, words)

    def digest(self, pieces: Sequence[Piece]) -> TensorDigest:
        total = TensorDigest()
        for piece in pieces:
            words = self._gather(piece)
            stride = tuple(int(np.prod(piece.storage.shape[axis + 1 :])) for axis in range(len(piece.storage.shape)))
            local = Piece(piece.canonical, StridedView(0, piece.storage.shape, stride), piece.cast)
            total += kernels.digest(words, [local])
        return total

    def low_bits_are_zero(self) -> bool:
        return all(not (self._gather(piece) & np.uint32(0xFFFF)).any() for piece in self.pieces)

    def _gather(self, piece: Piece) -> Words:
        view = self.flat.as_strided(piece.storage.shape, piece.storage.stride, piece.storage.offset)
        words: Words = view.cpu().contiguous().numpy().reshape(-1).view(WORDS[self._width])
        return words


def _copy_out(stored: Words, piece: Piece, words: Words) -> None:
    strided(words, piece.canonical)[...] = stored >> stored.dtype.type(16) if piece.cast is Cast.WIDEN else stored


WordsTarget = HostTarget | TorchTarget | BitTarget


def targets_of(spec: TensorSpec, homes: Sequence[Home], *, torch_writes: bool) -> tuple[WordsTarget, ...]:
    """Targets for one canonical tensor. Pieces that hold the same flat indices end up in different targets."""
    targets: list[WordsTarget] = []
    for home in homes:
        if home.bits:
            targets.append(bit_target(spec, home))
            continue
        flat = home.storage.words(home.width)
        on_host = home.storage.device.type == "cpu" and not torch_writes
        words = flat.numpy().view(WORDS[home.width]) if on_host else None
        for group in disjoint_groups(home.pieces):
            if words is None:
                targets.append(TorchTarget(home.storage.key, flat, group))
            else:
                bound = kernels.BoundPieces(words, group, spec)
                targets.append(HostTarget(home.storage.key, words, group, bound))
    return tuple(targets)


def bit_target(spec: TensorSpec, home: Home) -> BitTarget:
    """The target of a home that counts in granules; for reading and for writing."""
    return BitTarget(home.storage.key, spec, home.storage.words(1), home.pieces, home.bits, home.flip)


def target_of_piece(home: Home, *, torch_writes: bool) -> WordsTarget:
    """One target over all pieces of a home, for reading only: they may share flat indices."""
    flat = home.storage.words(home.width)
    if home.storage.device.type != "cpu" or torch_writes:
        return TorchTarget(home.storage.key, flat, home.pieces)
    return HostTarget(home.storage.key, flat.numpy().view(WORDS[home.width]), home.pieces)


def disjoint_groups(pieces: Sequence[Piece]) -> list[tuple[Piece, ...]]:
    """Group pieces so that no flat index occurs twice in a group."""
    if len(pieces) == 1 or not colliding(Claim(str(n), "", piece.canonical, 1) for n, piece in enumerate(pieces)):
        return [tuple(pieces)]
    return [tuple(group) for group in merge_pieces(pieces)]


def verify_item(target: WordsTarget, item: CodedItem, before: tuple[NDArray[np.int64], Words]) -> None:
    """Check what an item did to a target (paper Fig. A.12): a mask taken back restores the old bits, an overwrite is there.

    Raises:
        LoaderContractError: it did something else.
    """
    positions, values = kernels.decode_positions(item), kernels.decode_values(item)
    places, old = before
    new = target.read(positions)[1]
    sent = values[places]
    if new.itemsize != sent.itemsize:
        sent = sent.astype(new.dtype) << new.dtype.type(16)
    if item.encoding is Encoding.OVERWRITE:
        wrong = np.flatnonzero(new != sent)
    else:
        wrong = np.flatnonzero((new ^ sent if item.encoding is Encoding.XOR else new - sent) != old)
    if wrong.size:
        raise LoaderContractError(
            f"tensor {item.spec.name}: post-apply check fails at flat index {int(positions[places[wrong[0]]])} in {target.key} "
            f"({wrong.size} elements differ)"
        )
