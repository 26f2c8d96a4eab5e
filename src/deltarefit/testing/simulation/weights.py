"""Small real tensors: a training side in shards, a rollout side that stores them elsewhere, and the dense result as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import numpy as np

from deltarefit import kernels
from deltarefit.canonical import Catalog, TensorDigest, TensorSpec, Words
from deltarefit.ids import OwnerId
from deltarefit.pieces import Piece, StridedView, whole
from deltarefit.records import CodedItem
from deltarefit.source import ConversionTask, Owner, SourceSettings

__all__ = ["CATALOG", "NUM_OWNERS", "Rollout", "Trainee", "dense"]

CATALOG = Catalog([TensorSpec("a", "BF16", (6, 5)), TensorSpec("b", "F32", (7,)), TensorSpec("c", "BF16", (4, 4))])
NUM_OWNERS = 2
_SETTINGS = SourceSettings(chunk_nbytes=1, bucket_nbytes=1, scan_threads=1)  # every shard is a payload

Weights = dict[str, Words]


def initial() -> Weights:
    """The checkpoint that everything starts from."""
    random = np.random.default_rng(7)
    return {
        name: random.integers(0, 1 << 8 * spec.element_nbytes, spec.num_elements, dtype=np.uint64).astype(spec.word_dtype)
        for name, spec in CATALOG.items()
    }


def dense(weights: Mapping[str, Words]) -> bytes:
    """All bits of a policy, in one string."""
    return b"".join(weights[name].tobytes() for name in CATALOG)


class Trainee:
    """The weights in training, all ranks together, and the shards that each rank owns."""

    def __init__(self) -> None:
        self.weights = initial()

    def step(self, random: Random) -> None:
        """An optimizer step: some bits of every tensor change, now and then back to what they were."""
        for name, words in self.weights.items():
            if random.random() < 0.1:
                continue  # this one happens not to change
            for _ in range(random.randint(1, 5)):
                words[random.randrange(words.size)] = random.randrange(1 << 8 * CATALOG[name].element_nbytes)

    def owner(self, rank: int) -> Owner:
        """A rank's owner, with the present weights as its baseline."""
        return Owner(OwnerId(rank), self._tasks(rank), _SETTINGS)

    def _tasks(self, rank: int) -> list[ConversionTask]:
        """Rank 0 owns the rows of ``a`` in two shards, rank 1 the rest."""
        if rank == 1:
            return [self._task(name, 0, CATALOG[name].num_elements) for name in ("b", "c")]
        return [self._task("a", 0, 15), self._task("a", 15, 15)]

    def _task(self, name: str, start: int, count: int) -> ConversionTask:
        view = StridedView(start, (count,), (1,))
        return ConversionTask(f"{name}@{start}", CATALOG[name], (Piece(view, view),), lambda: self.weights[name], (0,))


class Rollout:
    """A rollout engine's storage: the two 16-bit tensors share one, with ``a`` turned on its side."""

    def __init__(self) -> None:
        self._short = np.zeros(46, np.uint16)
        self._long = np.zeros(7, np.uint32)
        turned = StridedView(16, (6, 5), (1, 6))
        straight = whole((4, 4))
        self._homes: dict[str, tuple[Words, tuple[Piece, ...]]] = {
            "a": (self._short, (Piece(whole((6, 5)), turned),)),
            "b": (self._long, (Piece(whole((7,)), whole((7,))),)),
            "c": (self._short, (Piece(straight, straight),)),
        }
        self.load(initial())

    def load(self, weights: Mapping[str, Words]) -> None:
        """A dense load, as a freshly started engine does."""
        for name, words in weights.items():
            self._view(name)[...] = words.reshape(CATALOG[name].shape)

    def write(self, item: CodedItem) -> None:
        """Apply one item."""
        storage, pieces = self._homes[item.spec.name]
        kernels.apply_item(storage, pieces, item)

    def digests(self) -> dict[str, TensorDigest]:
        """Per tensor, from the bits that are stored now."""
        return {name: kernels.digest(storage, pieces) for name, (storage, pieces) in self._homes.items()}

    def bits(self) -> bytes:
        """What ``dense`` says of the weights that are stored."""
        return b"".join(np.ascontiguousarray(self._view(name)).tobytes() for name in CATALOG)

    def _view(self, name: str) -> Words:
        if name == "b":
            return self._long
        if name == "c":
            return self._short[:16].reshape(4, 4)
        return self._short[16:].reshape(5, 6).T
