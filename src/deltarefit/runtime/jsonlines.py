"""Events as JSON lines: one process writes one file, and files of several processes can be read back onto one time axis.

A line is an object with a ``kind``: ``process`` (who writes, and what its clocks said at the start), ``stage`` (one stage ran
once), ``clock`` (how far another process's clock is ahead, as the coordinator found), ``refit`` (a committed refit's report)
and ``failure`` (an attempt that failed, and why). Lines are written whole and at once, so a killed process leaves a readable
file; a last line cut short is skipped.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from deltarefit.errors import RejectedError
from deltarefit.runtime.clock import Clock
from deltarefit.runtime.events import StageEvent
from deltarefit.runtime.report import RefitReport
from deltarefit.runtime.trace_clock import ClockShift, boot_id, on_axis

__all__ = ["EventFile", "JsonLines", "Line", "merge_event_files", "read_event_file"]

MAX_FILE_NBYTES = 4 << 30
"""Longer files are refused: about 20 million stages."""


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    pass


class ProcessLine(_Line, frozen=True, forbid_unknown_fields=True, tag="process"):
    """Who writes the lines that follow."""

    host: str
    pid: int
    boot: str
    wall_s: float
    """Seconds since 1970 when ``monotonic_s`` was read."""
    monotonic_s: float


class StageLine(_Line, frozen=True, forbid_unknown_fields=True, tag="stage"):
    """See ``StageEvent``; times are on the monotonic clock of the process that writes."""

    stage: str
    where: str
    attempt: str
    t0_s: float
    t1_s: float
    nbytes: int = 0
    payload: str = ""

    @property
    def event(self) -> StageEvent:
        return StageEvent(self.stage, self.where, self.attempt, self.t0_s, self.t1_s, self.nbytes, self.payload)


class ClockLine(_Line, frozen=True, forbid_unknown_fields=True, tag="clock"):
    """See ``ClockShift``: of ``where``'s clock against that of the process that writes."""

    where: str
    shift_s: float
    error_s: float


class RefitLine(_Line, frozen=True, forbid_unknown_fields=True, tag="refit"):
    """A refit was committed."""

    report: RefitReport


class FailureLine(_Line, frozen=True, forbid_unknown_fields=True, tag="failure"):
    """An attempt failed."""

    attempt: str
    where: str
    reason: str
    at_s: float
    """On the monotonic clock of the process that writes."""


Line = ProcessLine | StageLine | ClockLine | RefitLine | FailureLine


class JsonLines:
    """Appends to a file. Safe from any thread; a disk that is full stops the file, never the refit."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Open ``path`` for appending and say who writes.

        Raises:
            RejectedError: it cannot be opened.
        """
        self._path = path
        self._lock = threading.Lock()
        self.failure: str = ""
        """Why nothing more is written, if so."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise RejectedError(
                f"event file {path}: {error}; name another directory with the event_directory setting"
            ) from error
        self.write(ProcessLine(platform.node(), os.getpid(), boot_id(), clock.wall_s(), clock.monotonic_s()))

    def stage(self, event: StageEvent) -> None:
        """A listener for ``EventLog.subscribe``."""
        self.write(StageLine(event.stage, event.where, event.attempt, event.t0_s, event.t1_s, event.nbytes, event.payload))

    def refit(self, report: RefitReport, shifts: Mapping[str, ClockShift]) -> None:
        """A refit was committed; with it, how the clocks of its processes stand to this one's."""
        for where, shift in sorted(shifts.items()):
            self.write(ClockLine(where, shift.shift_s, shift.error_s))
        self.write(RefitLine(report))

    def write(self, line: Line) -> None:
        """Append one line."""
        data = msgspec.json.encode(line) + b"\n"
        with self._lock:
            if self.failure:
                return
            try:
                self._file.write(data)
            except (OSError, ValueError) as error:
                self.failure = f"event file {self._path}: {error}; nothing more is written to it"

    def close(self) -> None:
        with self._lock:
            self._file.close()
            self.failure = self.failure or "closed"


class EventFile(msgspec.Struct, frozen=True):
    """What was read from one file. A process that was started again appends to its file: only its last start counts."""

    path: str
    process: ProcessLine
    events: tuple[StageEvent, ...]
    shifts: Mapping[str, ClockShift]
    """Those of the last refit for which each process was heard of."""
    reports: tuple[RefitReport, ...]
    failures: tuple[FailureLine, ...]


def read_event_file(path: Path) -> EventFile:
    """Read a file that ``JsonLines`` wrote.

    Raises:
        RejectedError: it is none.
    """
    try:
        if path.stat().st_size > MAX_FILE_NBYTES:
            raise RejectedError(f"event file {path}: expected at most {MAX_FILE_NBYTES} bytes")
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RejectedError(f"event file {path}: {error}") from error
    lines.pop()  # nothing, or a line that was cut short
    return _event_file(path, [_line(path, number, line) for number, line in enumerate(lines, start=1) if line])


def _line(path: Path, number: int, line: bytes) -> Line:
    try:
        return msgspec.json.decode(line, type=Line)
    except (msgspec.DecodeError, ValueError) as error:
        raise RejectedError(
            f"event file {path}, line {number}: {error}; expected lines written through event_directory"
        ) from error


def _event_file(path: Path, lines: list[Line]) -> EventFile:
    process: ProcessLine | None = None
    mine: list[Line] = []
    for line in lines:
        if isinstance(line, ProcessLine):
            process, mine = line, []
        mine.append(line)
    if process is None:
        raise RejectedError(f"event file {path}: expected a line of kind process, got none")
    return EventFile(
        str(path),
        process,
        tuple(line.event for line in mine if isinstance(line, StageLine)),
        {line.where: ClockShift(line.shift_s, line.error_s) for line in mine if isinstance(line, ClockLine)},
        tuple(line.report for line in mine if isinstance(line, RefitLine)),
        tuple(line for line in mine if isinstance(line, FailureLine)),
    )


def merge_event_files(files: Iterable[EventFile]) -> tuple[list[StageEvent], dict[str, ClockShift]]:
    """Put the events of several processes on one time axis: that of the file with reports, which the coordinator writes.

    A process that the coordinator exchanged messages with is moved by the shift that was found then. Others are on the axis
    already if they ran on the same boot of the same machine, and are moved by wall clocks if not, with infinite error.

    Returns:
        The events in order, and every shift that was used, by process.
    """
    listed = list(files)
    if not listed:
        return [], {}
    axis = next((one for one in listed if one.reports or one.shifts), listed[0])
    shifts = dict(axis.shifts)
    events: list[StageEvent] = []
    for one in listed:
        for where in {event.where for event in one.events} - set(shifts):
            shifts[where] = _shift(one.process, axis.process)
        events.extend(one.events)
    unique = list(dict.fromkeys(events))
    return on_axis(unique, shifts), shifts


def _shift(process: ProcessLine, axis: ProcessLine) -> ClockShift:
    if process == axis or (process.boot and process.boot == axis.boot):
        return ClockShift(0.0, 0.0)
    return ClockShift((process.monotonic_s - process.wall_s) - (axis.monotonic_s - axis.wall_s), float("inf"))
