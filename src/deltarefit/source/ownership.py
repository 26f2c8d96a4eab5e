"""Who compares which shard: one owner per shard among the ranks that hold a copy (paper 4.1).

Every rank computes the same answer from names, sizes and replica sets alone, without talking. It depends on nothing that
differs between processes, attempts or restarts.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
from collections.abc import Iterable, Sequence

from deltarefit.errors import RejectedError
from deltarefit.source.task import ConversionTask

__all__ = ["elect_owners", "owned_tasks", "stable_hash"]


def stable_hash(text: str) -> int:
    """8 bytes of BLAKE2b over the UTF-8 text, little-endian; Python's own hash differs per process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def elect_owners(tasks: Iterable[ConversionTask]) -> dict[str, int]:
    """The owning rank of every shard, by key.

    Shards with the same replica set are dealt out largest first, each to the rank of the set with the fewest bytes so far;
    equal loads are settled by the hash of the key. All ranks of a set hold the same shards, so all of them agree; different
    sets are dealt out independently because a rank does not know the shards of others.

    Raises:
        RejectedError: two tasks have one key, or one has no replica set yet.
    """
    by_replicas: dict[tuple[int, ...], list[ConversionTask]] = {}
    seen: set[str] = set()
    for task in tasks:
        if task.key in seen:
            raise RejectedError(f"conversion task {task.key} is listed twice; expected one task per shard")
        if not task.replicas:
            raise RejectedError(f"conversion task {task.key} has no replica set; expected find_replicas to be called first")
        seen.add(task.key)
        by_replicas.setdefault(task.replicas, []).append(task)
    owners: dict[str, int] = {}
    for replicas, shards in by_replicas.items():
        owners.update(_deal(replicas, [(task.nbytes, task.key) for task in shards]))
    return owners


def _deal(replicas: tuple[int, ...], shards: Sequence[tuple[int, str]]) -> dict[str, int]:
    """Largest-first assignment of (nbytes, key) to ranks."""
    ranks_at: dict[int, list[int]] = {0: list(replicas)}  # load in bytes to the ascending ranks that carry it
    loads = [0]
    owners: dict[str, int] = {}
    for nbytes, key in sorted(shards, key=lambda shard: (-shard[0], shard[1])):
        load = loads[0]
        lightest = ranks_at[load]
        rank = lightest[stable_hash(key) % len(lightest)]
        owners[key] = rank
        if nbytes == 0:
            continue
        lightest.remove(rank)
        if not lightest:
            del ranks_at[load]
            heapq.heappop(loads)
        if load + nbytes not in ranks_at:
            ranks_at[load + nbytes] = []
            heapq.heappush(loads, load + nbytes)
        bisect.insort(ranks_at[load + nbytes], rank)
    return owners


def owned_tasks(tasks: Sequence[ConversionTask], rank: int) -> tuple[ConversionTask, ...]:
    """The tasks that this rank owns, in the order of their keys: the order in which it scans and sends."""
    owners = elect_owners(tasks)
    return tuple(sorted((task for task in tasks if owners[task.key] == rank), key=lambda task: task.key))
