"""Lists in messages for people: the first few, and how many more there are."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["some_of"]


def some_of(things: Iterable[object], shown: int, *, joint: str = ", ") -> str:
    """The first ``shown`` things and how many more there are, on a line of its own if ``joint`` breaks lines."""
    texts = [str(thing) for thing in things]
    text = joint.join(texts[:shown])
    if len(texts) <= shown:
        return text
    return text + (joint if "\n" in joint else " ") + f"and {len(texts) - shown} more"
