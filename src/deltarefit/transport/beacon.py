"""Signs of life: a small object that its writer rewrites, and readers who watch it change.

Life is judged by the reader's own clock, from the moment it last *saw* the counter move: no two clocks are ever compared, so
a clock that is an hour off harms nothing.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Annotated

import msgspec

from deltarefit.errors import PayloadInvalidError, PayloadMissingError, RejectedError
from deltarefit.transport import keys
from deltarefit.transport.base import Clock
from deltarefit.transport.stores import RunStore

__all__ = ["Beacon", "BeaconReading", "BeaconWatch", "Sighting", "read_beacon", "read_beacons"]

_LOG = logging.getLogger(__name__)
_MAX_NBYTES = 64 << 10


class BeaconReading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a beacon says."""

    name: str
    nonce: str
    """Of one start of the writer: a restarted one has another."""
    counter: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    """Grows with every beat."""
    info: bytes
    """The writer's own words: address, role, capabilities."""


class Beacon:
    """Writes one beacon. ``beat`` and ``remove`` may be called from any thread."""

    def __init__(self, store: RunStore, key: str, *, nonce: str, info: bytes = b"", yields: bool = False) -> None:
        """``key``: from ``keys.member`` or ``keys.control``. Nothing is written before the first ``beat``.

        ``yields``: look before each beat, and write nothing any more once a later start has beaten under this key.
        """
        if len(info) > _MAX_NBYTES // 2:
            raise RejectedError(f"beacon {key}: expected at most {_MAX_NBYTES // 2} bytes of info, got {len(info)}")
        self._store = store
        self._key = key
        self._lock = threading.Lock()
        self._reading = BeaconReading(keys.name_of_member(key), nonce, 0, info)
        self._yields = yields
        self._known = {nonce}
        """Of this start, and of the one that had the key before it, which may beat once more."""
        self.is_replaced = False
        """Whether a later start was seen; only if this one yields."""

    def beat(self, info: bytes | None = None) -> None:
        """Write the next sign of life, with new info if given; not if a later start has the key."""
        with self._lock:
            if self._yields_now():
                return
            last = self._reading
            self._reading = BeaconReading(last.name, last.nonce, last.counter + 1, last.info if info is None else info)
            self._store.put(self._key, msgspec.msgpack.encode(self._reading))

    def remove(self) -> None:
        """Say goodbye: readers see at once that the writer left on purpose. What a later start shows stays."""
        with self._lock:
            if not self._yields_now():
                self._store.delete([self._key])

    def _yields_now(self) -> bool:
        """Both starts beat equally often, so the earlier one meets the other's beat at its next one or the one after it."""
        if not self._yields or self.is_replaced:
            return self.is_replaced
        reading = read_beacon(self._store, self._key)
        if reading is not None and not self._reading.counter:
            self._known.add(reading.nonce)
        self.is_replaced = reading is not None and reading.nonce not in self._known
        return self.is_replaced


def read_beacons(store: RunStore, prefix: str = keys.MEMBERS) -> list[BeaconReading]:
    """All beacons under ``prefix/``, by name. What is none of ours is skipped with a log line."""
    readings: list[BeaconReading] = []
    for info in store.listing(prefix):
        reading = read_beacon(store, info.key)
        if reading is not None:
            readings.append(reading)
    return readings


def read_beacon(store: RunStore, key: str) -> BeaconReading | None:
    """The beacon at this key; None if there is none, or something else."""
    try:
        reading = store.get_as(key, _decoded, max_nbytes=_MAX_NBYTES)
    except PayloadMissingError:
        return None
    except PayloadInvalidError as error:
        _LOG.warning("%s is not a beacon, skipped: %s", key, error)
        return None
    return reading if reading.name == keys.name_of_member(key) else None


def _decoded(data: bytes) -> BeaconReading:
    try:
        return msgspec.msgpack.decode(data, type=BeaconReading)
    except (msgspec.DecodeError, ValueError) as error:
        raise PayloadInvalidError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Sighting:
    """A beacon and how long ago this reader saw it change."""

    reading: BeaconReading
    age_s: float
    """By the reader's clock; 0 when it changed at this look or was never seen before."""


class BeaconWatch:
    """Remembers when each beacon last moved. Used by one thread."""

    def __init__(self, store: RunStore, *, clock: Clock, prefix: str = keys.MEMBERS) -> None:
        self._store = store
        self._clock = clock
        self._prefix = prefix
        self._moved: dict[str, tuple[BeaconReading, float]] = {}

    def look(self) -> dict[str, Sighting]:
        """All beacons that are there now, by name. One that its writer removed is no longer among them."""
        readings = read_beacons(self._store, self._prefix)
        now_s = self._clock.monotonic_s()
        moved: dict[str, tuple[BeaconReading, float]] = {}
        for reading in readings:
            before = self._moved.get(reading.name)
            same = before is not None and (before[0].nonce, before[0].counter) == (reading.nonce, reading.counter)
            moved[reading.name] = before if before is not None and same else (reading, now_s)
        self._moved = moved
        return {name: Sighting(reading, now_s - since_s) for name, (reading, since_s) in moved.items()}
