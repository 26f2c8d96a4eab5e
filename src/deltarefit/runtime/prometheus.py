"""Counters and gauges of this process in Prometheus' text format, and an optional address to scrape them from.

No client library is needed: the format is a few lines of text (https://prometheus.io/docs/instrumenting/exposition_formats/,
version 0.0.4). Names follow its advice: base units, ``_total`` for counters. One process has a few dozen series whatever the
model's size: payloads and attempts are never labels.
"""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from deltarefit.errors import RejectedError
from deltarefit.runtime.events import StageEvent
from deltarefit.runtime.report import RefitReport

__all__ = ["CONTENT_TYPE", "MetricsServer", "RefitMetrics"]

_LOG = logging.getLogger(__name__)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REQUEST_S = 10.0
_LATENCY_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of the histogram of refits: from nothing changed over loopback to a terabyte between regions."""

Labels = tuple[tuple[str, str], ...]


class _Family:
    """All series of one name."""

    def __init__(self, name: str, kind: str, text: str) -> None:
        self.name = name
        self._kind = kind
        self._text = text
        self._values: dict[tuple[str, Labels], float] = {}

    def add(self, amount: float, *, suffix: str = "", **labels: str) -> None:
        key = suffix, tuple(sorted(labels.items()))
        self._values[key] = self._values.get(key, 0.0) + amount

    def set(self, value: float, **labels: str) -> None:
        self._values["", tuple(sorted(labels.items()))] = value

    def lines(self) -> Iterator[str]:
        if not self._values:
            return
        yield f"# HELP {self.name} {self._text}"
        yield f"# TYPE {self.name} {self._kind}"
        for (suffix, labels), value in self._values.items():
            shown = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels)
            yield f"{self.name}{suffix}{{{shown}}} {_number(value)}" if shown else f"{self.name}{suffix} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)


class RefitMetrics:
    """What one process counts. ``stage`` listens to its ``EventLog``; ``refit`` hears of committed refits. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = _Family("deltarefit_stage_seconds_total", "counter", "Seconds spent in each stage.")
        self._runs = _Family("deltarefit_stage_runs_total", "counter", "How often each stage ran.")
        self._bytes = _Family("deltarefit_stage_bytes_total", "counter", "Bytes that each stage handled.")
        self._refits = _Family("deltarefit_refits_total", "counter", "Refits that were committed.")
        self._attempts = _Family("deltarefit_attempts_total", "counter", "Attempts, by how they ended.")
        self._latency = _Family("deltarefit_refit_seconds", "histogram", "From the first comparison to the last new baseline.")
        self._last = _Family("deltarefit_last_refit", "gauge", "Facts of the latest committed refit.")
        self._bounds = _Family("deltarefit_lower_bound_seconds", "gauge", "Lower bounds of the latest committed refit.")
        self._version = _Family(
            "deltarefit_policy_version", "gauge", "The policy version that this process knows as committed."
        )

    def stage(self, event: StageEvent) -> None:
        """Count one event."""
        kind = event.where.partition(" ")[0]
        with self._lock:
            self._seconds.add(max(0.0, event.t1_s - event.t0_s), stage=event.stage, where=kind)
            self._runs.add(1, stage=event.stage, where=kind)
            if event.nbytes:
                self._bytes.add(event.nbytes, stage=event.stage, where=kind)

    def version(self, policy_version: int) -> None:
        """This process knows that version as committed."""
        with self._lock:
            self._version.set(policy_version)

    def refit(self, report: RefitReport) -> None:
        """Count a committed refit."""
        bounds = report.bounds
        with self._lock:
            self._version.set(report.policy_version)
            self._refits.add(1)
            self._attempts.add(1, outcome="committed")
            if report.attempts > 1:
                self._attempts.add(report.attempts - 1, outcome="failed")
            for limit_s in _LATENCY_S:
                self._latency.add(float(report.refit_s <= limit_s), suffix="_bucket", le=f"{limit_s:g}")
            self._latency.add(1, suffix="_bucket", le="+Inf")
            self._latency.add(report.refit_s, suffix="_sum")
            self._latency.add(1, suffix="_count")
            self._last.set(report.changed_fraction, fact="changed_fraction")
            self._last.set(report.nan_elements, fact="nan_elements")
            self._last.set(report.payload_nbytes, fact="payload_bytes")
            self._last.set(report.cross_nbytes, fact="cross_bytes")
            self._last.set(report.pause_s, fact="pause_seconds")
            self._last.set(len(report.receivers), fact="receivers")
            if bounds is not None:
                self._bounds.set(bounds.construction.seconds, bound="construction")
                self._bounds.set(bounds.transport.seconds, bound="transport")
                self._bounds.set(bounds.apply.seconds, bound="apply")

    def render(self) -> str:
        """All series as text."""
        with self._lock:
            lines = [line for family in self._families() for line in family.lines()]
        return "\n".join(lines) + "\n" if lines else ""

    def _families(self) -> Iterable[_Family]:
        return (
            self._version,
            self._refits,
            self._attempts,
            self._latency,
            self._last,
            self._bounds,
            self._seconds,
            self._runs,
            self._bytes,
        )


class MetricsServer:
    """Answers ``GET /metrics`` until closed. Anyone who reaches the address can read it: bind it to a private one."""

    def __init__(self, metrics: RefitMetrics, address: str) -> None:
        """Listen on ``host:port``; port 0 lets the system choose.

        Raises:
            RejectedError: no such address, or it is taken.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise RejectedError(f"metrics address {address!r}: expected host:port, such as 127.0.0.1:9464")
        try:
            self._server = http.server.ThreadingHTTPServer((host.strip("[]"), int(port)), _handler(metrics))
        except OSError as error:
            raise RejectedError(f"metrics address {address}: {error}; name another with the metrics_address setting") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="deltarefit-metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it listens, with the port that the system chose."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _handler(metrics: RefitMetrics) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = _REQUEST_S

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "only /metrics is here")
                return
            body = metrics.render().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class calls it so)
            _LOG.debug("metrics: " + format, *args)

    return Handler
