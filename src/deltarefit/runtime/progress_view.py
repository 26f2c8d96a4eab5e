"""A refit under way as anyone with the run's store sees it: the record, the coordinator's notice, the progress board."""

from __future__ import annotations

import msgspec

from deltarefit.errors import RejectedError
from deltarefit.runtime.clock import Clock, IdSource
from deltarefit.runtime.looking import control_to_look, open_to_look
from deltarefit.runtime.messages import RunNotice, decode_message
from deltarefit.runtime.names import COORDINATOR
from deltarefit.runtime.progress import Progress, read_progress
from deltarefit.transport import RunStore, keys, read_beacon, read_manifest

__all__ = ["RefitView", "RunView"]


class RefitView(msgspec.Struct, frozen=True, kw_only=True):
    """One look."""

    policy_version: int
    """The committed one."""
    attempt: str
    """Empty between refits."""
    num_attempts: int
    """Of the refit under way, this one included; 0 between refits."""
    mode: str
    activity: str
    """What the coordinator is doing or waiting for, as it said at its last sign of life."""
    activity_s: float
    announced: int
    """Payloads that owners have sent so far, as the manifest lists them."""
    announced_nbytes: int
    ended_owners: int
    """Owners that have sent their last payload."""
    participants: tuple[Progress, ...]


class RunView:
    """Looks at a run again and again; changes nothing."""

    def __init__(self, run: str, *, clock: Clock, ids: IdSource) -> None:
        self._store: RunStore = open_to_look(run, clock=clock)
        if self._store.directory is not None and not (self._store.directory / "control" / "record.sqlite").exists():
            raise RejectedError(f"no run at {run}: expected a control record there; check the address")
        self._control = control_to_look(self._store, clock, ids)

    def look(self) -> RefitView:
        """What is going on now.

        Raises:
            RejectedError: there is no such run.
            TransportError: the store cannot be reached; try again.
        """
        state = self._control.read()
        if state is None:
            raise RejectedError(f"no run at {self._store.url}: the control record is empty; start the trainer first")
        attempt, transition = state.attempt, state.transition
        notice = self._notice()
        manifest = read_manifest(self._store, attempt.attempt) if attempt is not None else None
        return RefitView(
            policy_version=state.record.policy_version,
            attempt=attempt.attempt if attempt is not None else "",
            num_attempts=transition.num_attempts if transition is not None else 0,
            mode=attempt.mode.value if attempt is not None else "",
            activity=notice.activity if notice is not None else "",
            activity_s=notice.activity_s if notice is not None else 0.0,
            announced=len(manifest.entries) if manifest is not None else 0,
            announced_nbytes=sum(entry.nbytes for entry in manifest.entries) if manifest is not None else 0,
            ended_owners=len(manifest.ended) if manifest is not None else 0,
            participants=tuple(read_progress(self._store, attempt.attempt)) if attempt is not None else (),
        )

    def _notice(self) -> RunNotice | None:
        reading = read_beacon(self._store, keys.control(COORDINATOR))
        return None if reading is None else decode_message(reading.info, RunNotice, sender="beacon of the coordinator")
