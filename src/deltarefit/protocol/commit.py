"""The rules of the control record, each a pure function ``(state, request) -> new state`` (paper B.2; design note 0001).

Theory. The record is one small blob that changes only by compare-and-set. ``control.ControlPlane`` reads it, asks a rule what
the next record is, and swaps; if the swap loses, it reads again and asks again. So a rule sees a record that was current, and
what it returns counts only if the record is still that one. From this alone follows:

* **At most one commit per version.** ``commit`` demands that the record still is the attempt's base.
* **A fence needs no clock.** ``mark_obsolete`` and ``acquire`` change the record. A commit that read the record before loses
  its swap, however late it arrives; one that reads it after is refused by the rule. The paper bounds this wait by a deadline
  on synchronised clocks; here nothing waits.
* **Repeating is harmless.** A request that is already fulfilled returns the very same state object, and nothing is written.
  So a writer that lost the reply may simply ask again.

A rule that says no raises. ``RejectedError``: the request cannot be right. ``CommitConflictError``: another coordinator owns
the run. ``OperatorRequiredError``: a person asked to stop, or must help. ``AttemptFailedError``: this attempt is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from deltarefit.errors import AttemptFailedError, CommitConflictError, OperatorRequiredError, RejectedError
from deltarefit.ids import AttemptId, BaselineId, EncodingMode, PolicyVersion, ReceiverId
from deltarefit.protocol.chain import Retention, extended
from deltarefit.protocol.record import (
    RECENT_NONCES,
    AdmittedTransition,
    AttemptState,
    CommitOutcome,
    CommitRecord,
    ControlState,
)

__all__ = [
    "CommitRequest",
    "PrepareRequest",
    "acquire",
    "close_attempt",
    "commit",
    "create_run",
    "mark_obsolete",
    "note_repair",
    "prepare",
    "record_abort",
    "reinitialise",
    "release",
    "repaired",
    "request_abort",
    "settled",
    "stamp",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRequest:
    """Bind a fresh attempt (paper Table B.1, prepare)."""

    epoch: int
    attempt: AttemptId
    baseline: BaselineId
    """The candidate baseline g; fresh for each attempt."""
    base: CommitRecord
    """The record that the source's baseline belongs to."""
    mode: EncodingMode
    is_dense: bool
    candidate: str
    """Names the candidate weights, fixed over the retries of a transition."""
    plan_digest: str
    required: frozenset[ReceiverId]
    min_receivers: int = 1
    """Fewer required receivers than this are refused; 0 lets a run start without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """Publish an attempt (paper Table B.1, commit)."""

    epoch: int
    attempt: AttemptId
    baseline: BaselineId
    acknowledged: frozenset[ReceiverId]
    """Receivers whose completion acknowledgement the flush collected."""
    policy_digest: str = ""
    retention: Retention | None = None
    """None: the attempt's payloads will not stay in the store."""


def stamp(state: ControlState, nonce: str) -> ControlState:
    """Give a new record its revision and its writer's nonce; done once for each write."""
    return replace(state, revision=state.revision + 1, nonces=(nonce, *state.nonces[: RECENT_NONCES - 1]))


def create_run(run: str, setup_digest: str, record: CommitRecord) -> ControlState:
    """The first record of a run; written with create-if-absent."""
    if not run or not setup_digest:
        raise RejectedError("control record: a run needs a name and a set-up digest")
    return ControlState(run=run, setup_digest=setup_digest, record=record)


# ---------------------------------------------------------------------------------------------- who may act


def acquire(state: ControlState, *, holder: str, setup_digest: str, expired_epoch: int | None = None) -> ControlState:
    """Make ``holder`` the coordinator, in a new epoch.

    Args:
        holder: unique per process and start.
        setup_digest: must be the run's.
        expired_epoch: the epoch whose lease the caller has watched run out (``LeaseWatch``). Without it only a released run
            can be had. If the epoch has moved on since, somebody else took over and the proof is void.

    Raises:
        RejectedError: the run is held by another coordinator, or belongs to another set-up.
    """
    if state.setup_digest != setup_digest:
        raise RejectedError(
            f"run {state.run}: set-up digest {setup_digest}, expected {state.setup_digest}: the run was started for another "
            "model. Use the same model, or name a new run"
        )
    if state.coordinator == holder:
        return state
    if state.coordinator and expired_epoch != state.epoch:
        raise RejectedError(
            f"run {state.run}: in use by live coordinator {state.coordinator} (epoch {state.epoch}); "
            "stop that one first, or name another run"
        )
    return replace(state, epoch=state.epoch + 1, coordinator=holder)


def release(state: ControlState, *, epoch: int, holder: str) -> ControlState:
    """Give the run up cleanly. A coordinator that was replaced has nothing to give up, and nothing happens."""
    if state.epoch != epoch or state.coordinator != holder:
        return state
    return replace(state, coordinator="")


def _require_active(state: ControlState, epoch: int, what: str) -> None:
    if state.epoch != epoch:
        raise CommitConflictError(
            f"run {state.run}: {what} by the coordinator of epoch {epoch}, but the run is in epoch {state.epoch}, held by "
            f"{state.coordinator or 'nobody'}: another coordinator took over; stop"
        )
    if not state.coordinator:
        raise CommitConflictError(f"run {state.run}: {what} in epoch {epoch}, which was released; acquire the run again")


# ---------------------------------------------------------------------------------------------- attempts


def prepare(state: ControlState, request: PrepareRequest) -> ControlState:
    """Bind an attempt to the record; whatever was bound before is fenced off by it.

    The transition counts as admitted in the record from here on, because from here on receivers may write. A coordinator that
    knows better (no receiver accepted) says so in ``close_attempt``.

    Raises:
        CommitConflictError: another coordinator owns the run, or the record is not ``request.base`` any more.
        OperatorRequiredError: an abort was asked for.
        RejectedError: mode, candidate, receivers or ids break a rule.
        AttemptFailedError: this very attempt was already marked obsolete.
    """
    _require_active(state, request.epoch, f"prepare of {request.attempt}")
    bound = state.attempt
    if bound is not None and bound.attempt == request.attempt:
        if bound.is_obsolete or not state.record.names_same(bound.base):
            raise AttemptFailedError(f"{request.attempt}: already over; prepare a fresh attempt")
        return state
    if state.abort:
        raise OperatorRequiredError(f"run {state.run}: an operator asked to abort the refit: {state.abort}")
    if not state.record.names_same(request.base):
        raise CommitConflictError(
            f"{request.attempt}: the source baseline belongs to {request.base}, but {state.record} is committed"
        )
    if state.committed_attempt is not None:
        raise RejectedError(
            f"{request.attempt}: the commit of {state.committed_attempt.attempt} is not closed yet; "
            "update the baselines, clean up and close it first"
        )
    _check_required(request)
    _check_ids(state, request)
    transition = _admit(state, request)
    attempt = AttemptState(
        attempt=request.attempt,
        epoch=request.epoch,
        ordinal=transition.num_attempts,
        mode=request.mode,
        is_dense=request.is_dense,
        base=state.record,
        baseline=request.baseline,
        plan_digest=request.plan_digest,
        required=tuple(sorted(request.required)),
    )
    return replace(state, transition=transition, attempt=attempt)


def _check_required(request: PrepareRequest) -> None:
    if len(request.required) < request.min_receivers:
        named = ", ".join(sorted(request.required)) or "none"
        raise RejectedError(
            f"{request.attempt}: {len(request.required)} required receivers ({named}), expected at least "
            f"{request.min_receivers}; start receivers for this run, or set min_receivers"
        )


def _check_ids(state: ControlState, request: PrepareRequest) -> None:
    used = {state.record.baseline} | ({state.attempt.baseline} if state.attempt else set())
    if request.baseline in used:
        raise RejectedError(
            f"{request.attempt}: baseline id {request.baseline} was used before; each attempt needs a fresh one"
        )


def _admit(state: ControlState, request: PrepareRequest) -> AdmittedTransition:
    """Check what an attempt may be, given what earlier attempts may have left on receivers (paper 6.3)."""
    if request.is_dense and request.mode is not EncodingMode.OVERWRITE:
        raise RejectedError(f"{request.attempt}: a dense attempt sends overwrites; mode {request.mode.value} is not possible")
    if state.repair and not request.is_dense:
        raise RejectedError(f"{request.attempt}: every element must be sent (dense attempt), because {state.repair}")
    before = state.transition
    if before is None:
        target = PolicyVersion(state.record.policy_version + 1)
        return AdmittedTransition(target, request.candidate, request.is_dense, 1)
    if request.mode is not EncodingMode.OVERWRITE:
        raise RejectedError(
            f"{request.attempt}: mode {request.mode.value}, expected overwrite: an earlier attempt of this transition may have "
            "written to receivers"
        )
    if not request.is_dense and (before.is_dense or before.candidate != request.candidate):
        raise RejectedError(
            f"{request.attempt}: candidate {request.candidate}, expected {before.candidate} as in the earlier attempts, or a "
            "dense attempt: receivers may hold bits of the earlier candidate where this one changes nothing"
        )
    return AdmittedTransition(before.target_version, request.candidate, request.is_dense, before.num_attempts + 1)


def commit(state: ControlState, request: CommitRequest) -> tuple[CommitOutcome, ControlState]:
    """Publish the attempt: (v, g_v) becomes (v+1, g), if nothing changed in between.

    Returns:
        SUCCESS with the new record (or the same one, if this attempt is already committed), FAILED if the attempt was fenced,
        CONFLICT if another coordinator owns the run or another baseline was committed.

    Raises:
        RejectedError: a required receiver has not acknowledged completion, or the baseline is not the attempt's.
    """
    if state.record.baseline == request.baseline:
        return CommitOutcome.SUCCESS, state
    if state.epoch != request.epoch or not state.coordinator:
        return CommitOutcome.CONFLICT, state
    attempt = state.attempt
    if attempt is None or attempt.attempt != request.attempt or attempt.is_obsolete:
        return CommitOutcome.FAILED, state
    if not state.record.names_same(attempt.base):
        return CommitOutcome.CONFLICT, state
    if attempt.baseline != request.baseline:
        raise RejectedError(f"{request.attempt}: commit of baseline {request.baseline}, but {attempt.baseline} was prepared")
    if missing := sorted(set(attempt.required) - request.acknowledged):
        raise RejectedError(
            f"{request.attempt}: commit without completion of {', '.join(missing[:5])} ({len(missing)} of "
            f"{len(attempt.required)} required receivers)"
        )
    record = CommitRecord(attempt.target_version, attempt.baseline, request.policy_digest)
    repair = "" if attempt.is_dense else state.repair
    # A dense attempt sends as much as a later one from the owners would, so nobody needs it as a link.
    links = extended(
        state.links,
        None if attempt.is_dense else request.retention,
        attempt=attempt.attempt,
        plan_digest=attempt.plan_digest,
        target_version=record.policy_version,
        digests=(state.record.policy_digest, record.policy_digest),
    )
    return CommitOutcome.SUCCESS, replace(state, record=record, transition=None, repair=repair, abort="", links=links)


def mark_obsolete(state: ControlState, *, attempt: AttemptId) -> ControlState:
    """Fence an attempt: after this record is in place no commit of it can succeed, not even one already under way.

    Needs no epoch: it can only forbid. An attempt that is not bound any more cannot be committed either, so nothing is written;
    nor is it if the attempt is already committed, which the caller sees from the record.
    """
    bound = state.attempt
    if bound is None or bound.attempt != attempt or bound.is_obsolete or state.committed_attempt is not None:
        return state
    return replace(state, attempt=replace(bound, is_obsolete=True))


def settled(state: ControlState, *, attempt: AttemptId) -> bool:
    """Whether no commit of ``attempt`` can change the record any more, which is when ``read_commit`` may answer."""
    return state.open_attempt is None or state.open_attempt.attempt != attempt


def close_attempt(state: ControlState, *, epoch: int, attempt: AttemptId, was_admitted: bool = True) -> ControlState:
    """Take an attempt out of the record, as the last step of it.

    After a commit: owners have updated their baselines and the request gates are open. After a failure: the attempt is fenced,
    stopped and cleaned up. ``was_admitted=False`` says that no attempt of the transition was ever accepted by all receivers,
    so that none can have written: the transition is forgotten and the next one starts afresh.

    Raises:
        CommitConflictError: another coordinator owns the run.
        RejectedError: the attempt could still be committed; mark it obsolete first.
    """
    _require_active(state, epoch, f"close of {attempt}")
    bound = state.attempt
    if bound is None or bound.attempt != attempt:
        return state
    if not settled(state, attempt=attempt):
        raise RejectedError(f"{attempt}: still open; mark it obsolete, stop and clean up before it is closed")
    transition = state.transition
    if transition is not None and not was_admitted:
        transition = None
    # With the transition goes a request to abort it: nothing is left to be aborted.
    return replace(state, attempt=None, transition=transition, abort=state.abort if transition else "")


# ---------------------------------------------------------------------------------------------- operators and repairs


def request_abort(state: ControlState, *, reason: str) -> ControlState:
    """An operator asks to end the current transition. Fences its attempt at once; the coordinator does the rest.

    Needs no epoch. Without a transition, or after its commit, there is nothing to abort.

    Raises:
        RejectedError: no reason, or nothing to abort.
    """
    if not reason:
        raise RejectedError("abort: a reason is needed; it is shown to whoever finds the run stopped")
    if state.abort:
        return state
    if state.transition is None:
        raise RejectedError(f"run {state.run}: no refit is under way; {state.record} is committed and nothing is to be aborted")
    attempt = state.attempt
    fenced = replace(attempt, is_obsolete=True) if attempt is not None and state.committed_attempt is None else attempt
    return replace(state, abort=reason, attempt=fenced)


def record_abort(state: ControlState, *, epoch: int, repair: str) -> ControlState:
    """The coordinator ends an aborted transition. ``repair`` is empty only if no receiver can have written anything.

    Raises:
        CommitConflictError: another coordinator owns the run.
    """
    _require_active(state, epoch, "abort")
    return replace(state, transition=None, attempt=None, abort="", repair=repair or state.repair)


def note_repair(state: ControlState, *, epoch: int, reason: str) -> ControlState:
    """Note that the next attempt must send every element, for example because the trainer came back with other weights."""
    _require_active(state, epoch, "repair note")
    return state if state.repair else replace(state, repair=reason)


def repaired(state: ControlState, *, restored: Iterable[ReceiverId], required: Iterable[ReceiverId]) -> ControlState:
    """Clear the repair note once every required receiver was brought back to the committed version densely (paper B.2).

    Raises:
        RejectedError: a required receiver was not restored; its name is in the text.
    """
    if not state.repair:
        return state
    if missing := sorted(set(required) - set(restored)):
        raise RejectedError(
            f"run {state.run}: still to restore to {state.record}: {', '.join(missing)}; call "
            "refit(), which sends them every element, or stop these receivers"
        )
    if state.transition is not None:
        raise RejectedError(f"run {state.run}: a refit is under way; its dense attempt repairs the receivers")
    return replace(state, repair="")


def reinitialise(state: ControlState, *, epoch: int, baseline: BaselineId, policy_digest: str) -> ControlState:
    """Bind the committed version to a new baseline, after owners lost theirs or their number changed (paper B.2).

    If the digest equals that of the committed policy, the new baseline reconstructs it and deltas may go on. Otherwise the
    owners hold other weights than the receivers, and the next attempt must send every element.

    Raises:
        CommitConflictError: another coordinator owns the run.
        RejectedError: an attempt is bound; close it first.
    """
    _require_active(state, epoch, "reinitialisation of the baseline")
    if state.record.baseline == baseline:
        return state
    if state.attempt is not None:
        raise RejectedError(
            f"run {state.run}: attempt {state.attempt.attempt} is still bound; stop it, clean it up and close it before the "
            "baseline is reinitialised"
        )
    is_same = policy_digest != "" and policy_digest == state.record.policy_digest
    repair = state.repair
    if not is_same and not repair:
        repair = f"the owners' new baseline {baseline} is not that of the committed policy version"
    record = CommitRecord(state.record.policy_version, baseline, state.record.policy_digest)
    return replace(state, record=record, repair=repair)
