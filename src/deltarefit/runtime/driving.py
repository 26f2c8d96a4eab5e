"""Turns the transition machine's commands into deeds, until it ends or asks for a person."""

from __future__ import annotations

import logging
from typing import Never

from deltarefit.errors import CommitConflictError, OperatorRequiredError, RejectedError
from deltarefit.protocol import TransitionMachine, TransitionOutcome, TransitionSettings, commands, events
from deltarefit.runtime.coordinator import Coordinator

__all__ = ["drive", "expect_recovered", "raise_unless_committed"]

_LOG = logging.getLogger(__name__)


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


def raise_unless_committed(finish: commands.Finish, run: str) -> None:
    """Turn another end of a refit than a commit into the error that says what to do."""
    causes = "; ".join(finish.causes)
    match finish.outcome:
        case TransitionOutcome.COMMITTED:
            return
        case TransitionOutcome.REJECTED:
            raise RejectedError(causes)
        case TransitionOutcome.ABORTED:
            raise OperatorRequiredError(
                f"the refit was aborted: {causes}; policy version {finish.record.policy_version} stays committed. "
                "Receivers whose request gate was closed keep it closed until the next refit(), which sends every element"
            )
        case _:
            raise CommitConflictError(f"another coordinator owns {run}: {causes}; stop this trainer")


def expect_recovered(finish: commands.Finish, attempt: str, run: str) -> None:
    """What was left open has ended.

    Raises:
        CommitConflictError: another coordinator took the run over meanwhile.
    """
    match finish.outcome:
        case TransitionOutcome.RECOVERED:
            return
        case TransitionOutcome.ABORTED:
            _LOG.warning("attempt %s was aborted by an operator: %s", attempt, "; ".join(finish.causes))
        case _:
            raise CommitConflictError(
                f"another coordinator owns {run}: ending {attempt}: {'; '.join(finish.causes)}; stop this trainer"
            )
