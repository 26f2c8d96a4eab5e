"""Opens what the settings ask for: a file of JSON lines, an address for Prometheus, OpenTelemetry spans. All hear one stream.

Nothing here can fail a refit once it is open: a full disk ends the file, a scraper that hangs has its own thread.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

from deltarefit.runtime.clock import Clock
from deltarefit.runtime.events import EventLog, StageEvent
from deltarefit.runtime.jsonlines import FailureLine, JsonLines
from deltarefit.runtime.prometheus import MetricsServer, RefitMetrics
from deltarefit.runtime.report import RefitReport
from deltarefit.runtime.settings import ObservationSettings
from deltarefit.runtime.trace_clock import ClockShift
from deltarefit.runtime.trace_spans import SpanWriter

__all__ = ["Observers"]

_LOG = logging.getLogger(__name__)


class Observers:
    """Of one process. Close it with the process's publisher, receiver or relay."""

    def __init__(self, settings: ObservationSettings, who: str, clock: Clock, *, serves_metrics: bool = True) -> None:
        """Open them.

        Args:
            settings: what to open.
            who: this process, as its events name it; its file is called after it.
            clock: time.
            serves_metrics: False on training ranks beside the first, whose numbers the first one gets.

        Raises:
            RejectedError: the file or the address cannot be opened, or OpenTelemetry is not installed.
        """
        self.metrics = RefitMetrics()
        self._clock = clock
        self._where = who
        self._own: set[str] = set()
        self._stack = ExitStack()
        self._file: JsonLines | None = None
        self._spans = SpanWriter(clock) if settings.opentelemetry else None
        self.metrics_address = ""
        """Where the metrics are served; empty if nowhere."""
        try:
            if settings.event_directory:
                self._file = JsonLines(Path(settings.event_directory) / f"{_file_name(who)}.jsonl", clock)
                self._stack.callback(self._file.close)
            if settings.metrics_address and serves_metrics:
                server = self._stack.enter_context(MetricsServer(self.metrics, settings.metrics_address))
                self.metrics_address = server.address
        except BaseException:
            self._stack.close()
            raise

    def watch(self, log: EventLog) -> None:
        """Hear every event of this log, as it happens."""
        self._own.add(log.where)
        log.subscribe_failures(self._failed)
        log.subscribe(self.metrics.stage)
        if self._file is not None:
            log.subscribe(self._file.stage)
        if self._spans is not None:
            log.subscribe(self._spans.stage)

    def _failed(self, attempt: str, reason: str) -> None:
        if self._file is not None:
            self._file.write(FailureLine(attempt, self._where, reason, self._clock.monotonic_s()))

    def refit(self, report: RefitReport, events: Iterable[StageEvent], shifts: Mapping[str, ClockShift]) -> None:
        """A refit was committed: what other processes reported of it joins the file, times as they gave them.

        So the coordinator's file alone holds the whole refit.
        """
        for event in events:
            if event.where in self._own:
                continue
            self.metrics.stage(event)
            if self._file is not None:
                self._file.stage(event)
        self.metrics.refit(report)
        if self._file is not None:
            self._file.refit(report, shifts)
            if self._file.failure:
                _LOG.warning("%s", self._file.failure)

    def close(self) -> None:
        """Close the file and the address. May be called again."""
        self._stack.close()


def _file_name(who: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", who)
