"""A training job's process group in one process: each rank is a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from deltarefit.errors import RejectedError, TransportError

__all__ = ["ThreadCollective", "run_ranks"]

ResultT = TypeVar("ResultT")


class _Meeting:
    """Where the ranks of one world meet. Round ``n`` is everybody's ``n``-th exchange."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, bytes]] = {}
        self._next_round = [0] * world_size
        self._gone: set[int] = set()

    def exchange(self, rank: int, data: bytes) -> list[bytes]:
        with self._changed:
            number = self._next_round[rank]
            self._next_round[rank] += 1
            brought = self._rounds.setdefault(number, {})
            brought[rank] = data
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_settled(brought), self._timeout_s)
            if len(brought) < self.world_size:
                absent = sorted(set(range(self.world_size)) - brought.keys())
                raise TransportError(f"rank {rank} waited in exchange {number}; ranks {absent} did not come")
            if all(other > number for other in self._next_round):
                self._rounds.pop(number, None)
            return [brought[other] for other in range(self.world_size)]

    def leave(self, rank: int) -> None:
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def _is_settled(self, brought: dict[int, bytes]) -> bool:
        return len(brought) == self.world_size or bool(self._gone - brought.keys())


class ThreadCollective:
    """``Collective`` between threads. A rank that leaves or does not come within the deadline fails the others' call."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self._rank = rank
        self._meeting = meeting
        self.num_calls = 0
        """Exchanges so far, for tests that count them."""

    @classmethod
    def world(cls, world_size: int, *, timeout_s: float = 30.0) -> list[ThreadCollective]:
        """One collective per rank of a new world."""
        if world_size < 1:
            raise RejectedError(f"world of {world_size} ranks: expected at least 1")
        meeting = _Meeting(world_size, timeout_s)
        return [cls(rank, meeting) for rank in range(world_size)]

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._meeting.world_size

    def all_gather(self, data: bytes) -> list[bytes]:
        self.num_calls += 1
        return self._meeting.exchange(self._rank, data)

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        if (data is None) == (self._rank == root):
            raise RejectedError(f"broadcast from rank {root}: expected data there and None on the others, on rank {self._rank}")
        return self.all_gather(data or b"")[root]

    def all_to_all(self, data: Sequence[bytes]) -> list[bytes]:
        if len(data) != self.world_size:
            raise RejectedError(f"all_to_all of {len(data)} messages in a world of {self.world_size} ranks")
        gathered = self.all_gather(msgspec.msgpack.encode(list(data)))
        return [msgspec.msgpack.decode(sent, type=list[bytes])[self._rank] for sent in gathered]

    def barrier(self) -> None:
        self.all_gather(b"")

    def leave(self) -> None:
        """Die, as far as the others can tell: a call that they wait in, or make later, raises at once."""
        self._meeting.leave(self._rank)


def run_ranks(
    world_size: int, work: Callable[[ThreadCollective], ResultT], *, timeout_s: float = 30.0
) -> list[ResultT | Exception]:
    """Run ``work`` on every rank of a new world, in threads; each rank's result, or what it raised."""
    ranks = ThreadCollective.world(world_size, timeout_s=timeout_s)

    def guarded(collective: ThreadCollective) -> ResultT | Exception:
        try:
            return work(collective)
        except Exception as error:  # handed to the caller
            return error
        finally:
            collective.leave()

    with ThreadPoolExecutor(world_size, thread_name_prefix="rank") as pool:
        return list(pool.map(guarded, ranks))
