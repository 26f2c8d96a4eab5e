"""Finding out which ranks hold copies of a shard, where an adapter cannot know."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from deltarefit.errors import TransportError
from deltarefit.source.collective import Collective
from deltarefit.source.task import ConversionTask

__all__ = ["find_replicas"]

_DIGEST_NBYTES = 16


def find_replicas(tasks: Sequence[ConversionTask], collective: Collective) -> tuple[ConversionTask, ...]:
    """The tasks with their replica sets filled in: the ranks that list a task of the same key.

    Called on every rank. That the copies are equal is for ``audit_replicas`` to prove.

    Raises:
        TransportError: a rank sent something else.
    """
    open_keys = {task.key: _digest(task.key) for task in tasks if not task.replicas}
    holders: dict[bytes, list[int]] = {}
    for rank, listed in enumerate(collective.all_gather(b"".join(open_keys.values()))):
        if len(listed) % _DIGEST_NBYTES:
            raise TransportError(f"replica list of {len(listed)} bytes from rank {rank}: expected {_DIGEST_NBYTES} a shard")
        for start in range(0, len(listed), _DIGEST_NBYTES):
            holders.setdefault(listed[start : start + _DIGEST_NBYTES], []).append(rank)
    return tuple(replace(task, replicas=tuple(holders[open_keys[task.key]])) if not task.replicas else task for task in tasks)


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=_DIGEST_NBYTES).digest()
