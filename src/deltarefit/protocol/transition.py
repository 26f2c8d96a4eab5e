"""The coordinator's machine for one refit (Algorithm B.2). ``transition_table`` has the theory and the table."""

from __future__ import annotations

from deltarefit.ids import AttemptId, BaselineId, PolicyVersion
from deltarefit.protocol import commands as c
from deltarefit.protocol import events as e
from deltarefit.protocol.record import CommitRecord
from deltarefit.protocol.transition_memory import IllegalEventError, Memory, TransitionSettings, command_of
from deltarefit.protocol.transition_rules import remember, signal_of
from deltarefit.protocol.transition_table import NEXT_STATE, Signal, TransitionState

__all__ = ["NEXT_STATE", "IllegalEventError", "Signal", "TransitionMachine", "TransitionSettings", "TransitionState"]

_S = TransitionState
_G = Signal


class TransitionMachine:
    """One transition of the coordinator: ``receive`` an event, carry out the commands, report what they came to.

    Not thread safe; the shell calls it from one place. A machine serves one transition and is then thrown away.
    """

    def __init__(self, settings: TransitionSettings | None = None) -> None:
        self._settings = settings or TransitionSettings()
        self._state = _S.NEW
        self._memory = Memory(CommitRecord(PolicyVersion(0), BaselineId("")))

    @property
    def state(self) -> TransitionState:
        return self._state

    @property
    def attempt(self) -> AttemptId | None:
        """The attempt at hand."""
        return self._memory.attempt

    @property
    def is_ended(self) -> bool:
        return self._state is _S.ENDED

    @property
    def is_admitted(self) -> bool:
        return self._memory.is_admitted

    @property
    def abort_reason(self) -> str | None:
        """Set as soon as an abort was asked for: a shell in the middle of a long command should give it up and report that."""
        return self._memory.abort

    @property
    def causes(self) -> tuple[str, ...]:
        """Why attempts failed, first one first."""
        return tuple(self._memory.causes)

    def receive(self, event: e.Event) -> tuple[c.Command, ...]:
        """Take in what happened; say what to do next.

        Raises:
            IllegalEventError: the event cannot happen in this state. Nothing is changed.
        """
        signal = signal_of(self._state, self._memory, event, self._settings)
        following = NEXT_STATE[self._state].get(signal) if signal is not None else None
        if signal is None or following is None:
            raise IllegalEventError(
                f"transition of {self._memory.attempt or 'no attempt'}: {type(event).__name__} in state '{self._state.value}'; "
                f"expected one of: {', '.join(sorted(found.value for found in NEXT_STATE[self._state])) or 'nothing, it ended'}"
            )
        remember(self._state, self._memory, event, signal)
        self._state = following
        if signal is _G.ABORT_NOTED:
            return ()
        return (command_of(following, self._memory),)
