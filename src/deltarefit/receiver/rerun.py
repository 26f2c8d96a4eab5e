"""Layers whose post-load step computes something: the engine's own code computes it again after each refit.

Canonical bits that survive post-load are read back from the storage that serves; the few tensors of which nothing readable
survives are sent whole each time. Both go through the engine's loader and post-load step on a layer that serves nobody, and
only the bytes that post-load computes are copied over. All others must come out as they already are: that is checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from deltarefit import kernels
from deltarefit.canonical import TensorDigest, TensorSpec, Words
from deltarefit.errors import LoaderContractError, PayloadMissingError, RejectedError
from deltarefit.pieces import Piece, StridedView
from deltarefit.placement.storages import ModelStorage
from deltarefit.placement.units import RawBytes, UnitRig, raw_bytes
from deltarefit.receiver.guard import storage_digest
from deltarefit.receiver.report import WRONG_DIGEST
from deltarefit.receiver.writers import WordsTarget
from deltarefit.records import CodedItem

__all__ = ["RerunUnit", "SentWhole"]


@dataclass(slots=True, eq=False)
class SentWhole:
    """A tensor of which storage tells nothing back. Its bits are kept from the attempt that brought them."""

    spec: TensorSpec
    words: Words = field(init=False)
    arrived: NDArray[np.bool_] = field(init=False)
    is_known: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.words = np.zeros(self.spec.num_elements, self.spec.word_dtype)
        self.arrived = np.zeros(self.spec.num_elements, bool)

    def take(self, item: CodedItem) -> int:
        """Keep what an overwrite brings; returns the elements taken."""
        positions = kernels.decode_positions(item)
        self.words[positions] = kernels.decode_values(item)
        self.arrived[positions] = True
        self.is_known = False
        return positions.size

    def require_whole(self) -> None:
        """Check that all of it came.

        Raises:
            PayloadMissingError: a part did not.
        """
        if self.arrived.all():
            self.is_known = True
        if not self.is_known:
            raise PayloadMissingError(
                f"tensor {self.spec.name}: must be sent whole, {self.arrived.sum()} of {self.arrived.size} elements arrived"
            )


@dataclass(slots=True, eq=False)
class RerunUnit:
    """One layer that serves, and the rig on which its post-load step runs again."""

    rig: UnitRig
    specs: Mapping[str, TensorSpec]
    """Its canonical tensors, without those that post-load drops."""
    whole: Mapping[str, SentWhole]
    storages: Mapping[str, ModelStorage]
    """By path, storages of the model that serves."""
    recomputed: Mapping[str, NDArray[np.int64]]
    """By path, ranges of bytes to copy over."""
    readable: Mapping[str, Sequence[WordsTarget]] = field(default_factory=dict)
    """Tensors whose canonical bits can be read back, and from where."""
    sums: dict[str, TensorDigest] = field(default_factory=dict)
    """By path, digests of storages as this layer's last run left them."""
    is_touched: bool = False
    """Whether something of it was written since it last ran."""

    @property
    def label(self) -> str:
        return ", ".join(self.rig.unit.roots)

    def begin(self) -> None:
        """A new attempt: of tensors that are sent whole, nothing has arrived."""
        for sent in self.whole.values():
            sent.arrived[:] = False

    def finish(self) -> None:
        """Compute what post-load computes from the bits that are there now, and copy it over.

        Raises:
            PayloadMissingError: a tensor that must be sent whole did not come whole.
            LoaderContractError: post-load does something else than at prewarm.
        """
        if not self.is_touched:
            return
        for sent in self.whole.values():
            sent.require_whole()
        for path, fresh in self._fresh().items():
            storage = self.storages.get(path)
            if storage is None:
                continue
            live = storage.words(1)
            for low, high in self.recomputed.get(path, ()):
                live[low:high].copy_(torch.from_numpy(fresh[low:high]))
            if not np.array_equal(raw_bytes(live), fresh):
                raise LoaderContractError(f"layer {self.label}: post-load leaves other bits in {path} than it did at prewarm")
        self.is_touched = False
        self.remember()

    def remember(self) -> None:
        """Note what storages hold now, to tell later whether anything but a refit changed them."""
        self.sums = {path: storage_digest(storage) for path, storage in self.storages.items()}

    def drifted(self) -> tuple[str, ...]:
        """Paths of storages that something else changed since this layer last ran."""
        if self.is_touched:
            return ()
        return tuple(path for path, storage in self.storages.items() if storage_digest(storage) != self.sums[path])

    def stale(self) -> str:
        """The first path whose bytes are not those of a fresh load; empty if there is none, or not enough is known to tell."""
        if not all(sent.is_known for sent in self.whole.values()):
            return ""
        for path, fresh in self._fresh().items():
            if path in self.storages and not np.array_equal(raw_bytes(self.storages[path].words(1)), fresh):
                return path
        return ""

    def digest(self, name: str) -> TensorDigest | None:
        """Of a tensor that is sent whole, as it was kept; wrong if storage is not as that left it. None before it came."""
        sent = self.whole[name]
        if not sent.is_known or self.is_touched:
            return None
        view = StridedView(0, (sent.words.size,), (1,))
        kept = kernels.digest(sent.words, [Piece(view, view)])
        return kept + WRONG_DIGEST if self.drifted() else kept

    def _fresh(self) -> dict[str, RawBytes]:
        words = {name: self._read(name) for name in self.readable}
        words |= {name: sent.words for name, sent in self.whole.items()}
        try:
            return self.rig.run(words)
        except RejectedError as error:
            raise LoaderContractError(f"layer {self.label}: {error}") from error
        finally:
            self.rig.release()

    def _read(self, name: str) -> Words:
        spec = self.specs[name]
        words = np.zeros(spec.num_elements, spec.word_dtype)
        for target in self.readable[name]:
            target.copy_to(words)
        return words
