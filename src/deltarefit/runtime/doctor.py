"""Checks what a run's place must be able to do, by doing it with scratch objects that are removed again."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from deltarefit.control import SqliteRecordStore
from deltarefit.control.store import ABSENT
from deltarefit.errors import PayloadMissingError, RefitError, RejectedError, TransportError
from deltarefit.protocol.lease import DRIFT
from deltarefit.runtime.clock import Clock, IdSource
from deltarefit.runtime.control_place import is_placed_elsewhere, probe_record_store
from deltarefit.runtime.looking import control_to_look, open_to_look
from deltarefit.runtime.relays import read_relays
from deltarefit.runtime.session import lease_settings
from deltarefit.transport import RunStore, keys
from deltarefit.transport.relay import Peer
from deltarefit.wording import some_of

__all__ = ["Check", "Diagnosis", "examine"]

_ROUND_TRIPS = 5
_PROBE_NBYTES = 4096  # more than is written: what a store adds is to be seen
_MOST_RELAYS = 256
_CONNECTING = 16
_CONNECT_S = 3.0
_LEAST_FREE_NBYTES = 2**30
_STORE_TICK_S = 1.0  # S3 tells times in whole seconds
_SHARED_MEMORY = Path("/dev/shm")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    name: str
    status: Literal["ok", "warning", "failed"]
    found: str
    advice: str = ""
    """What to do; empty if nothing."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What ``doctor`` says of one run."""

    run: str
    ok: bool
    """Nothing failed; there may be warnings."""
    checks: tuple[Check, ...]


def examine(
    run: str, *, clock: Clock, ids: IdSource, watch_s: float = 3.0, lease_s: float = 10.0, shared: Path = _SHARED_MEMORY
) -> Diagnosis:
    """Try everything that a refit will ask of the run's place and of this machine. Takes a little more than ``watch_s``, and
    about twelve seconds if the store does not answer.

    Raises:
        RejectedError: ``run`` is no URL of a run.
    """
    store = open_to_look(run, clock=clock, may_be_new=True)
    probe = _Probe(store, clock, ids)
    asking = {
        "permissions": probe.permissions,
        "conditional writes": probe.conditional_writes,
        "control record": probe.control_record,
        "latency": lambda: probe.latency(lease_s),
        "clocks": lambda: probe.clocks(watch_s),
        "ports": probe.ports,
    }
    local = {"free space": probe.free_space, "shared memory": lambda: _shared_memory(shared)}
    checks = (*_ask(asking, waits=store.directory is None), *_ask(local, waits=False))
    return Diagnosis(run=run, ok=all(check.status != "failed" for check in checks), checks=checks)


def _ask(looks: Mapping[str, Callable[[], Check]], *, waits: bool) -> Iterator[Check]:
    """``waits``: a store that does not answer is waited for, so the first look that meets one is the last."""
    unanswered = ""
    for name, look in looks.items():
        if unanswered:
            yield Check(name=name, status="failed", found=f"not tried: the store did not answer when asked for {unanswered}")
            continue
        try:
            yield look()
        except (RefitError, OSError) as error:
            yield Check(name=name, status="failed", found=str(error), advice="mend what the text names, then run doctor again")
            if waits and isinstance(error, TransportError):
                unanswered = name


class _Probe:
    """Looks at one store, with objects under a scratch name."""

    def __init__(self, store: RunStore, clock: Clock, ids: IdSource) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids
        self._prefix = f"{keys.CONTROL}/doctor-{ids.nonce()}"

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[None]:
        """Removes what was written within. Where something failed within, that is told, and not that this failed too."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RefitError):
                self._store.delete_prefix(self._prefix)
            raise
        self._store.delete_prefix(self._prefix)

    def permissions(self) -> Check:
        """Write, read, list, look, create once, delete."""
        store, key = self._store, f"{self._prefix}/object"
        with self._scratch():
            store.put(key, b"first")
            if (found := store.get(key, max_nbytes=_PROBE_NBYTES)) != b"first":
                raise RejectedError(
                    f"{key}: read {found[:80]!r} ({len(found)} bytes) where b'first' was just written; some stores keep the "
                    "framing of an upload in the object, and some proxies add to it: use another endpoint, or a newer store"
                )
            store.put(key, b"second")
            if store.get(key, max_nbytes=_PROBE_NBYTES) != b"second":
                raise RejectedError(f"{key}: read old bytes right after they were replaced; the store is not consistent")
            if [info.key for info in store.listing(self._prefix)] != [key]:
                raise RejectedError(f"{self._prefix}/: an object that was just written is not listed")
            if store.head(key) is None or store.put_if_absent(key, b"third"):
                raise RejectedError(f"{key}: an object that is there was created a second time")
        if store.find(key, max_nbytes=_PROBE_NBYTES) is not None:
            raise RejectedError(f"{key}: still there after it was deleted; a run's leftovers could not be removed")
        return Check(name="permissions", status="ok", found="write, read, list, create once and delete work")

    def conditional_writes(self) -> Check:
        """Whether two coordinators could both win."""
        if is_placed_elsewhere(self._store):
            return Check(name="conditional writes", status="ok", found="not needed: the control record is in etcd")
        directory = self._store.directory
        if directory is None:
            probe_record_store(self._store, self._ids)
            return Check(name="conditional writes", status="ok", found="If-None-Match and If-Match are honoured")
        scratch = directory / self._prefix / "record.sqlite"
        try:
            record = SqliteRecordStore(scratch)
            created = record.swap(ABSENT, b"1")
            tag = record.read()[1]
            if not created or not record.swap(tag, b"2") or record.swap(tag, b"3") or record.read()[0] != b"2":
                raise RejectedError(f"{scratch}: SQLite let an outdated writer win; this file system cannot hold a run")
        finally:
            shutil.rmtree(scratch.parent, ignore_errors=True)
        return Check(name="conditional writes", status="ok", found="SQLite with a write-ahead log refuses outdated writers")

    def control_record(self) -> Check:
        """What the record says, if the run exists."""
        state = control_to_look(self._store, self._clock, self._ids).read()
        if state is None:
            return Check(name="control record", status="ok", found="none: the run has not been started")
        if state.repair:
            return Check(
                name="control record",
                status="warning",
                found=f"policy version {state.record.policy_version}; {state.repair}",
                advice="the next refit() sends every element; until then request gates may be closed",
            )
        return Check(name="control record", status="ok", found=f"policy version {state.record.policy_version} is committed")

    def latency(self, lease_s: float) -> Check:
        """How long a sign of life takes."""
        key = f"{self._prefix}/beat"
        took_s = []
        with self._scratch():
            for _ in range(_ROUND_TRIPS):
                start_s = self._clock.monotonic_s()
                self._store.put(key, b"beat")
                self._store.get(key, max_nbytes=16)
                took_s.append(self._clock.monotonic_s() - start_s)
        worst_s = max(took_s)
        usual_s = sorted(took_s)[len(took_s) // 2]
        found = f"{usual_s * 1000:.0f} ms to write and read a small object, at worst {worst_s * 1000:.0f} ms"
        if worst_s > lease_settings(lease_s).renew_s:
            return Check(
                name="latency", status="warning", found=found, advice=f"too slow for lease_s {lease_s:g}: set a longer one"
            )
        return Check(name="latency", status="ok", found=found)

    def clocks(self, watch_s: float) -> Check:
        """Leases need clocks that run equally fast, not clocks that show the same time."""
        key = f"{self._prefix}/clock"
        with self._scratch():
            first = self._stamp(key)
            self._clock.sleep(watch_s)
            last = self._stamp(key)
        passed_s = last[0] - first[0]
        wall_rate = (last[1] - first[1]) / passed_s
        store_off_s = abs((last[2] - first[2]) - passed_s)
        found = (
            f"in {passed_s:.1f} s the wall clock ran at {wall_rate:.3f} of the monotonic clock's pace; the store's clock shows "
            f"{last[2] - last[1]:+.1f} s against this machine's (of no consequence)"
        )
        if abs(wall_rate - 1) > DRIFT or store_off_s > DRIFT * passed_s + _STORE_TICK_S:
            return Check(
                name="clocks",
                status="warning",
                found=found,
                advice=f"leases allow clocks to differ by {DRIFT:.0%} in pace; look at this machine's time synchronisation",
            )
        return Check(name="clocks", status="ok", found=found)

    def _stamp(self, key: str) -> tuple[float, float, float]:
        """Monotonic clock, wall clock and the store's clock at about the same moment."""
        self._store.put(key, b"tick")
        info = self._store.head(key)
        if info is None:
            raise PayloadMissingError(f"{key}: gone right after it was written")
        return self._clock.monotonic_s(), self._clock.wall_s(), info.modified_s

    def ports(self) -> Check:
        """Whether every relay that shows itself can be reached from here, as a trainer or another relay must reach it."""
        relays = read_relays(self._store)[:_MOST_RELAYS]
        if not relays:
            return Check(name="ports", status="ok", found="none needed: no relay shows itself in this run")
        with ThreadPoolExecutor(_CONNECTING, thread_name_prefix="deltarefit-doctor") as pool:
            trouble = [text for text in pool.map(_unreachable, relays) if text]
        if not trouble:
            return Check(name="ports", status="ok", found=f"{len(relays)} relays take connections")
        return Check(
            name="ports",
            status="warning",
            found=f"{len(trouble)} of {len(relays)} relays take none: {some_of(trouble, 3)}",
            advice="trainers and other relays must reach them: open the port, or tell the relay with --advertise an address "
            "that they reach. If it is gone for good, a refit soon removes its sign",
        )

    def free_space(self) -> Check:
        directory = self._store.directory
        if directory is None:
            return Check(name="free space", status="ok", found="an object store does not tell")
        free = shutil.disk_usage(directory).free
        status: Literal["ok", "warning"] = "ok" if free >= _LEAST_FREE_NBYTES else "warning"
        advice = "" if status == "ok" else "a refit needs room for its payloads; a dense one for a whole checkpoint"
        return Check(name="free space", status=status, found=f"{_gib(free)} in {directory}", advice=advice)


def _unreachable(relay: Peer) -> str:
    """Why no connection to a relay can be opened; empty if one can."""
    try:
        socket.create_connection((relay.host, relay.port), timeout=_CONNECT_S).close()
    except OSError as error:
        return f"{relay.name} at {relay.host}:{relay.port} ({error})"
    return ""


def _shared_memory(path: Path) -> Check:
    """Engines of one node share downloads there, and vLLM's ranks are spoken to through it."""
    if not path.is_dir() or not os.access(path, os.W_OK):
        return Check(
            name="shared memory",
            status="warning",
            found=f"{path} cannot be written",
            advice="each engine then downloads for itself, and files go to the temporary directory",
        )
    free = shutil.disk_usage(path).free
    if free < _LEAST_FREE_NBYTES:
        return Check(
            name="shared memory",
            status="warning",
            found=f"{_gib(free)} in {path}",
            advice="give the container more (docker run --shm-size), or payloads will not fit",
        )
    return Check(name="shared memory", status="ok", found=f"{_gib(free)} in {path}")


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB free"
