"""What a coordinator is doing or waiting for, in words, and since when: shown beside its heartbeat, for ``status``."""

from __future__ import annotations

import threading

from deltarefit.runtime.clock import Clock

__all__ = ["Activity"]


class Activity:
    """Safe from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._text = ""
        self._since_s = clock.monotonic_s()

    def begin(self, text: str) -> None:
        """From now on this; the time runs on if the text is the same as before."""
        with self._lock:
            if text != self._text:
                self._text = text
                self._since_s = self._clock.monotonic_s()

    def end(self) -> None:
        self.begin("")

    def read(self) -> tuple[str, float]:
        """The text and for how many seconds it has been so; the text is empty if there is none."""
        with self._lock:
            return self._text, self._clock.monotonic_s() - self._since_s if self._text else 0.0
