"""How owned shards are cut into chunks that one thread scans, and chunks into buckets that travel (paper C, Fig. C.3).

Sizes are input bytes, unchanged elements included. No item is ever split, and the cuts depend on sizes and on what has changed
only, so every attempt at one candidate makes the same buckets.

The paper's buckets are of one size. Ours are smaller at the beginning, so that the link has something to carry soon, and at the
end, so that little is left to decode and write once the last byte has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from deltarefit.payload import Limits
from deltarefit.records import Bucket, CodedItem

__all__ = ["cut_into_buckets", "cut_into_chunks"]

PartT = TypeVar("PartT")
_LEAST_SHARE = 8
"""The first and the last are an eighth of the others: with fewer bytes, what each costs by itself would show."""
_LEAST_NBYTES = 2 << 20
"""Nor less than this, where the others are small themselves: each costs a request to the store, a head and frames of its own,
whatever it carries."""


def _target(target_nbytes: int, done_nbytes: int, total_nbytes: int | None) -> int:
    """Of the next chunk or bucket: where the total is known, as much as all before it together, and half of what is left, at
    most."""
    if total_nbytes is None:
        return target_nbytes
    least_nbytes = max(target_nbytes // _LEAST_SHARE, min(target_nbytes, _LEAST_NBYTES))
    return max(least_nbytes, min(target_nbytes, done_nbytes, (total_nbytes - done_nbytes) // 2))


def cut_into_chunks(
    parts: Iterable[tuple[PartT, int]], target_nbytes: int, *, total_nbytes: int | None = None
) -> tuple[tuple[PartT, ...], ...]:
    """Group (part, nbytes) in order: a chunk ends before the part that would take it past its target.

    If ``total_nbytes``, the bytes of all parts, is given, the first and the last chunks are smaller.
    """
    chunks: list[tuple[PartT, ...]] = []
    filling: list[PartT] = []
    filled = done = 0
    target = _target(target_nbytes, 0, total_nbytes)
    for part, nbytes in parts:
        if filling and filled + nbytes > target:
            chunks.append(tuple(filling))
            done += filled
            filling, filled = [], 0
            target = _target(target_nbytes, done, total_nbytes)
        filling.append(part)
        filled += nbytes
    if filling:
        chunks.append(tuple(filling))
    return tuple(chunks)


def cut_into_buckets(
    scanned: Iterable[tuple[tuple[CodedItem, ...], int]],
    target_nbytes: int,
    limits: Limits | None = None,
    *,
    total_nbytes: int | None = None,
) -> Iterator[Bucket]:
    """Buckets from scanned chunks, each given as its items and its input bytes, as soon as each bucket is full.

    A chunk with items counts whole; a chunk without counts nothing. Many small tensors fill a payload by their number, or by
    their names, before they fill it by their bytes: a chunk is cut there. If ``total_nbytes``, the bytes of all chunks, is
    given, the first and the last buckets are smaller.
    """
    limits = limits or Limits()
    items: list[CodedItem] = []
    filled = named = seen = 0
    for chunk_items, chunk_nbytes in scanned:
        target = _target(target_nbytes, seen - filled, total_nbytes)
        seen += chunk_nbytes
        if not chunk_items:
            continue
        if items and filled + chunk_nbytes > target:
            yield Bucket(tuple(items), filled)
            items, filled, named = [], 0, 0
        for item in chunk_items:
            name_nbytes = len(item.spec.name.encode())
            if items and (len(items) == limits.items or named + name_nbytes > limits.name_nbytes):
                yield Bucket(tuple(items), filled)
                items, filled, named = [], 0, 0
            items.append(item)
            named += name_nbytes
        filled += chunk_nbytes
        if filled >= target:
            yield Bucket(tuple(items), filled)
            items, filled, named = [], 0, 0
    if items:
        yield Bucket(tuple(items), filled)
