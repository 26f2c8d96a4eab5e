"""A training job: the weights in training, the owners that hold them, and what a coordinator asks of all owners together."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from deltarefit.canonical import TensorDigest
from deltarefit.ids import BaselineId, OwnerId
from deltarefit.protocol import CommitRecord
from deltarefit.testing.simulation import calls
from deltarefit.testing.simulation.network import Node
from deltarefit.testing.simulation.owner_node import OwnerNode
from deltarefit.testing.simulation.weights import Trainee
from deltarefit.testing.simulation.world import Future, each

__all__ = ["Job", "sum_digests"]

_OWNER_S = 40.0


class Job:
    """Dies as a whole: a rank that is lost takes the others with it. Its coordinator alone may be replaced."""

    def __init__(self, name: str, trainee: Trainee, random: Random) -> None:
        self.name = name
        self.trainee = trainee
        self.candidate = ""
        """Names the weights of the refit at hand."""
        self.baseline: BaselineId | None = None
        """Set once the owners' baseline is bound to the record."""
        self.owners: Sequence[OwnerNode] = ()
        self._random = random

    @property
    def owner_ids(self) -> list[OwnerId]:
        return [OwnerId(owner.rank) for owner in self.owners]

    @property
    def is_alive(self) -> bool:
        return all(owner.is_up for owner in self.owners)

    def step(self, nonce: str) -> None:
        """One optimizer step; its result has a name of its own."""
        self.trainee.step(self._random)
        self.candidate = f"{self.name}-{nonce}"

    def crash(self) -> None:
        """All ranks end."""
        for owner in self.owners:
            owner.crash()

    # --- what a coordinator asks ------------------------------------------------------------------------------------

    def digests(self, coordinator: Node) -> Generator[Future, Any, dict[str, TensorDigest]]:
        """Of the committed baseline."""
        return (yield from self._sum(coordinator, calls.Digests()))

    def rebase(self, coordinator: Node, baseline: BaselineId) -> Generator[Future, Any, None]:
        """Name the owners' baseline."""
        yield from self._sum(coordinator, calls.Rebase(baseline))
        self.baseline = baseline

    def build(self, coordinator: Node, order: calls.Build) -> list[Future]:
        """Have all owners build and send."""
        return [coordinator.call(owner.name, order, _OWNER_S) for owner in self.owners]

    def tell(self, coordinator: Node, body: calls.StopSending) -> Generator[Future, Any, None]:
        """Have all owners do it."""
        yield from each([coordinator.call(owner.name, body, _OWNER_S) for owner in self.owners])

    def commit(self, coordinator: Node, record: CommitRecord) -> Generator[Future, Any, dict[str, TensorDigest]]:
        """Have all owners make their baseline what the record names."""
        digests = yield from self._sum(coordinator, calls.CommitBaseline(record))
        self.baseline = record.baseline
        return digests

    def _sum(self, coordinator: Node, body: Any) -> Generator[Future, Any, dict[str, TensorDigest]]:
        return sum_digests((yield from each([coordinator.call(owner.name, body, _OWNER_S) for owner in self.owners])))


def sum_digests(parts: Iterable[Mapping[str, TensorDigest]]) -> dict[str, TensorDigest]:
    total: dict[str, TensorDigest] = {}
    for digests in parts:
        for name, digest in digests.items():
            total[name] = total.get(name, TensorDigest()) + digest
    return total
