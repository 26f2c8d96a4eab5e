"""How owned shards are cut into chunks that one thread scans, and chunks into buckets that travel (paper C, Fig. C.3).

Sizes are input bytes, unchanged elements included. No item is ever split, and the cuts depend on sizes and on what has changed
only, so every attempt at one candidate makes the same buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from deltarefit.payload import Limits
from deltarefit.records import Bucket, CodedItem

__all__ = ["cut_into_buckets", "cut_into_chunks"]

PartT = TypeVar("PartT")


def cut_into_chunks(parts: Sequence[tuple[PartT, int]], target_nbytes: int) -> tuple[tuple[PartT, ...], ...]:
    """Group (part, nbytes) in order: a chunk ends before the part that would take it past its target."""
    chunks: list[tuple[PartT, ...]] = []
    filling: list[PartT] = []
    filled = 0
    for part, nbytes in parts:
        if filling and filled + nbytes > target_nbytes:
            chunks.append(tuple(filling))
            filling, filled = [], 0
        filling.append(part)
        filled += nbytes
    if filling:
        chunks.append(tuple(filling))
    return tuple(chunks)


def cut_into_buckets(
    scanned: Iterable[tuple[tuple[CodedItem, ...], int]], target_nbytes: int, limits: Limits | None = None
) -> Iterator[Bucket]:
    """Buckets from scanned chunks, each given as its items and its input bytes, as soon as each bucket is full.

    A chunk with items counts whole; a chunk without counts nothing. Many small tensors fill a payload by their number, or by
    their names, before they fill it by their bytes: a chunk is cut there.
    """
    limits = limits or Limits()
    items: list[CodedItem] = []
    filled = named = 0
    for chunk_items, chunk_nbytes in scanned:
        if not chunk_items:
            continue
        if items and filled + chunk_nbytes > target_nbytes:
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
        if filled >= target_nbytes:
            yield Bucket(tuple(items), filled)
            items, filled, named = [], 0, 0
    if items:
        yield Bucket(tuple(items), filled)
