"""Algorithm B.2 as a table: the order of commands on every path, and that nothing outside the table is accepted."""

from __future__ import annotations

import copy
import functools
from collections import deque

import pytest

from deltarefit.ids import AttemptId, BaselineId, EncodingMode, PolicyVersion, ReceiverId
from deltarefit.protocol import (
    NEXT_STATE,
    CommitOutcome,
    CommitRecord,
    IllegalEventError,
    Signal,
    TransitionMachine,
    TransitionOutcome,
    TransitionSettings,
    TransitionState,
    UnfinishedAttempt,
)
from deltarefit.protocol import commands as c
from deltarefit.protocol import events as e
from deltarefit.protocol.transition_memory import GIVES
from deltarefit.protocol.transition_rules import signal_of

BASE = CommitRecord(PolicyVersion(3), BaselineId("b3"))
OTHER = CommitRecord(PolicyVersion(4), BaselineId("somebody-else"))
OLD = UnfinishedAttempt(AttemptId("old"), CommitRecord(PolicyVersion(4), BaselineId("b4-old")))
R1, R2 = ReceiverId("r1"), ReceiverId("r2")
BOTH = frozenset({R1, R2})


def target(attempt: str) -> CommitRecord:
    return CommitRecord(PolicyVersion(4), BaselineId(f"b4-{attempt}"))


def prepared(attempt: str = "a1") -> e.Prepared:
    return e.Prepared(attempt=AttemptId(attempt), target=target(attempt), required=BOTH)


FLUSHED = e.Flushed(acknowledged=BOTH, policy_digest="d4")
SUCCESS = e.CommitReplied(outcome=CommitOutcome.SUCCESS)
UNKNOWN = e.CommitReplied(outcome=CommitOutcome.UNKNOWN)
STOPPED = e.Stopped(survivors=BOTH)
PUBLISH = (e.BaselinesUpdated(), e.CleanedUp(), e.CachesDropped(), e.GateReopened(), e.AttemptClosed())
RECOVER = (e.MarkedObsolete(), STOPPED, e.CleanedUp(), e.AttemptClosed(), e.BackedOff())


def play(*events: e.Event, max_failures: int = 5) -> tuple[TransitionMachine, list[c.Command]]:
    """A machine that was told all these, and the commands it gave."""
    machine = TransitionMachine(TransitionSettings(max_failures=max_failures))
    commands = [command for event in events for command in machine.receive(event)]
    return machine, commands


def names(commands: list[c.Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


def finish(commands: list[c.Command]) -> c.Finish:
    (last,) = commands[-1:]
    assert isinstance(last, c.Finish)
    return last


# ---------------------------------------------------------------------------------------------- lines of Algorithm B.2


def test_a_refit_that_goes_well_takes_these_steps_in_this_order() -> None:
    machine, commands = play(e.Started(base=BASE), prepared(), FLUSHED, SUCCESS, *PUBLISH)
    assert names(commands) == [
        "Prepare", "RunSchedule", "Commit", "UpdateBaselines", "Cleanup", "DropCaches", "ReopenGate", "CloseAttempt", "Finish",
    ]  # fmt: skip
    assert commands[0] == c.Prepare(base=BASE, mode=EncodingMode.MIXED, is_dense=False, ordinal=1, excluded=frozenset())
    committed = CommitRecord(PolicyVersion(4), BaselineId("b4-a1"), "d4")
    assert commands[2] == c.Commit(attempt=AttemptId("a1"), target=committed, acknowledged=BOTH)
    assert commands[3] == c.UpdateBaselines(record=committed)
    assert commands[4] == c.Cleanup(attempt=AttemptId("a1"), is_committed=True)
    assert commands[6] == c.ReopenGate(attempt=AttemptId("a1"), record=committed)
    assert finish(commands) == c.Finish(outcome=TransitionOutcome.COMMITTED, record=committed, num_attempts=1, causes=())
    assert machine.is_ended


def test_a_failed_attempt_is_fenced_stopped_cleaned_and_retried_with_overwrites() -> None:
    _, commands = play(
        e.Started(base=BASE), prepared(), e.AttemptFailed(reason="payload 3 is torn"), *RECOVER, prepared("a2"), FLUSHED,
        SUCCESS, *PUBLISH,
    )  # fmt: skip
    assert names(commands)[:8] == [
        "Prepare", "RunSchedule", "MarkObsolete", "StopAndWait", "Cleanup", "CloseAttempt", "Backoff", "Prepare",
    ]  # fmt: skip
    assert commands[4] == c.Cleanup(attempt=AttemptId("a1"), is_committed=False)
    retry = commands[7]
    assert isinstance(retry, c.Prepare)
    assert (retry.mode, retry.ordinal) == (EncodingMode.OVERWRITE, 2)
    assert finish(commands).causes == ("attempt 1 (mixed): payload 3 is torn",)


def test_a_rejection_before_admission_ends_without_another_command() -> None:
    _, commands = play(e.Started(base=BASE), e.PrepareRejected(reason="other model"))
    assert names(commands) == ["Prepare", "Finish"]
    assert finish(commands).outcome is TransitionOutcome.REJECTED


def test_a_rejection_after_admission_is_retried() -> None:
    machine, commands = play(
        e.Started(base=BASE), prepared(), e.AttemptFailed(reason="x"), *RECOVER, e.PrepareRejected(reason="r2 restarted")
    )
    assert isinstance(commands[-1], c.Backoff)
    assert machine.is_admitted


def test_a_failed_prepare_is_retried_in_mixed_mode_and_does_not_admit() -> None:
    _, commands = play(e.Started(base=BASE), e.PrepareFailed(reason="r2 did not answer"), e.BackedOff(), prepared("a2"))
    assert names(commands) == ["Prepare", "Backoff", "Prepare", "RunSchedule"]
    second = commands[2]
    assert isinstance(second, c.Prepare)
    assert (second.mode, second.ordinal) == (EncodingMode.MIXED, 2)


def test_a_prepare_that_bound_only_the_record_is_undone_and_does_not_admit() -> None:
    _, commands = play(
        e.Started(base=BASE), e.PrepareFailed(reason="r2 did not answer", attempt=AttemptId("a1")), *RECOVER, prepared("a2")
    )
    assert names(commands) == [
        "Prepare", "MarkObsolete", "StopAndWait", "Cleanup", "CloseAttempt", "Backoff", "Prepare", "RunSchedule",
    ]  # fmt: skip
    assert commands[4] == c.CloseAttempt(attempt=AttemptId("a1"), was_admitted=False)
    assert isinstance(commands[6], c.Prepare)
    assert commands[6].mode is EncodingMode.MIXED


def test_a_rejection_with_the_record_bound_is_undone_and_then_ends() -> None:
    _, commands = play(e.Started(base=BASE), e.PrepareRejected(reason="no", attempt=AttemptId("a1")), *RECOVER[:-1])
    assert names(commands) == ["Prepare", "MarkObsolete", "StopAndWait", "Cleanup", "CloseAttempt", "Finish"]
    assert finish(commands).outcome is TransitionOutcome.REJECTED


def test_a_flush_without_every_acknowledgement_is_a_failure_that_names_who_is_missing() -> None:
    machine, commands = play(e.Started(base=BASE), prepared(), e.Flushed(acknowledged=frozenset({R1, ReceiverId("stranger")})))
    assert isinstance(commands[-1], c.MarkObsolete)
    assert machine.causes == ("attempt 1 (mixed): no completion acknowledgement from r2 (1 of 2)",)


@pytest.mark.parametrize(
    ("record", "following"),
    [(target("a1"), "UpdateBaselines"), (BASE, "MarkObsolete"), (OTHER, "MarkObsolete")],
)
def test_an_unknown_commit_is_decided_by_reading_before_anything_else(record: CommitRecord, following: str) -> None:
    _, commands = play(e.Started(base=BASE), prepared(), FLUSHED, UNKNOWN, e.CommitRecordRead(record=record))
    assert names(commands)[-2:] == ["ReadCommit", following]


def test_a_race_lost_after_an_unknown_commit_is_cleaned_up_and_leaves_the_gate_alone() -> None:
    _, commands = play(e.Started(base=BASE), prepared(), FLUSHED, UNKNOWN, e.CommitRecordRead(record=OTHER), *RECOVER[:3])
    assert names(commands)[-4:] == ["MarkObsolete", "StopAndWait", "Cleanup", "Finish"]
    assert "ReopenGate" not in names(commands)
    assert finish(commands).outcome is TransitionOutcome.CONFLICT
    assert finish(commands).record == OTHER


@pytest.mark.parametrize(
    "events",
    [
        (),
        (prepared(),),
        (prepared(), FLUSHED),
        (prepared(), e.AttemptFailed(reason="x")),
        (prepared(), e.AttemptFailed(reason="x"), e.MarkedObsolete()),
    ],
)
def test_a_replaced_coordinator_gives_no_further_command(events: tuple[e.Event, ...]) -> None:
    machine, commands = play(e.Started(base=BASE), *events, e.Superseded(reason="epoch 8"))
    assert finish(commands).outcome is TransitionOutcome.CONFLICT
    assert machine.is_ended


def test_a_commit_that_replies_conflict_ends_at_once() -> None:
    _, commands = play(e.Started(base=BASE), prepared(), FLUSHED, e.CommitReplied(outcome=CommitOutcome.CONFLICT))
    assert names(commands)[-2:] == ["Commit", "Finish"]


def test_takeover_marks_stops_and_reads_in_this_order_then_repairs_with_overwrites() -> None:
    machine, commands = play(
        e.Started(base=BASE, unfinished=OLD),
        e.MarkedObsolete(),
        STOPPED,
        e.CommitRecordRead(record=BASE),
        e.CleanedUp(),
        e.AttemptClosed(),
    )
    assert names(commands) == ["MarkObsolete", "StopAndWait", "ReadCommit", "Cleanup", "CloseAttempt", "Prepare"]
    assert {command.attempt for command in commands[:5] if not isinstance(command, c.Prepare)} == {OLD.attempt}
    assert commands[5] == c.Prepare(base=BASE, mode=EncodingMode.OVERWRITE, is_dense=False, ordinal=1, excluded=frozenset())
    assert machine.is_admitted


def test_takeover_after_the_old_commit_took_effect_publishes_it_and_reports_a_conflict() -> None:
    _, commands = play(
        e.Started(base=BASE, unfinished=OLD), e.MarkedObsolete(), STOPPED, e.CommitRecordRead(record=OLD.target), *PUBLISH
    )
    assert names(commands)[3:] == ["UpdateBaselines", "Cleanup", "DropCaches", "ReopenGate", "CloseAttempt", "Finish"]
    reopen = commands[6]
    assert isinstance(reopen, c.ReopenGate)
    assert reopen.attempt == OLD.attempt
    assert finish(commands) == c.Finish(outcome=TransitionOutcome.CONFLICT, record=OLD.target, num_attempts=0, causes=())
    assert "Prepare" not in names(commands)


@pytest.mark.parametrize("record", [BASE, OLD.target])
def test_a_takeover_that_only_recovers_makes_no_attempt_of_its_own(record: CommitRecord) -> None:
    rest = PUBLISH if record == OLD.target else (e.CleanedUp(), e.AttemptClosed())
    _, commands = play(
        e.Started(base=BASE, unfinished=OLD, recover_only=True),
        e.MarkedObsolete(),
        STOPPED,
        e.CommitRecordRead(record=record),
        *rest,
    )
    assert finish(commands).outcome is TransitionOutcome.RECOVERED
    assert finish(commands).record == record
    assert "Prepare" not in names(commands)


def test_after_too_many_failures_an_operator_is_asked_and_told_the_first_cause() -> None:
    fail = (prepared(), e.AttemptFailed(reason="loader bypasses the hook"), *RECOVER)
    _, commands = play(e.Started(base=BASE), *fail, *fail[:-1], max_failures=2)
    ask = commands[-1]
    assert isinstance(ask, c.AskOperator)
    assert "2 attempts failed, the first one because: attempt 1 (mixed): loader bypasses the hook" in ask.reason
    assert ask.gate_closed


def test_an_operator_can_let_it_go_on_where_it_stood() -> None:
    machine, commands = play(
        e.Started(base=BASE), prepared(), e.AttemptFailed(reason="x"), e.MarkedObsolete(),
        e.CommandFailed(reason="r2 is silent and not proven dead"), e.OperatorRetried(), STOPPED,
    )  # fmt: skip
    assert names(commands)[-4:] == ["StopAndWait", "AskOperator", "StopAndWait", "Cleanup"]
    assert machine.state is TransitionState.DISCARDING


@pytest.mark.parametrize(("gate_closed", "says"), [(True, "may have been written"), (False, "")])
def test_an_abort_asks_for_a_repair_only_if_receivers_may_have_been_written(gate_closed: bool, says: str) -> None:
    machine, commands = play(e.Started(base=BASE), prepared(), e.OperatorAborted(reason="wrong data"))
    assert machine.abort_reason == "wrong data"
    for event in (e.AttemptFailed(reason="aborted", gate_closed=gate_closed), *RECOVER[:-1]):
        commands += machine.receive(event)
    abort = commands[-1]
    assert isinstance(abort, c.RecordAbort)
    assert (says in abort.repair) if says else abort.repair == ""
    (ended,) = machine.receive(e.AttemptClosed())
    assert finish([ended]).outcome is TransitionOutcome.ABORTED
    assert "ReopenGate" not in names(commands)


def test_an_abort_that_comes_after_the_commit_was_sent_does_not_undo_it() -> None:
    _, commands = play(e.Started(base=BASE), prepared(), FLUSHED, e.OperatorAborted(reason="too late"), SUCCESS, *PUBLISH)
    assert finish(commands).outcome is TransitionOutcome.COMMITTED


def test_an_owner_that_lost_its_state_after_the_commit_needs_an_operator_and_then_a_dense_refit() -> None:
    _, commands = play(
        e.Started(base=BASE), prepared(), FLUSHED, SUCCESS, e.CommandFailed(reason="owner 1: no baseline"),
        e.OperatorAborted(reason="owner restarted"),
    )  # fmt: skip
    abort = commands[-1]
    assert isinstance(abort, c.RecordAbort)
    assert "before every owner took over the baseline" in abort.repair


def test_retired_receivers_are_left_out_of_the_retry() -> None:
    _, commands = play(
        e.Started(base=BASE), prepared(), e.AttemptFailed(reason="r2 died"), e.MarkedObsolete(),
        e.Stopped(survivors=frozenset({R1}), retired=frozenset({R2})), *RECOVER[2:],
    )  # fmt: skip
    retry = commands[-1]
    assert isinstance(retry, c.Prepare)
    assert retry.excluded == {R2}


def test_density_is_kept_over_retries() -> None:
    _, commands = play(e.Started(base=BASE, is_dense=True), prepared(), e.AttemptFailed(reason="x"), *RECOVER)
    prepares = [command for command in commands if isinstance(command, c.Prepare)]
    assert [(command.mode, command.is_dense) for command in prepares] == [(EncodingMode.OVERWRITE, True)] * 2


def test_causes_keep_the_first_ones_and_stay_bounded() -> None:
    machine, _ = play(e.Started(base=BASE), max_failures=100)
    for number in range(50):
        machine.receive(e.PrepareFailed(reason=f"reason {number}"))
        machine.receive(e.BackedOff())
    assert len(machine.causes) == 16
    assert "reason 0" in machine.causes[0]


def test_a_commit_that_failed_without_an_outcome_is_an_unknown_one() -> None:
    machine, commands = play(e.Started(base=BASE), prepared(), FLUSHED, e.CommandFailed(reason="permission denied"))
    assert isinstance(commands[-1], c.ReadCommit)
    assert machine.causes == ("committing: permission denied",)


def test_a_schedule_or_prepare_that_failed_without_saying_more_counts_as_a_failed_attempt() -> None:
    _, commands = play(
        e.Started(base=BASE), e.CommandFailed(reason="x"), e.BackedOff(), prepared(), e.CommandFailed(reason="y")
    )
    assert names(commands) == ["Prepare", "Backoff", "Prepare", "RunSchedule", "MarkObsolete"]


def test_what_could_not_be_cleaned_up_does_not_stop_a_transition() -> None:
    _, commands = play(
        e.Started(base=BASE), prepared(), FLUSHED, SUCCESS, e.BaselinesUpdated(), e.CommandFailed(reason="store is slow"),
        *PUBLISH[2:],
    )  # fmt: skip
    assert finish(commands).outcome is TransitionOutcome.COMMITTED
    assert finish(commands).causes == ("cleaning up after the commit: store is slow",)


# ---------------------------------------------------------------------------------------------- the whole table

SAMPLES: tuple[e.Event, ...] = (
    e.Started(base=BASE), e.Started(base=BASE, is_admitted=True), e.Started(base=BASE, unfinished=OLD),
    e.Started(base=BASE, unfinished=OLD, recover_only=True), e.Started(base=BASE, recover_only=True),
    prepared(), e.PrepareRejected(reason="no"), e.PrepareRejected(reason="no", attempt=AttemptId("a1")),
    e.PrepareFailed(reason="no"), e.PrepareFailed(reason="no", attempt=AttemptId("a1")),
    FLUSHED, e.Flushed(acknowledged=frozenset()), e.AttemptFailed(reason="x"), e.AttemptFailed(reason="x", gate_closed=False),
    *(e.CommitReplied(outcome=outcome) for outcome in CommitOutcome),
    *(e.CommitRecordRead(record=record) for record in (BASE, target("a1"), OLD.target, OTHER)),
    e.MarkedObsolete(), STOPPED, e.CleanedUp(), e.BaselinesUpdated(), e.CachesDropped(), e.GateReopened(), e.AttemptClosed(),
    e.BackedOff(), e.CommandFailed(reason="x"), e.Superseded(reason="x"), e.OperatorAborted(reason="x"), e.OperatorRetried(),
)  # fmt: skip


def _key(machine: TransitionMachine) -> tuple[object, ...]:
    """What the guards look at: two machines that agree in it behave alike."""
    memory = machine._memory
    stuck_in = memory.stuck_in if machine.state is TransitionState.ASKING else None
    return (
        machine.state, stuck_in, memory.attempt is None, memory.is_admitted, memory.is_takeover, memory.recover_only,
        memory.is_rejected, memory.is_lost, memory.abort is None, min(memory.num_failures, 2), memory.target, memory.required,
    )  # fmt: skip


def _clone(machine: TransitionMachine) -> TransitionMachine:
    following = copy.copy(machine)
    following._memory = copy.copy(machine._memory)
    following._memory.causes = machine._memory.causes[:1]
    return following


@functools.cache
def _explore() -> tuple[set[tuple[TransitionState, Signal]], dict[TransitionState, set[type]]]:
    """Every edge that can be taken and every event that is legal in a state, over all reachable states."""
    settings = TransitionSettings(max_failures=2)
    start = TransitionMachine(settings)
    seen, waiting = {_key(start)}, deque([start])
    edges: set[tuple[TransitionState, Signal]] = set()
    legal: dict[TransitionState, set[type]] = {state: set() for state in TransitionState}
    while waiting:
        machine = waiting.popleft()
        for event in SAMPLES:
            signal = signal_of(machine.state, machine._memory, event, settings)
            following = _clone(machine)
            if signal is None or signal not in NEXT_STATE[machine.state]:
                with pytest.raises(IllegalEventError):
                    following.receive(event)
                assert _key(following) == _key(machine), "a refused event changed the machine"
                continue
            commands = following.receive(event)
            assert following.state is NEXT_STATE[machine.state][signal]
            assert [type(command) for command in commands] == ([] if signal is Signal.ABORT_NOTED else [GIVES[following.state]])
            legal[machine.state].add(type(event))
            edges.add((machine.state, signal))
            if _key(following) not in seen:
                seen.add(_key(following))
                waiting.append(following)
    return edges, legal


def test_every_event_in_every_reachable_state_is_legal_or_refused_without_a_trace() -> None:
    edges, legal = _explore()
    assert {state for state, _ in edges} == set(TransitionState) - {TransitionState.ENDED}
    assert legal[TransitionState.ENDED] == set()
    assert legal[TransitionState.NEW] == {e.Started}
    for state in set(TransitionState) - {TransitionState.NEW, TransitionState.ENDED}:
        assert e.Superseded in legal[state], state
        assert e.OperatorAborted in legal[state], state
        assert (e.CommandFailed in legal[state]) is (state is not TransitionState.ASKING), state


def test_no_edge_of_the_table_is_dead() -> None:
    taken, _ = _explore()
    listed = {(state, signal) for state, edges in NEXT_STATE.items() for signal in edges}
    assert listed - taken == set()


def test_the_transition_ends_only_by_success_conflict_abort_rejection_or_recovery() -> None:
    ends = {signal for edges in NEXT_STATE.values() for signal, state in edges.items() if state is TransitionState.ENDED}
    assert ends == {
        Signal.CLOSED, Signal.RECOVERED, Signal.REJECT, Signal.ABORT_UNTOUCHED, Signal.SUPERSEDED, Signal.LOST,
        Signal.READ_OTHER, Signal.COMMIT_CONFLICT,
    }  # fmt: skip
    assert Signal.GIVE_UP not in ends


def test_an_event_of_another_state_is_refused_by_name() -> None:
    machine, _ = play(e.Started(base=BASE))
    with pytest.raises(IllegalEventError, match="Flushed in state 'preparing'; expected one of"):
        machine.receive(FLUSHED)
    assert machine.state is TransitionState.PREPARING
