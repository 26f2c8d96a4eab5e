"""The store of the simulated cluster, and the control plane's read, ask a rule, swap over a network that loses replies."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from deltarefit.control import SwapUncertainError
from deltarefit.errors import DeadlineError, RejectedError, TransportError
from deltarefit.protocol import CommitOutcome, CommitRequest, ControlState, decode_control, encode_control
from deltarefit.protocol import commit as rules
from deltarefit.testing.simulation import calls
from deltarefit.testing.simulation.network import Network, Node
from deltarefit.testing.simulation.world import Future

__all__ = ["RecordClient", "StoreNode"]

Rule = Callable[[ControlState], ControlState]
_TRIES = 3
_TIMEOUT_S = 2.0


class StoreNode(Node):
    """Holds the record and the beats; survives everything, and is slow or out of reach at times."""

    def __init__(self, network: Network, on_change: Callable[[ControlState | None, ControlState], None]) -> None:
        super().__init__(network, "store")
        self.state: ControlState | None = None
        self._data: bytes | None = None
        self._tag = 0
        self._beats: dict[str, tuple[str, object]] = {}
        self._on_change = on_change

    def crash(self) -> None:
        """A durable store does not forget: it is out of reach for a while."""
        self.freeze(2.0)

    def handle(self, source: str, body: Any) -> Any:
        match body:
            case calls.ReadRecord():
                return self._data, self._tag
            case calls.SwapRecord(tag=tag, data=data):
                if tag != self._tag:
                    return False
                before, self.state = self.state, decode_control(data)
                self._data, self._tag = data, self._tag + 1
                self._on_change(before, self.state)
                return True
            case calls.Beat(name=name, text=text, shown=shown):
                self._beats[name] = (text, shown)
                return True
            case _:
                return dict(self._beats)


class RecordClient:
    """``control.ControlPlane`` as generators: the same loop, over calls that may go unanswered."""

    def __init__(self, node: Node, *, fences: bool = True) -> None:
        """``fences=False`` is a planted bug: obsolete attempts are not fenced off."""
        self._node = node
        self._fences = fences

    def read(self) -> Generator[Future, Any, ControlState | None]:
        """The record as it is now."""
        return (yield from self._read())[0]

    def _read(self) -> Generator[Future, Any, tuple[ControlState | None, int]]:
        for _ in range(_TRIES):
            try:
                data, tag = yield self._node.call("store", calls.ReadRecord(), _TIMEOUT_S)
            except DeadlineError:
                continue
            return (None if data is None else decode_control(data)), tag
        raise TransportError("store: out of reach")

    def change(self, rule: Rule) -> Generator[Future, Any, ControlState]:
        """Bring the record to what ``rule`` makes of it; see ``ControlPlane``."""
        nonces: set[str] = set()
        for _ in range(2 * _TRIES):
            try:
                state, tag = yield from self._read()
            except TransportError as error:
                if nonces:
                    raise SwapUncertainError(f"store: out of reach after a change was sent: {error}") from error
                raise
            if state is None:
                raise RejectedError("store: no such run")
            if nonces.intersection(state.nonces):
                return state
            new = rule(state)
            if new is state:
                return state
            nonce = self._new_nonce()
            nonces.add(nonce)
            stamped = rules.stamp(new, nonce)
            try:
                if (yield self._node.call("store", calls.SwapRecord(tag, encode_control(stamped)), _TIMEOUT_S)):
                    return stamped
            except DeadlineError:
                continue
        raise SwapUncertainError("store: no change went through")

    def create(self, state: ControlState) -> Generator[Future, Any, ControlState]:
        """Create the record if there is none; return what is there."""
        for _ in range(_TRIES):
            found, tag = yield from self._read()
            if found is not None:
                return found
            try:
                yield self._node.call("store", calls.SwapRecord(tag, encode_control(state)), _TIMEOUT_S)
            except DeadlineError:
                continue
        raise TransportError("store: the run could not be created")

    def commit(self, request: CommitRequest) -> Generator[Future, Any, CommitOutcome]:
        """Publish an attempt."""
        outcome = CommitOutcome.UNKNOWN

        def rule(state: ControlState) -> ControlState:
            nonlocal outcome
            outcome, new = rules.commit(state, request)
            return new

        try:
            state = yield from self.change(rule)
        except TransportError:
            return CommitOutcome.UNKNOWN
        return CommitOutcome.SUCCESS if state.record.baseline == request.baseline else outcome

    def mark_obsolete(self, attempt: Any) -> Generator[Future, Any, ControlState]:
        """Fence an attempt off."""
        if not self._fences:
            state = yield from self.read()
            if state is None:
                raise RejectedError("store: no such run")
            return state
        return (yield from self.change(lambda state: rules.mark_obsolete(state, attempt=attempt)))

    def _new_nonce(self) -> str:
        return f"{self._node.world.random.getrandbits(48):012x}"
