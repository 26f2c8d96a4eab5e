"""What a run looks like from outside: reads the record and the beacons, changes nothing."""

from __future__ import annotations

import msgspec

from deltarefit.control import ControlPlane
from deltarefit.errors import RejectedError
from deltarefit.protocol import ControlState
from deltarefit.runtime.clock import Clock, IdSource
from deltarefit.runtime.looking import control_to_look, open_to_look
from deltarefit.runtime.messages import Membership, RunNotice, decode_message
from deltarefit.runtime.names import COORDINATOR
from deltarefit.runtime.session import lease_settings
from deltarefit.transport import BeaconReading, RunStore, keys, read_beacon, read_beacons

__all__ = ["MemberStatus", "RunStatus", "existing_state", "read_status"]

_LEASE_S = 10.0  # assumed where no coordinator says: the default


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One receiver."""

    receiver: str
    engine: str
    is_alive: bool
    """Its beacon moved while it was watched."""
    is_ready: bool
    """It prewarmed for the run's model."""
    is_serving: bool
    """Its request gate is open, as far as it knows."""
    activity: str
    """What it is doing, in words; empty if it only serves."""
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
    num_attempts: int
    """Attempts of the refit under way; 0 between refits."""
    activity: str
    """What the coordinator is doing or waiting for; empty between refits, or if it shows no sign of life."""
    activity_s: float
    """For how long already."""
    required: tuple[str, ...]
    repair: str
    """Why the next refit must send every element; empty if it need not."""
    abort: str
    retained_from: int | None
    """Receivers with the weights of this version or a later one can catch up by themselves; None if nothing is retained."""
    receivers: tuple[MemberStatus, ...]


def read_status(run: str, *, clock: Clock, ids: IdSource, watch_s: float | None = None) -> RunStatus:
    """Look at a run twice, ``watch_s`` apart, so that it shows who is alive; by default long enough for two signs of life.

    Raises:
        RejectedError: there is no such run.
        TransportError: the store is out of reach.
    """
    store = open_to_look(run, clock=clock)
    state = existing_state(run, control_to_look(store, clock, ids))
    first = _coordinator(store)
    before = _counters([*read_beacons(store), *([first[0]] if first is not None else [])])
    if watch_s is None:
        watch_s = 2.5 * lease_settings(first[1].lease_s if first is not None else _LEASE_S).renew_s
    clock.sleep(watch_s)
    last = _coordinator(store)
    is_alive = last is not None and _moved(last[0], before)
    notice = last[1] if last is not None and is_alive else None
    receivers = tuple(_member(reading, state, before) for reading in read_beacons(store))
    return _status(run, state, notice, receivers)


def existing_state(run: str, control: ControlPlane) -> ControlState:
    """The record of a run that must be there.

    Raises:
        RejectedError: there is no such run.
        TransportError: the store is out of reach.
    """
    state = control.read()
    if state is None:
        raise RejectedError(f"no run at {run}: expected a control record there; check the address, or start the trainer first")
    return state


def _coordinator(store: RunStore) -> tuple[BeaconReading, RunNotice] | None:
    reading = read_beacon(store, keys.control(COORDINATOR))
    return None if reading is None else (reading, decode_message(reading.info, RunNotice, sender="beacon of the coordinator"))


def _status(run: str, state: ControlState, notice: RunNotice | None, receivers: tuple[MemberStatus, ...]) -> RunStatus:
    attempt, transition = state.attempt, state.transition
    return RunStatus(
        run=run,
        policy_version=state.record.policy_version,
        policy_digest=state.record.policy_digest,
        coordinator=state.coordinator,
        coordinator_is_alive=notice is not None,
        epoch=state.epoch,
        attempt=attempt.attempt if attempt is not None else "",
        attempt_mode=attempt.mode.value if attempt is not None else "",
        num_attempts=transition.num_attempts if transition is not None else 0,
        activity=notice.activity if notice is not None else "",
        activity_s=notice.activity_s if notice is not None else 0.0,
        required=attempt.required if attempt is not None else (),
        repair=state.repair,
        abort=state.abort,
        retained_from=state.links[0].base_version if state.links else None,
        receivers=receivers,
    )


def _member(reading: BeaconReading, state: ControlState, before: dict[str, tuple[str, int]]) -> MemberStatus:
    shown = decode_message(reading.info, Membership, sender=f"beacon of receiver {reading.name}")
    return MemberStatus(
        receiver=reading.name,
        engine=shown.engine,
        is_alive=_moved(reading, before),
        is_ready=bool(shown.summary_digest) and shown.catalog_digest == state.setup_digest,
        is_serving=shown.is_serving,
        activity=shown.activity,
        policy_version=shown.policy_version,
        refusal=shown.refusal,
    )


def _counters(readings: list[BeaconReading]) -> dict[str, tuple[str, int]]:
    return {reading.name: (reading.nonce, reading.counter) for reading in readings}


def _moved(reading: BeaconReading, before: dict[str, tuple[str, int]]) -> bool:
    return before.get(reading.name) != (reading.nonce, reading.counter)
