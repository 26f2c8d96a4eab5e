"""Virtual time and one thread: events in a heap, processes as generators, everything decided by one seeded generator.

A process ``yield``s a ``Future`` and is resumed with its value, or with its error thrown in. Nothing sleeps and nothing is
concurrent, so a seed replays to the last event.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterable
from random import Random
from typing import Any

from deltarefit.errors import DeadlineError, RefitError

__all__ = ["CrashedError", "Future", "Process", "World", "each"]

Steps = Generator["Future", Any, Any]


class CrashedError(Exception):
    """A node died in the middle of what it was doing. Caught by the world alone."""


class Future:
    """Something that will be known later, once."""

    __slots__ = ("_then", "error", "is_done", "value")

    def __init__(self) -> None:
        self.is_done = False
        self.value: Any = None
        self.error: RefitError | None = None
        self._then: list[Callable[[Future], None]] = []

    def resolve(self, value: Any = None) -> None:
        """It came to this; a second time is ignored."""
        self._settle(value, None)

    def fail(self, error: RefitError) -> None:
        """It came to nothing; ignored if it is settled."""
        self._settle(None, error)

    def then(self, action: Callable[[Future], None]) -> None:
        """Call ``action`` once it is settled, at once if it is."""
        if self.is_done:
            action(self)
        else:
            self._then.append(action)

    def _settle(self, value: Any, error: RefitError | None) -> None:
        if self.is_done:
            return
        self.is_done, self.value, self.error = True, value, error
        then, self._then = self._then, []
        for action in then:
            action(self)


class Process(Future):
    """A generator that runs; as a future, what it returns or raises."""

    __slots__ = ("_guard", "_steps")

    def __init__(self, steps: Steps, guard: Callable[[Callable[[], None]], None]) -> None:
        """``guard`` runs each step for its node: it drops steps of a dead life, and lets the node crash."""
        super().__init__()
        self._steps = steps
        self._guard = guard
        guard(lambda: self._advance(None))

    def _advance(self, settled: Future | None) -> None:
        try:
            if settled is not None and settled.error is not None:
                waited = self._steps.throw(settled.error)
            else:
                waited = self._steps.send(None if settled is None else settled.value)
        except StopIteration as stop:
            self.resolve(stop.value)
        except RefitError as error:
            self.fail(error)
        else:
            waited.then(lambda future: self._guard(lambda: self._advance(future)))


def each(futures: Iterable[Future]) -> Steps:
    """Wait for all of them, one after another; their values, or the first error."""
    values = []
    for future in futures:
        values.append((yield future))  # noqa: PERF401
    return values


class World:
    """Time, chance and what is to happen."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_s = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Have ``action`` called so much later."""
        self._count += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._count, action))

    def sleep(self, delay_s: float) -> Future:
        """A future of that time. Only a node's own ``sleep`` knows of crashes and freezes."""
        future = Future()
        self.after(delay_s, future.resolve)
        return future

    def any_of(self, futures: Iterable[Future], limit_s: float) -> Future:
        """A future of the moment when one of them is settled, or ``limit_s`` is over."""
        found = self.sleep(limit_s)
        for future in futures:
            future.then(lambda _: found.resolve())
        return found

    def run(self, until: Callable[[], bool], *, limit_s: float, limit_events: int) -> None:
        """Let things happen until a condition holds.

        Raises:
            DeadlineError: it does not within the limits; the simulated system hangs, or livelocks.
        """
        while not until():
            if not self._heap:
                raise DeadlineError(f"nothing is left to happen at {self.now_s:.1f} s")
            self.now_s, _, action = heapq.heappop(self._heap)
            self.num_events += 1
            if self.now_s > limit_s or self.num_events > limit_events:
                raise DeadlineError(f"no end after {self.now_s:.0f} virtual seconds and {self.num_events} events")
            action()
