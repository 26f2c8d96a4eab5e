"""The balanced tree over which a payload spreads. Pure: lists of peers in, lists of peers out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from deltarefit.errors import RejectedError

__all__ = ["MAX_FAN_OUT", "depth", "rotate", "split"]

_T = TypeVar("_T")

MAX_FAN_OUT = 64


def split(below: Sequence[_T], fan_out: int) -> tuple[tuple[_T, ...], ...]:
    """Deal the peers below a node to at most ``fan_out`` children: of every part, the first is the child, the rest is below it.

    Parts differ in length by at most one, which makes the tree as flat as any with that fan-out: with ``n`` peers below, the
    largest part has ``ceil(n / fan_out)``.
    """
    if not 1 <= fan_out <= MAX_FAN_OUT:
        raise RejectedError(f"fan-out {fan_out}: expected 1 to {MAX_FAN_OUT}")
    count = min(fan_out, len(below))
    parts: list[tuple[_T, ...]] = []
    first = 0
    for number in range(count):
        length = (len(below) - first) // (count - number)
        parts.append(tuple(below[first : first + length]))
        first += length
    return tuple(parts)


def rotate(peers: Sequence[_T], owner: int) -> tuple[_T, ...]:
    """All peers, starting with the root of that owner: owners take roots in turn, so their load spreads."""
    if not peers:
        return ()
    first = owner % len(peers)
    return (*peers[first:], *peers[:first])


def depth(num_below: int, fan_out: int) -> int:
    """Hops from a node to the farthest peer below it."""
    hops = 0
    while num_below > 0:
        hops += 1
        num_below = -(-num_below // fan_out) - 1
    return hops
