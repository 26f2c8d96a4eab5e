"""Nodes that crash, freeze and restart, and a network between them that loses, doubles, delays, disorders and parts.

Calls are repeated until they are answered, so every message may arrive any number of times, at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from deltarefit.errors import DeadlineError, RefitError
from deltarefit.testing.simulation.calls import SwapRecord
from deltarefit.testing.simulation.faults import FaultPlan, Strike
from deltarefit.testing.simulation.world import CrashedError, Future, Process, World

__all__ = ["Call", "Network", "Node"]

_RESEND_S = 1.0
_FASTEST_S, _SLOWEST_S = 0.001, 0.03
_LATE_PART_S, _LATE_S = 9.0, (9.5, 13.0)


@dataclass(frozen=True, slots=True)
class Call:
    """A request; its reply carries the same number."""

    number: int
    body: Any


@dataclass(frozen=True, slots=True)
class _Reply:
    number: int
    value: Any
    error: RefitError | None


class Network:
    """Carries messages, as well as the plan and the noise let it."""

    def __init__(self, world: World, faults: FaultPlan) -> None:
        self.world = world
        self.faults = faults
        self.nodes: dict[str, Node] = {}
        self.num_messages = 0
        self.loss = 0.0
        self.doubling = 0.0
        self._parted: dict[frozenset[str], float] = {}

    def send(self, source: str, target: str, message: Any) -> None:
        """Put a message on its way. It may strike a planned fault."""
        self.num_messages += 1
        strike = self.faults.strike_message(self.num_messages)
        random = self.world.random
        delays = [random.uniform(_FASTEST_S, _SLOWEST_S)]
        if random.random() < self.doubling:
            delays.append(random.uniform(0.0, 5.0))
        if random.random() < self.loss:
            delays = delays[1:]
        if isinstance(message, Call) and isinstance(message.body, SwapRecord) and self.faults.strikes("late swap"):
            # Nothing of this sender reaches the store until it has given up; then the old request turns up after all.
            self.part(source, target, _LATE_PART_S)
            self.world.after(random.uniform(*_LATE_S), lambda: self._hand_over(source, target, message))
            return
        if strike is not None:
            delays = self._apply(strike, source, target, delays)
        for delay_s in delays:
            self.world.after(delay_s, lambda: self._deliver(source, target, message))

    def _apply(self, strike: Strike, source: str, target: str, delays: list[float]) -> list[float]:
        first = delays[:1] or [_FASTEST_S]
        match strike.kind:
            case "drop":
                return []
            case "double":
                return [*first, strike.span_s]
            case "delay":
                return [strike.span_s]
            case "crash sender":
                self._node(source).crash()
            case "crash target":
                self.world.after(first[0] * 0.5, self._node(target).crash)
            case "crash target after":
                self.world.after(first[0], lambda: self.world.after(0.0, self._node(target).crash))
            case "freeze sender":
                self._node(source).freeze(strike.span_s)
            case "freeze target":
                self._node(target).freeze(strike.span_s)
            case "part":
                self.part(source, target, strike.span_s)
            case "isolate":
                for other in self.nodes:
                    self.part(source, other, strike.span_s)
        return first

    def part(self, one: str, other: str, span_s: float) -> None:
        """Nothing passes between two nodes for so long."""
        if one != other:
            self._parted[frozenset((one, other))] = self.world.now_s + span_s

    def _node(self, name: str) -> Node:
        return self.nodes[name]

    def _deliver(self, source: str, target: str, message: Any) -> None:
        if self._parted.get(frozenset((source, target)), 0.0) <= self.world.now_s:
            self._hand_over(source, target, message)

    def _hand_over(self, source: str, target: str, message: Any) -> None:
        node = self.nodes.get(target)
        if node is not None:
            node.arrive(source, message)


class Node:
    """One process of the cluster. Subclasses give ``boot`` and ``handle``."""

    can_crash = True
    remembers_replies = False
    """Whether a call that comes again is answered as before, instead of being done again."""

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.world = network.world
        self.name = name
        self.is_up = False
        self.life = 0
        self.frozen_until_s = 0.0
        self.on_crash: Callable[[Node], None] = lambda _: None
        self.on_freeze: Callable[[Node, float], None] = lambda _, __: None
        self._calls: dict[int, Future] = {}
        self._running: set[tuple[str, int]] = set()
        self._replies: dict[tuple[str, int], _Reply] = {}
        self._count = 0
        network.nodes[name] = self

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a life with nothing remembered."""
        self.is_up = True
        self.life += 1
        self.frozen_until_s = 0.0
        self._calls = {}
        self._running = set()
        self._replies = {}
        self.boot()

    def boot(self) -> None:
        """What a fresh process does first."""

    def crash(self) -> None:
        """Die at once."""
        if self.is_up and self.can_crash:
            self.is_up = False
            self.life += 1
            self.on_crash(self)

    def freeze(self, span_s: float) -> None:
        """Stop doing anything for so long; what arrives meanwhile waits."""
        if self.is_up and self.can_crash:
            self.frozen_until_s = max(self.frozen_until_s, self.world.now_s + span_s)
            self.on_freeze(self, span_s)

    def effect(self, what: str) -> None:
        """Between two effects: a planned fault may kill the node here.

        Raises:
            CrashedError: it did.
        """
        del what
        if self.network.faults.strikes("crash between effects"):
            self.crash()
            raise CrashedError

    def guard(self, action: Callable[[], None]) -> None:
        """Run a step of the present life: not if the node is dead, later if it is frozen."""
        self._guarded(action, self.life)

    def _guarded(self, action: Callable[[], None], life: int) -> None:
        if life != self.life or not self.is_up:
            return
        if self.frozen_until_s > self.world.now_s:
            self.world.after(self.frozen_until_s - self.world.now_s, lambda: self._guarded(action, life))
            return
        try:
            action()
        except CrashedError:
            return

    def spawn(self, steps: Generator[Future, Any, Any]) -> Process:
        """Run a process that dies with this life of the node."""
        life = self.life
        return Process(steps, lambda action: self._guarded(action, life))

    def sleep(self, span_s: float) -> Future:
        return self.world.sleep(span_s)

    def repeat(self, pause_s: float, action: Callable[[], None]) -> None:
        """Do something again and again for as long as this life lasts."""
        life = self.life

        def again() -> None:
            self._guarded(turn, life)

        def turn() -> None:
            action()
            self.world.after(pause_s, again)

        again()

    # --- messages ---------------------------------------------------------------------------------------------------

    def call(self, target: str, body: Any, timeout_s: float) -> Future:
        """Ask another node; a future of its answer, ``DeadlineError`` if none comes."""
        self._count += 1
        number = self.life * 1_000_000 + self._count
        future = Future()
        self._calls[number] = future
        self._ask(target, Call(number, body), future, self.world.now_s + timeout_s, self.life)
        return future

    def _ask(self, target: str, call: Call, future: Future, end_s: float, life: int) -> None:
        if future.is_done or life != self.life:
            return
        if self.world.now_s >= end_s:
            self._calls.pop(call.number, None)
            future.fail(DeadlineError(f"{target}: no answer to {type(call.body).__name__}"))
            return
        self._guarded(lambda: self.network.send(self.name, target, call), life)
        pause_s = min(_RESEND_S, end_s - self.world.now_s)
        self.world.after(pause_s, lambda: self._ask(target, call, future, end_s, life))

    def arrive(self, source: str, message: Any) -> None:
        """A message is here."""
        self.guard(lambda: self._take(source, message))

    def _take(self, source: str, message: Any) -> None:
        if isinstance(message, _Reply):
            future = self._calls.pop(message.number, None)
            if future is not None:
                future.resolve(message.value) if message.error is None else future.fail(message.error)
            return
        key = (source, message.number)
        if key in self._running:
            return  # it is being done
        if key in self._replies:
            self.network.send(self.name, source, self._replies[key])
            return
        self._running.add(key)
        process = self.spawn(self._serve(source, message.body))
        process.then(lambda done: self._answer(source, key, done))

    def _serve(self, source: str, body: Any) -> Generator[Future, Any, Any]:
        result = self.handle(source, body)
        if isinstance(result, Generator):
            result = yield from result
        return result

    def _answer(self, source: str, key: tuple[str, int], done: Future) -> None:
        self._running.discard(key)
        if done.value is not NotImplemented:
            reply = _Reply(key[1], done.value, done.error)
            if self.remembers_replies:
                self._replies[key] = reply
            self.network.send(self.name, source, reply)

    def handle(self, source: str, body: Any) -> Any:
        """Do what a call asks: return the answer, or a generator that returns it; NotImplemented to stay silent."""
        raise NotImplementedError
