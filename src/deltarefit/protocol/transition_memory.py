"""What a transition remembers, and the command that each state gives from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deltarefit.errors import RefitError, RejectedError
from deltarefit.ids import AttemptId, EncodingMode, ReceiverId
from deltarefit.protocol import commands as c
from deltarefit.protocol.record import CommitRecord
from deltarefit.protocol.transition_table import TransitionState

__all__ = ["GIVES", "IllegalEventError", "Memory", "TransitionSettings", "command_of"]

_S = TransitionState


class IllegalEventError(RefitError):
    """The shell reported something that cannot happen in this state: a defect in the shell, not in the run."""


@dataclass(frozen=True, slots=True)
class TransitionSettings:
    """How patient a transition is."""

    max_failures: int = 5
    """Failed attempts (or prepares) in one transition before an operator is asked. The paper names no limit."""

    def __post_init__(self) -> None:
        if self.max_failures < 1:
            raise RejectedError(f"transition: max_failures {self.max_failures}, expected at least 1")


@dataclass(slots=True)
class Memory:
    """What the guards look at, and what commands carry."""

    base: CommitRecord
    target: CommitRecord | None = None
    attempt: AttemptId | None = None
    required: frozenset[ReceiverId] = frozenset()
    acknowledged: frozenset[ReceiverId] = frozenset()
    mode: EncodingMode = EncodingMode.MIXED
    is_dense: bool = False
    is_admitted: bool = False
    is_takeover: bool = False
    """The attempt at hand is a former coordinator's."""
    recover_only: bool = False
    gate_closed: bool = False
    num_attempts: int = 0
    num_failures: int = 0
    causes: list[str] = field(default_factory=list)
    retired: frozenset[ReceiverId] = frozenset()
    abort: str | None = None
    is_rejected: bool = False
    is_lost: bool = False
    is_committed: bool = False
    stuck_in: TransitionState = _S.PREPARING
    stuck_because: str = ""
    outcome: c.TransitionOutcome = c.TransitionOutcome.CONFLICT
    record: CommitRecord | None = None
    """The record as it was last read or committed."""


# ---------------------------------------------------------------------------------------------- what a state asks for

GIVES: Mapping[TransitionState, type[c.Command]] = {
    _S.OLD_FENCING: c.MarkObsolete,
    _S.OLD_STOPPING: c.StopAndWait,
    _S.OLD_READING: c.ReadCommit,
    _S.OLD_DISCARDING: c.Cleanup,
    _S.PREPARING: c.Prepare,
    _S.RUNNING: c.RunSchedule,
    _S.COMMITTING: c.Commit,
    _S.READING: c.ReadCommit,
    _S.UPDATING: c.UpdateBaselines,
    _S.CLEANING: c.Cleanup,
    _S.DROPPING: c.DropCaches,
    _S.REOPENING: c.ReopenGate,
    _S.CLOSING: c.CloseAttempt,
    _S.FENCING: c.MarkObsolete,
    _S.STOPPING: c.StopAndWait,
    _S.DISCARDING: c.Cleanup,
    _S.FORGETTING: c.CloseAttempt,
    _S.BACKING_OFF: c.Backoff,
    _S.ABORTING: c.RecordAbort,
    _S.ASKING: c.AskOperator,
    _S.ENDED: c.Finish,
}
"""The command that each state gives when it is entered, and whose answer it waits for."""


def command_of(state: TransitionState, memory: Memory) -> c.Command:
    """The command that is given when ``state`` is entered."""
    match state:
        case _S.PREPARING:
            return c.Prepare(
                base=memory.base,
                mode=memory.mode,
                is_dense=memory.is_dense,
                ordinal=memory.num_attempts + 1,
                excluded=memory.retired,
            )
        case _S.BACKING_OFF:
            return c.Backoff(num_failures=memory.num_failures)
        case _S.ABORTING:
            return c.RecordAbort(repair=_repair(memory))
        case _S.ASKING:
            return c.AskOperator(reason=memory.stuck_because, causes=tuple(memory.causes), gate_closed=memory.gate_closed)
        case _S.ENDED:
            return c.Finish(
                outcome=memory.outcome,
                record=memory.record or memory.base,
                num_attempts=memory.num_attempts,
                causes=tuple(memory.causes),
            )
    return _command_on_attempt(state, memory)


def _command_on_attempt(state: TransitionState, memory: Memory) -> c.Command:
    attempt, record = memory.attempt, memory.record or memory.base
    if attempt is None:
        raise IllegalEventError(f"transition: state '{state.value}' without an attempt")
    return _ON_ATTEMPT[state](memory, attempt, record)


_ON_ATTEMPT: dict[TransitionState, Callable[[Memory, AttemptId, CommitRecord], c.Command]] = {
    _S.OLD_FENCING: lambda _, attempt, __: c.MarkObsolete(attempt=attempt),
    _S.OLD_STOPPING: lambda _, attempt, __: c.StopAndWait(attempt=attempt),
    _S.OLD_READING: lambda _, attempt, __: c.ReadCommit(attempt=attempt),
    _S.OLD_DISCARDING: lambda _, attempt, __: c.Cleanup(attempt=attempt, is_committed=False),
    _S.RUNNING: lambda _, attempt, __: c.RunSchedule(attempt=attempt),
    _S.COMMITTING: lambda memory, attempt, record: c.Commit(
        attempt=attempt, target=memory.target or record, acknowledged=memory.acknowledged
    ),
    _S.READING: lambda _, attempt, __: c.ReadCommit(attempt=attempt),
    _S.UPDATING: lambda _, __, record: c.UpdateBaselines(record=record),
    _S.CLEANING: lambda _, attempt, __: c.Cleanup(attempt=attempt, is_committed=True),
    _S.DROPPING: lambda _, attempt, record: c.DropCaches(attempt=attempt, record=record),
    _S.REOPENING: lambda _, attempt, record: c.ReopenGate(attempt=attempt, record=record),
    _S.CLOSING: lambda _, attempt, __: c.CloseAttempt(attempt=attempt, was_admitted=True),
    _S.FENCING: lambda _, attempt, __: c.MarkObsolete(attempt=attempt),
    _S.STOPPING: lambda _, attempt, __: c.StopAndWait(attempt=attempt),
    _S.DISCARDING: lambda _, attempt, __: c.Cleanup(attempt=attempt, is_committed=False),
    _S.FORGETTING: lambda memory, attempt, _: c.CloseAttempt(attempt=attempt, was_admitted=memory.is_admitted),
}


def _repair(memory: Memory) -> str:
    """Why the next attempt must send every element; empty if nothing can have been written."""
    if memory.is_committed:
        return f"a refit was aborted before every owner took over the baseline of {memory.record}"
    if memory.gate_closed:
        return f"a refit was aborted after receivers may have been written: {memory.abort}"
    return ""
