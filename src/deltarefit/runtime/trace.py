"""A whole refit as a trace that Perfetto and Chrome open: every process, every stage, every payload, on one time axis.

The format is Chrome's Trace Event JSON, written by hand: complete events ("X"), names of processes and threads ("M"), and
arrows that follow one payload from the owner that sent it to the receivers that applied it ("s", "t", "f"). Times are
microseconds from the first event. Open it at https://ui.perfetto.dev, or ``chrome://tracing``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from deltarefit.runtime.events import STAGES, StageEvent
from deltarefit.runtime.trace_clock import ClockShift

__all__ = ["chrome_trace", "lanes", "places"]

_PATH = ("send", "fetch", "apply")
"""The stages that a payload's arrow passes through."""


def chrome_trace(
    events: Iterable[StageEvent], *, title: str = "refit", shifts: Mapping[str, ClockShift] | None = None
) -> bytes:
    """The trace as JSON.

    Args:
        events: on one time axis.
        title: shown by some viewers.
        shifts: how processes' clocks were moved onto the axis; kept in the trace, so that a reader knows how far to trust it.
    """
    ordered = sorted(events, key=lambda event: (event.t0_s, -event.t1_s))
    start_s = ordered[0].t0_s if ordered else 0.0
    processes = {where: number for number, where in enumerate(places(ordered), start=1)}
    tracks = lanes(ordered)
    rows: list[dict[str, Any]] = list(_names(processes, tracks))
    rows.extend(_complete(event, processes[event.where], track, start_s) for event, track in tracks)
    rows.extend(_arrows(tracks, processes, start_s))
    other = {
        "title": title,
        "clock_shifts_s": {where: [shift.shift_s, shift.error_s] for where, shift in sorted((shifts or {}).items())},
    }
    return msgspec.json.encode({"traceEvents": rows, "displayTimeUnit": "ms", "otherData": other})


def lanes(events: Iterable[StageEvent]) -> list[tuple[StageEvent, int]]:
    """Give every event a track of its process: one per stage, and more where events of a stage overlap.

    Viewers draw what overlaps in one track as if one were within the other, so they must not share it. Tracks of a process are
    numbered in the order of stages.
    """
    listed = sorted(events, key=lambda event: (event.t0_s, -event.t1_s))
    free_s: dict[tuple[str, str], list[float]] = {}
    placed = []
    for event in listed:
        ends = free_s.setdefault((event.where, event.stage), [])
        lane = next((number for number, end_s in enumerate(ends) if end_s <= event.t0_s), len(ends))
        if lane == len(ends):
            ends.append(event.t1_s)
        ends[lane] = event.t1_s
        placed.append((event, _stage_rank(event.stage) * 1000 + lane))
    return placed


def _stage_rank(stage: str) -> int:
    return STAGES.index(stage) if stage in STAGES else len(STAGES)


def places(events: Sequence[StageEvent]) -> list[str]:
    """Coordinator, owners, relays, receivers; numbers in names count as numbers."""

    def rank(where: str) -> tuple[int, str, int, str]:
        kind, _, name = where.partition(" ")
        kinds = ("coordinator", "owner", "relay", "receiver")
        place = kinds.index(kind) if kind in kinds else len(kinds)
        return place, kind, int(name) if name.isdecimal() else 0, name

    return sorted({event.where for event in events}, key=rank)


def _names(processes: Mapping[str, int], tracks: Sequence[tuple[StageEvent, int]]) -> Iterator[dict[str, Any]]:
    for where, pid in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": where}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for where, stage, track in sorted({(event.where, event.stage, track) for event, track in tracks}):
        pid = processes[where]
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "args": {"name": stage}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": track, "args": {"sort_index": track}}


def _complete(event: StageEvent, pid: int, track: int, start_s: float) -> dict[str, Any]:
    arguments: dict[str, Any] = {"attempt": event.attempt}
    if event.payload:
        arguments["payload"] = event.payload
    if event.nbytes:
        arguments["nbytes"] = event.nbytes
        if event.t1_s > event.t0_s:
            arguments["MB/s"] = round(event.nbytes / (event.t1_s - event.t0_s) / 1e6, 3)
    return {
        "ph": "X",
        "name": event.stage,
        "cat": event.stage,
        "pid": pid,
        "tid": track,
        "ts": _microseconds(event.t0_s - start_s),
        "dur": _microseconds(event.t1_s - event.t0_s),
        "args": arguments,
    }


def _arrows(tracks: Sequence[tuple[StageEvent, int]], processes: Mapping[str, int], start_s: float) -> Iterator[dict[str, Any]]:
    """For each payload and receiver, one arrow from the sending through the fetching to the applying."""
    sent: dict[str, tuple[StageEvent, int]] = {}
    taken: dict[tuple[str, str], list[tuple[StageEvent, int]]] = {}
    for event, track in tracks:
        if not event.payload or event.stage not in _PATH:
            continue
        if event.stage == "send":
            sent[event.payload] = event, track
        else:
            taken.setdefault((event.payload, event.where), []).append((event, track))
    for (payload, where), stops in sorted(taken.items()):
        if payload not in sent:
            continue
        path = [sent[payload], *stops]
        name = int.from_bytes(hashlib.blake2b(f"{payload} {where}".encode(), digest_size=6).digest(), "big")
        for number, (event, track) in enumerate(path):
            phase = "s" if number == 0 else "f" if number == len(path) - 1 else "t"
            row = {"ph": phase, "name": "payload", "cat": "payload", "id": name, "pid": processes[event.where], "tid": track}
            # Viewers bind an arrow to the slice that holds its time, so it must lie inside.
            row["ts"] = _microseconds((event.t0_s + event.t1_s) / 2 - start_s)
            yield row | {"bp": "e"} if phase == "f" else row


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
