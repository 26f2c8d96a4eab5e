"""One refit, from first prepare to the end: Algorithm B.2 as one table (paper B.2; PROTOCOL.md draws it).

Theory of operation
-------------------

The machine does nothing itself. It is told what happened (``events``), and answers what to do next (``commands``).

Three things make it up:

* ``NEXT_STATE``, below: state x signal -> state. The whole control flow. Whatever is not in it is an error.
* ``command_of`` (transition_memory.py): each state but NEW waits for one command to be answered, and gives that command when it
  is *entered*. So a transition that stopped is taken up again by entering the state once more.
* ``signal_of`` (transition_rules.py): turns an event into a signal, looking at a few facts that are remembered (``Memory``):
  was the transition admitted, how often did it fail, was an abort asked for. All guards are there.

States come in four groups. The *attempt*: PREPARING, RUNNING, COMMITTING, READING. *Publishing*, after the record
is known to name the attempt: UPDATING (owners), CLEANING, DROPPING (caches), REOPENING (gate), CLOSING. *Recovery*, after a
failure or a lost race: FENCING, STOPPING, DISCARDING, FORGETTING, then BACKING_OFF and PREPARING again. And on a takeover
the same three first steps for the former coordinator's attempt: OLD_FENCING, OLD_STOPPING, OLD_READING, OLD_DISCARDING.

Edges that are not in the paper, and why:

* ASKING (operator). The paper says that an operator aborts, not how a coordinator comes to ask. Here every wait that cannot
  end by itself and every run of failures past ``max_failures`` leads there; the request gate stays as it is.
* FORGETTING/CLOSING. The control record holds the attempt until it is closed, so that a crash in the last steps is found by
  the next coordinator, which repeats them.
* A *prepare* that bound the record but not all receivers is fenced and stopped like any attempt, yet does not admit.
* Superseded leads to ENDED from everywhere, without a further command: the new coordinator owns the cleanup (line 25).
* An abort is noted where a reply is awaited and takes effect at the next state that can end: a commit under way may still win.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

__all__ = ["ABORTS_AT_ONCE", "NEXT_STATE", "Signal", "TransitionState"]


class TransitionState(Enum):
    """What the transition is waiting for."""

    NEW = "new"
    OLD_FENCING = "old attempt: fencing"
    OLD_STOPPING = "old attempt: stopping"
    OLD_READING = "old attempt: reading the record"
    OLD_DISCARDING = "old attempt: cleaning up"
    PREPARING = "preparing"
    RUNNING = "running the schedule"
    COMMITTING = "committing"
    READING = "reading the record"
    UPDATING = "updating baselines"
    CLEANING = "cleaning up after the commit"
    DROPPING = "dropping caches"
    REOPENING = "reopening the request gate"
    CLOSING = "closing the committed attempt"
    FENCING = "fencing"
    STOPPING = "stopping"
    DISCARDING = "cleaning up"
    FORGETTING = "closing the failed attempt"
    BACKING_OFF = "backing off"
    ABORTING = "recording the abort"
    ASKING = "waiting for an operator"
    ENDED = "ended"


class Signal(Enum):
    """What an event means, given what is remembered. The labels of the edges."""

    START = "start"
    TAKE_OVER = "take over"
    MARKED = "marked obsolete"
    STOPPED = "stopped"
    READ_TARGET = "record names the attempt"
    READ_BASE = "record unchanged"
    READ_OTHER = "record names another baseline"
    CLEANED = "cleaned up"
    LOST = "cleaned up, race lost"
    PREPARED = "prepared"
    PREPARED_LATE = "prepared, abort asked for"
    HALF_PREPARED = "failed with the record bound"
    FLUSHED = "flushed"
    FAILED = "failed"
    COMMIT_SUCCESS = "success"
    COMMIT_FAILED = "refused"
    COMMIT_UNKNOWN = "unknown"
    COMMIT_CONFLICT = "conflict"
    UPDATED = "owners updated"
    DROPPED = "caches dropped"
    REOPENED = "reopened"
    CLOSED = "closed"
    PROCEED = "closed, go on"
    RECOVERED = "closed, recover only"
    RETRY = "retry"
    GIVE_UP = "too many failures"
    REJECT = "rejected before admission"
    BACKED_OFF = "backed off"
    STUCK = "stuck"
    ABORT = "abort"
    ABORT_UNTOUCHED = "abort before admission"
    ABORT_NOTED = "abort noted"
    SUPERSEDED = "superseded"
    RESUME_OLD_FENCING = "resume old fencing"
    RESUME_OLD_STOPPING = "resume old stopping"
    RESUME_OLD_READING = "resume old reading"
    RESUME_PREPARING = "resume preparing"
    RESUME_READING = "resume reading"
    RESUME_UPDATING = "resume updating"
    RESUME_DROPPING = "resume dropping"
    RESUME_REOPENING = "resume reopening"
    RESUME_CLOSING = "resume closing"
    RESUME_FENCING = "resume fencing"
    RESUME_STOPPING = "resume stopping"
    RESUME_FORGETTING = "resume forgetting"
    RESUME_ABORTING = "resume aborting"


_S = TransitionState
_G = Signal

_EDGES: Mapping[TransitionState, Mapping[Signal, TransitionState]] = {
    _S.NEW: {_G.START: _S.PREPARING, _G.TAKE_OVER: _S.OLD_FENCING},
    # lines 2 to 12
    _S.OLD_FENCING: {_G.MARKED: _S.OLD_STOPPING, _G.STUCK: _S.ASKING},
    _S.OLD_STOPPING: {_G.STOPPED: _S.OLD_READING, _G.STUCK: _S.ASKING},
    _S.OLD_READING: {
        _G.READ_TARGET: _S.UPDATING,
        _G.READ_BASE: _S.OLD_DISCARDING,
        _G.READ_OTHER: _S.ENDED,
        _G.STUCK: _S.ASKING,
    },
    _S.OLD_DISCARDING: {_G.CLEANED: _S.FORGETTING},
    # lines 13 to 27
    _S.PREPARING: {
        _G.PREPARED: _S.RUNNING,
        _G.PREPARED_LATE: _S.FENCING,
        _G.HALF_PREPARED: _S.FENCING,
        _G.REJECT: _S.ENDED,
        _G.RETRY: _S.BACKING_OFF,
        _G.GIVE_UP: _S.ASKING,
        _G.ABORT: _S.ABORTING,
        _G.ABORT_UNTOUCHED: _S.ENDED,
    },
    _S.RUNNING: {_G.FLUSHED: _S.COMMITTING, _G.FAILED: _S.FENCING},
    _S.COMMITTING: {
        _G.COMMIT_SUCCESS: _S.UPDATING,
        _G.COMMIT_FAILED: _S.FENCING,
        _G.COMMIT_UNKNOWN: _S.READING,
        _G.COMMIT_CONFLICT: _S.ENDED,
    },
    # lines 28 to 31
    _S.READING: {
        _G.READ_TARGET: _S.UPDATING,
        _G.READ_BASE: _S.FENCING,
        _G.READ_OTHER: _S.FENCING,
        _G.STUCK: _S.ASKING,
    },
    # lines 32 to 35, and 5 to 9
    _S.UPDATING: {_G.UPDATED: _S.CLEANING, _G.STUCK: _S.ASKING},
    _S.CLEANING: {_G.CLEANED: _S.DROPPING},
    _S.DROPPING: {_G.DROPPED: _S.REOPENING, _G.STUCK: _S.ASKING},
    _S.REOPENING: {_G.REOPENED: _S.CLOSING, _G.STUCK: _S.ASKING},
    _S.CLOSING: {_G.CLOSED: _S.ENDED, _G.STUCK: _S.ASKING},
    # lines 36 to 43
    _S.FENCING: {_G.MARKED: _S.STOPPING, _G.STUCK: _S.ASKING},
    _S.STOPPING: {_G.STOPPED: _S.DISCARDING, _G.STUCK: _S.ASKING},
    _S.DISCARDING: {_G.CLEANED: _S.FORGETTING, _G.LOST: _S.ENDED},
    _S.FORGETTING: {
        _G.PROCEED: _S.PREPARING,
        _G.RECOVERED: _S.ENDED,
        _G.RETRY: _S.BACKING_OFF,
        _G.GIVE_UP: _S.ASKING,
        _G.REJECT: _S.ENDED,
        _G.ABORT: _S.ABORTING,
        _G.ABORT_UNTOUCHED: _S.ENDED,
        _G.STUCK: _S.ASKING,
    },
    _S.BACKING_OFF: {_G.BACKED_OFF: _S.PREPARING, _G.ABORT: _S.ABORTING, _G.ABORT_UNTOUCHED: _S.ENDED},
    # operator intervention
    _S.ABORTING: {_G.CLOSED: _S.ENDED, _G.STUCK: _S.ASKING},
    _S.ASKING: {
        _G.ABORT: _S.ABORTING,
        _G.RESUME_OLD_FENCING: _S.OLD_FENCING,
        _G.RESUME_OLD_STOPPING: _S.OLD_STOPPING,
        _G.RESUME_OLD_READING: _S.OLD_READING,
        _G.RESUME_PREPARING: _S.PREPARING,
        _G.RESUME_READING: _S.READING,
        _G.RESUME_UPDATING: _S.UPDATING,
        _G.RESUME_DROPPING: _S.DROPPING,
        _G.RESUME_REOPENING: _S.REOPENING,
        _G.RESUME_CLOSING: _S.CLOSING,
        _G.RESUME_FENCING: _S.FENCING,
        _G.RESUME_STOPPING: _S.STOPPING,
        _G.RESUME_FORGETTING: _S.FORGETTING,
        _G.RESUME_ABORTING: _S.ABORTING,
    },
    _S.ENDED: {},
}

ABORTS_AT_ONCE = (_S.BACKING_OFF, _S.ASKING)
"""States in which nothing is under way, so that an abort takes effect without waiting for an answer."""


def _with_common_edges() -> dict[TransitionState, dict[Signal, TransitionState]]:
    """Add the two edges that every living state has: a conflict ends it, an abort is noted where it stands."""
    table = {state: dict(edges) for state, edges in _EDGES.items()}
    for state, edges in table.items():
        if state in (_S.NEW, _S.ENDED):
            continue
        edges[_G.SUPERSEDED] = _S.ENDED
        if state not in ABORTS_AT_ONCE:
            edges[_G.ABORT_NOTED] = state
    return table


NEXT_STATE: Mapping[TransitionState, Mapping[Signal, TransitionState]] = _with_common_edges()
"""Where each signal leads from each state. A pair that is not here cannot happen."""
