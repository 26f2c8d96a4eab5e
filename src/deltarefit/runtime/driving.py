"""Turns the transition machine's commands into deeds, until it ends or asks for a person."""

from __future__ import annotations

from typing import Never

from deltarefit.errors import OperatorRequiredError
from deltarefit.protocol import TransitionMachine, TransitionSettings, commands, events
from deltarefit.runtime.coordinator import Coordinator

__all__ = ["drive"]


def drive(coordinator: Coordinator, started: events.Started, *, max_attempts: int, run: str) -> commands.Finish:
    """Run one transition from its first event to its end.

    Args:
        coordinator: carries out the commands.
        started: how the transition begins.
        max_attempts: failures in a row before a person is asked.
        run: the run's URL, for the texts that name commands.

    Raises:
        OperatorRequiredError: retries do not help. The record still holds what was under way; the next refit goes on from it.
    """
    machine = TransitionMachine(TransitionSettings(max_failures=max_attempts))
    (command,) = machine.receive(started)
    while not isinstance(command, commands.Finish):
        if isinstance(command, commands.AskOperator):
            _ask(command, run)
        event = coordinator.execute(command)
        if coordinator.abort and machine.abort_reason is None:
            instead = machine.receive(events.OperatorAborted(reason=coordinator.abort))
            if instead:  # nothing was under way, so it takes effect at once and the event is void
                (command,) = instead
                continue
        (command,) = machine.receive(event)
    return command


def _ask(command: commands.AskOperator, run: str) -> Never:
    causes = "".join(f"\n  {cause}" for cause in command.causes if cause not in command.reason)
    gates = "request gates may be closed and stay so" if command.gate_closed else "request gates are open"
    raise OperatorRequiredError(
        f"the refit cannot go on by itself: {command.reason}{causes}\n{gates}. See who is where with 'deltarefit status --run "
        f"{run}', mend the cause, then call refit() again: it ends what was left open and sends every element. To give the "
        f"refit up instead: 'deltarefit abort --run {run} --reason ...', then refit()"
    )
