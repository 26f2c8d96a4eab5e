"""Stages as OpenTelemetry spans, for those who have a collector: the extra ``deltarefit[otel]``.

Spans of one attempt share a trace whatever process they come from: its id follows from the attempt's name, so nothing has to be
carried along. The tracer is the application's own, so where spans go, and whether anywhere, is configured there as usual.
"""

from __future__ import annotations

import hashlib
import importlib
from typing import Any

from deltarefit.errors import RejectedError
from deltarefit.runtime.clock import Clock
from deltarefit.runtime.events import StageEvent

__all__ = ["SpanWriter"]


class SpanWriter:
    """A listener for ``EventLog.subscribe``. Safe from any thread."""

    def __init__(self, clock: Clock, *, tracer: Any = None) -> None:
        """Use ``tracer``, or the application's for ``deltarefit``.

        Raises:
            RejectedError: OpenTelemetry is not installed.
        """
        try:
            self._trace: Any = importlib.import_module("opentelemetry.trace")
        except ImportError as error:
            raise RejectedError(
                "opentelemetry = true, but it is not installed; install deltarefit[otel], or leave the setting out"
            ) from error
        self._tracer = tracer if tracer is not None else self._trace.get_tracer("deltarefit")
        self._clock = clock

    def stage(self, event: StageEvent) -> None:
        """Write one span; its times are moved from the monotonic to the wall clock as both are now."""
        ahead_s = self._clock.wall_s() - self._clock.monotonic_s()
        attributes: dict[str, str | int] = {"deltarefit.where": event.where, "deltarefit.attempt": event.attempt}
        if event.payload:
            attributes["deltarefit.payload"] = event.payload
        if event.nbytes:
            attributes["deltarefit.nbytes"] = event.nbytes
        span = self._tracer.start_span(
            f"deltarefit.{event.stage}",
            context=self._context(event.attempt),
            start_time=int((event.t0_s + ahead_s) * 1e9),
            attributes=attributes,
        )
        span.end(end_time=int((event.t1_s + ahead_s) * 1e9))

    def _context(self, attempt: str) -> Any:
        """A parent that nobody wrote: it only names the attempt's trace."""
        digest = hashlib.blake2b(attempt.encode(), digest_size=24).digest()
        parent = self._trace.SpanContext(
            trace_id=int.from_bytes(digest[:16], "big"),
            span_id=int.from_bytes(digest[16:], "big"),
            is_remote=True,
            trace_flags=self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED),
        )
        return self._trace.set_span_in_context(self._trace.NonRecordingSpan(parent))
