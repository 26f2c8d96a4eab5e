"""Removes what dead processes left under a run: objects of ended attempts, mail that nobody will read, beacons of the dead.

Only the holder of the run calls this, and only while no attempt is bound. What the record retains stays.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from deltarefit.control import ControlPlane
from deltarefit.errors import CommitConflictError, RefitError
from deltarefit.ids import AttemptId
from deltarefit.runtime.names import COORDINATOR, coordinator_mailbox
from deltarefit.transport import RunStore, keys, sweep_attempts, sweep_staged

__all__ = ["sweep"]

_LOG = logging.getLogger(__name__)
_STAGED_S = 60.0  # nobody is still writing to a part of an object that has not grown for so long


def sweep(store: RunStore, control: ControlPlane, *, epoch: int, gone: Collection[str]) -> int:
    """Delete leftovers; returns how many attempts and objects were removed. A failure is logged: the next sweep goes on.

    Args:
        store: the run.
        control: its record.
        epoch: the holder's; mail to coordinators of other epochs is removed.
        gone: receivers that have shown no sign of life for long; one that only slept writes its beacon anew.
    """
    try:
        removed = sweep_attempts(store, keep=lambda: _linked(control, epoch))
        beacons = [keys.member(name) for name in gone]
        store.delete(beacons)
        mail = _orphaned_mail(store, epoch)
        store.delete(mail)
        removed += _sweep_staged(store)
    except RefitError as error:
        _LOG.warning("leftovers in %s stay for now: %s", store.url, error)
        return 0
    return removed + len(beacons) + len(mail)


def _linked(control: ControlPlane, epoch: int) -> list[AttemptId]:
    """The attempts to keep.

    Raises:
        CommitConflictError: somebody else holds the run, or an attempt is bound; then nothing may be removed.
    """
    state = control.read()
    if state is None or state.epoch != epoch or state.attempt is not None:
        raise CommitConflictError(f"the holder of epoch {epoch} has nothing to sweep: the record has moved on")
    return [link.attempt for link in state.links]


def _sweep_staged(store: RunStore) -> int:
    """The holder's own beacon, which it keeps rewriting, tells the directory's time: this machine's clock may be another."""
    beacon = store.head(keys.control(COORDINATOR)) if store.directory is not None else None
    return 0 if beacon is None else sweep_staged(store, before_s=beacon.modified_s - _STAGED_S)


def _orphaned_mail(store: RunStore, epoch: int) -> list[str]:
    """Keys of messages to coordinators that were replaced, and to receivers that show no beacon."""
    here = {keys.name_of_member(info.key) for info in store.listing(keys.MEMBERS)}
    orphaned = []
    for info in store.listing(keys.MAIL):
        recipient = info.key.split("/")[1]
        is_coordinator = recipient.startswith(f"{COORDINATOR}-")
        if (recipient != coordinator_mailbox(epoch)) if is_coordinator else (recipient not in here):
            orphaned.append(info.key)
    return orphaned
