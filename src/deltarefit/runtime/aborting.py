"""An operator gives up the refit that is under way (paper B.2, operator intervention)."""

from __future__ import annotations

import msgspec

from deltarefit.runtime.clock import Clock, Deadline, IdSource
from deltarefit.runtime.session import control_plane
from deltarefit.transport import open_run

__all__ = ["Aborted", "abort_refit"]

_LOOK_S = 0.2


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    """What an abort came to."""

    run: str
    policy_version: int
    """The version that is committed and stays so."""
    attempt: str
    """The attempt that was fenced; empty if the abort came between two."""
    is_ended: bool
    """The coordinator has stopped everything and noted it."""
    repair: str
    """Why the next refit sends every element; empty if it need not, or if the refit has not ended yet."""


def abort_refit(run: str, reason: str, *, clock: Clock, ids: IdSource, wait_s: float) -> Aborted:
    """Fence the refit that is under way, and wait up to ``wait_s`` until its coordinator has ended it.

    Raises:
        RejectedError: no refit is under way, or there is no such run.
    """
    control = control_plane(open_run(run, clock=clock, may_be_new=False), clock, ids)
    state = control.request_abort(reason)
    fenced = state.attempt.attempt if state.attempt is not None else ""
    deadline = Deadline(clock, wait_s)
    while state.abort and not deadline.expired:
        clock.sleep(min(_LOOK_S, deadline.remaining_s()))
        state = control.read() or state
    return Aborted(
        run=run,
        policy_version=state.record.policy_version,
        attempt=fenced,
        is_ended=not state.abort,
        repair=state.repair,
    )
