"""What a run looks like from outside: reads the record and the beacons, changes nothing."""

from __future__ import annotations

import msgspec

from deltarefit.errors import RejectedError
from deltarefit.protocol import ControlState
from deltarefit.runtime.clock import Clock, IdSource
from deltarefit.runtime.messages import Membership, decode_message
from deltarefit.runtime.session import COORDINATOR, control_plane
from deltarefit.transport import BeaconReading, RunStore, keys, open_run, read_beacon, read_beacons

__all__ = ["MemberStatus", "RunStatus", "read_status"]


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One receiver."""

    receiver: str
    engine: str
    is_alive: bool
    """Its beacon moved while it was watched."""
    is_ready: bool
    """It prewarmed for the run's model."""
    policy_version: int | None
    refusal: str


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    run: str
    policy_version: int
    policy_digest: str
    coordinator: str
    """Who holds the run; empty if it was given back."""
    coordinator_is_alive: bool
    epoch: int
    attempt: str
    """The attempt that is bound to the record; empty between refits."""
    attempt_mode: str
    required: tuple[str, ...]
    repair: str
    """Why the next refit must send every element; empty if it need not."""
    abort: str
    receivers: tuple[MemberStatus, ...]


def read_status(run: str, *, clock: Clock, ids: IdSource, watch_s: float) -> RunStatus:
    """Look at a run twice, ``watch_s`` apart, so that it shows who is alive.

    Raises:
        RejectedError: there is no such run.
    """
    store = open_run(run, clock=clock)
    if store.directory is not None and not (store.directory / "control" / "record.sqlite").exists():
        raise RejectedError(f"no run at {run}: expected a control record there; check the address, or start the trainer first")
    state = control_plane(store, clock, ids).read()
    if state is None:
        raise RejectedError(f"no run at {run}: the control record is empty; start the trainer first")
    before = _counters([*read_beacons(store), *_coordinator(store)])
    clock.sleep(watch_s)
    return _status(
        run,
        state,
        is_alive=any(_moved(reading, before) for reading in _coordinator(store)),
        receivers=tuple(_member(reading, state, before) for reading in read_beacons(store)),
    )


def _coordinator(store: RunStore) -> list[BeaconReading]:
    reading = read_beacon(store, keys.control(COORDINATOR))
    return [] if reading is None else [reading]


def _status(run: str, state: ControlState, *, is_alive: bool, receivers: tuple[MemberStatus, ...]) -> RunStatus:
    attempt = state.attempt
    return RunStatus(
        run=run,
        policy_version=state.record.policy_version,
        policy_digest=state.record.policy_digest,
        coordinator=state.coordinator,
        coordinator_is_alive=is_alive,
        epoch=state.epoch,
        attempt=attempt.attempt if attempt is not None else "",
        attempt_mode=attempt.mode.value if attempt is not None else "",
        required=attempt.required if attempt is not None else (),
        repair=state.repair,
        abort=state.abort,
        receivers=receivers,
    )


def _member(reading: BeaconReading, state: ControlState, before: dict[str, tuple[str, int]]) -> MemberStatus:
    shown = decode_message(reading.info, Membership, sender=f"beacon of receiver {reading.name}")
    return MemberStatus(
        receiver=reading.name,
        engine=shown.engine,
        is_alive=_moved(reading, before),
        is_ready=bool(shown.summary_digest) and shown.catalog_digest == state.setup_digest,
        policy_version=shown.policy_version,
        refusal=shown.refusal,
    )


def _counters(readings: list[BeaconReading]) -> dict[str, tuple[str, int]]:
    return {reading.name: (reading.nonce, reading.counter) for reading in readings}


def _moved(reading: BeaconReading, before: dict[str, tuple[str, int]]) -> bool:
    return before.get(reading.name) != (reading.nonce, reading.counter)
