"""The guards of the transition table: what an event means, and what is remembered of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from deltarefit.ids import EncodingMode
from deltarefit.protocol import commands as c
from deltarefit.protocol import events as e
from deltarefit.protocol.record import CommitOutcome
from deltarefit.protocol.transition_memory import Memory, TransitionSettings
from deltarefit.protocol.transition_table import ABORTS_AT_ONCE, Signal, TransitionState

__all__ = ["remember", "signal_of"]

_S = TransitionState
_G = Signal

_MAX_CAUSES = 16
"""The first causes are kept, as they explain the later ones."""


# ---------------------------------------------------------------------------------------------- what an event means

_REPLIED = {
    CommitOutcome.SUCCESS: _G.COMMIT_SUCCESS,
    CommitOutcome.FAILED: _G.COMMIT_FAILED,
    CommitOutcome.UNKNOWN: _G.COMMIT_UNKNOWN,
    CommitOutcome.CONFLICT: _G.COMMIT_CONFLICT,
}


def signal_of(state: TransitionState, memory: Memory, event: e.Event, settings: TransitionSettings) -> Signal | None:
    """The signal that an event is; None if it means nothing in this state. Changes nothing."""
    meaning = _MEANING[type(event)]
    return meaning if isinstance(meaning, Signal) else meaning(_Situation(state, memory, settings), event)


@dataclass(frozen=True, slots=True)
class _Situation:
    state: TransitionState
    memory: Memory
    settings: TransitionSettings


def _started(_: _Situation, event: e.Started) -> Signal | None:
    if event.unfinished is not None:
        return _G.TAKE_OVER
    return None if event.recover_only else _G.START


def _prepared(at: _Situation, _: e.Prepared) -> Signal:
    return _G.PREPARED if at.memory.abort is None else _G.PREPARED_LATE


def _prepare_failed(at: _Situation, event: e.PrepareRejected | e.PrepareFailed) -> Signal:
    if event.attempt is not None:
        return _G.HALF_PREPARED
    if isinstance(event, e.PrepareRejected) and not at.memory.is_admitted:
        return _G.REJECT
    return _after_failure(at, at.memory.num_failures + 1)


def _command_failed(at: _Situation, _: e.CommandFailed) -> Signal:
    """Legal in every state that waits for an answer, so that a shell always has one to give."""
    if at.state is _S.PREPARING:
        return _after_failure(at, at.memory.num_failures + 1)
    if at.state in (_S.CLEANING, _S.DISCARDING, _S.OLD_DISCARDING):
        return _cleaned(at, e.CleanedUp())
    return _FAILED_IN.get(at.state, _G.STUCK)


_FAILED_IN = {
    _S.RUNNING: _G.FAILED,
    _S.COMMITTING: _G.COMMIT_UNKNOWN,
    _S.BACKING_OFF: _G.BACKED_OFF,
}
"""What a command that failed without saying more means in states from where the machine can go on by itself."""


def _after_failure(at: _Situation, num_failures: int) -> Signal:
    if at.memory.abort is not None:
        return _G.ABORT if at.memory.is_admitted else _G.ABORT_UNTOUCHED
    return _G.GIVE_UP if num_failures >= at.settings.max_failures else _G.RETRY


def _flushed(at: _Situation, event: e.Flushed) -> Signal:
    return _G.FAILED if _flush_fault(at.memory, event) else _G.FLUSHED


def _flush_fault(memory: Memory, event: e.Flushed) -> str:
    """Why a flush that reported success still is none; empty if it is one."""
    if memory.abort is not None:
        return "an operator asked to abort"
    if missing := sorted(memory.required - event.acknowledged):
        return f"no completion acknowledgement from {', '.join(missing[:5])} ({len(missing)} of {len(memory.required)})"
    return ""


def _replied(_: _Situation, event: e.CommitReplied) -> Signal:
    return _REPLIED[event.outcome]


def _read(at: _Situation, event: e.CommitRecordRead) -> Signal:
    if at.memory.target is not None and event.record.names_same(at.memory.target):
        return _G.READ_TARGET
    return _G.READ_BASE if event.record.names_same(at.memory.base) else _G.READ_OTHER


def _cleaned(at: _Situation, _: e.CleanedUp) -> Signal:
    return _G.LOST if at.memory.is_lost else _G.CLEANED


def _closed(at: _Situation, _: e.AttemptClosed) -> Signal:
    if at.state is not _S.FORGETTING:
        return _G.CLOSED
    if at.memory.is_rejected:
        return _G.REJECT
    if at.memory.is_takeover and at.memory.abort is None:
        return _G.RECOVERED if at.memory.recover_only else _G.PROCEED
    return _after_failure(at, at.memory.num_failures)


def _abort_asked(at: _Situation, _: e.OperatorAborted) -> Signal:
    if at.state not in ABORTS_AT_ONCE:
        return _G.ABORT_NOTED
    return _G.ABORT if at.memory.is_admitted or at.state is _S.ASKING else _G.ABORT_UNTOUCHED


def _retried(at: _Situation, _: e.OperatorRetried) -> Signal | None:
    return Signal[f"RESUME_{at.memory.stuck_in.name}"] if at.state is _S.ASKING else None


_MEANING: dict[type, Signal | Callable[[_Situation, Any], Signal | None]] = {
    e.Started: _started,
    e.Prepared: _prepared,
    e.PrepareRejected: _prepare_failed,
    e.PrepareFailed: _prepare_failed,
    e.Flushed: _flushed,
    e.AttemptFailed: _G.FAILED,
    e.CommitReplied: _replied,
    e.CommitRecordRead: _read,
    e.MarkedObsolete: _G.MARKED,
    e.Stopped: _G.STOPPED,
    e.CleanedUp: _cleaned,
    e.BaselinesUpdated: _G.UPDATED,
    e.CachesDropped: _G.DROPPED,
    e.GateReopened: _G.REOPENED,
    e.AttemptClosed: _closed,
    e.BackedOff: _G.BACKED_OFF,
    e.CommandFailed: _command_failed,
    e.Superseded: _G.SUPERSEDED,
    e.OperatorAborted: _abort_asked,
    e.OperatorRetried: _retried,
}
"""What each event means: always the same signal, or a guard that tells."""


# ---------------------------------------------------------------------------------------------- what is remembered


def remember(state: TransitionState, memory: Memory, event: e.Event, signal: Signal) -> None:
    """Note what later guards and commands need. ``signal`` is known to be legal in ``state``."""
    note = _NOTES.get(type(event))
    if note is not None:
        note(memory, event, signal)
    if isinstance(event, e.CommandFailed):
        _note_command_failed(state, memory, event, signal)
    if signal is _G.READ_BASE and state is _S.READING:
        _fail(memory, "the commit did not take effect")
    if signal is _G.GIVE_UP:
        memory.stuck_in = _S.PREPARING
        memory.stuck_because = f"{memory.num_failures} attempts failed, the first one because: {memory.causes[0]}"
    memory.outcome = _outcome(state, memory, signal)


def _note_command_failed(state: TransitionState, memory: Memory, event: e.CommandFailed, signal: Signal) -> None:
    if state is _S.PREPARING:
        _note_unprepared(memory, e.PrepareFailed(reason=event.reason), signal)
    elif state is _S.RUNNING:
        _note_failed(memory, e.AttemptFailed(reason=event.reason), signal)
    else:
        _note(memory, f"{state.value}: {event.reason}")
    if signal is _G.STUCK:
        memory.stuck_in, memory.stuck_because = state, event.reason


def _note_start(memory: Memory, event: e.Started, _: Signal) -> None:
    memory.base = event.base
    memory.record = event.base
    memory.recover_only = event.recover_only
    memory.is_dense = event.is_dense
    memory.is_admitted = event.is_admitted or event.unfinished is not None
    if memory.is_admitted or memory.is_dense:
        memory.mode = EncodingMode.OVERWRITE
    # Whether the former coordinator had closed a gate is not known, so it is taken to be closed.
    memory.gate_closed = memory.is_admitted
    if event.unfinished is not None:
        memory.is_takeover = True
        memory.attempt, memory.target = event.unfinished.attempt, event.unfinished.target


def _note_prepared(memory: Memory, event: e.Prepared, signal: Signal) -> None:
    memory.attempt, memory.target, memory.required = event.attempt, event.target, event.required
    memory.num_attempts += 1
    memory.is_admitted = True
    if signal is _G.PREPARED_LATE:
        _fail(memory, "an operator asked to abort")


def _note_unprepared(memory: Memory, event: e.PrepareRejected | e.PrepareFailed, _: Signal) -> None:
    memory.num_attempts += 1
    memory.attempt, memory.target, memory.required = event.attempt, None, frozenset()
    memory.is_rejected = isinstance(event, e.PrepareRejected) and not memory.is_admitted
    _fail(memory, event.reason)


def _note_flushed(memory: Memory, event: e.Flushed, signal: Signal) -> None:
    memory.gate_closed = memory.gate_closed or event.gate_closed
    memory.acknowledged = event.acknowledged
    if memory.target is not None:
        memory.target = replace(memory.target, policy_digest=event.policy_digest)
    if signal is _G.FAILED:
        _fail(memory, _flush_fault(memory, event))


def _note_failed(memory: Memory, event: e.AttemptFailed, _: Signal) -> None:
    memory.gate_closed = memory.gate_closed or event.gate_closed
    _fail(memory, event.reason)


def _note_replied(memory: Memory, event: e.CommitReplied, signal: Signal) -> None:
    if signal is _G.COMMIT_SUCCESS:
        memory.record, memory.is_committed = memory.target, True
    elif signal is _G.COMMIT_FAILED:
        _fail(memory, f"the commit was refused: {event.reason or 'the attempt was fenced'}")


def _note_read(memory: Memory, event: e.CommitRecordRead, signal: Signal) -> None:
    memory.record = event.record
    memory.is_committed = signal is _G.READ_TARGET
    if signal is _G.READ_OTHER:
        memory.is_lost = True
        _note(memory, f"another coordinator committed {event.record}")


def _note_stopped(memory: Memory, event: e.Stopped, _: Signal) -> None:
    memory.retired |= event.retired


def _note_dropped(memory: Memory, event: e.CachesDropped, _: Signal) -> None:
    memory.retired |= event.retired


def _note_reopened(memory: Memory, event: e.GateReopened, _: Signal) -> None:
    memory.retired |= event.retired
    memory.gate_closed = False


def _note_closed(memory: Memory, _: e.AttemptClosed, signal: Signal) -> None:
    memory.attempt = None
    if signal is _G.PROCEED:
        memory.is_takeover = False
    if memory.is_admitted:
        memory.mode = EncodingMode.OVERWRITE


def _note_superseded(memory: Memory, event: e.Superseded, _: Signal) -> None:
    _note(memory, f"superseded: {event.reason}")


def _note_abort(memory: Memory, event: e.OperatorAborted, _: Signal) -> None:
    memory.abort = event.reason
    _note(memory, f"aborted by an operator: {event.reason}")


def _note_retry(memory: Memory, _: e.OperatorRetried, __: Signal) -> None:
    memory.num_failures = 0


_NOTES: dict[type, Callable[[Memory, Any, Signal], None]] = {
    e.Started: _note_start,
    e.Prepared: _note_prepared,
    e.PrepareRejected: _note_unprepared,
    e.PrepareFailed: _note_unprepared,
    e.Flushed: _note_flushed,
    e.AttemptFailed: _note_failed,
    e.CommitReplied: _note_replied,
    e.CommitRecordRead: _note_read,
    e.Stopped: _note_stopped,
    e.CachesDropped: _note_dropped,
    e.GateReopened: _note_reopened,
    e.AttemptClosed: _note_closed,
    e.Superseded: _note_superseded,
    e.OperatorAborted: _note_abort,
    e.OperatorRetried: _note_retry,
}


def _fail(memory: Memory, reason: str) -> None:
    memory.num_failures += 1
    _note(memory, f"attempt {memory.num_attempts} ({memory.mode.value}): {reason}")


def _note(memory: Memory, text: str) -> None:
    if len(memory.causes) < _MAX_CAUSES:
        memory.causes.append(text)


def _outcome(state: TransitionState, memory: Memory, signal: Signal) -> c.TransitionOutcome:
    """How the transition ended, if it ended with this signal; only then is it looked at."""
    if signal is _G.REJECT:
        return c.TransitionOutcome.REJECTED
    if signal is _G.RECOVERED:
        return c.TransitionOutcome.RECOVERED
    if signal is _G.ABORT_UNTOUCHED or (signal is _G.CLOSED and state is _S.ABORTING):
        return c.TransitionOutcome.ABORTED
    if signal is _G.CLOSED and not memory.is_takeover:
        return c.TransitionOutcome.COMMITTED
    if signal is _G.CLOSED and memory.recover_only:
        return c.TransitionOutcome.RECOVERED
    return c.TransitionOutcome.CONFLICT
