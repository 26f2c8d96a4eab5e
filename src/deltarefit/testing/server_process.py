"""A serving engine, or a program beside one, as a child process with a log."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from deltarefit.errors import AttemptFailedError, DeadlineError
from deltarefit.runtime.clock import Deadline, SystemClock

__all__ = ["ServerProcess", "free_port"]

_LOOK_S = 0.25
_END_S = 20.0
_ANSWER_S = 120.0
_LOG_CHARACTERS = 4000


def free_port() -> int:
    """A port of the loopback address that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A context manager: leaving ends the child with everything that it started."""

    def __init__(
        self, command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None, url: str = ""
    ) -> None:
        """Start it. ``url``: where it will answer, if it is a server."""
        self.log = log
        self.url = url
        with log.open("wb") as file:
            self.child = subprocess.Popen(
                command, stdout=file, stderr=file, env={**os.environ, **(environment or {})}, start_new_session=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()

    def require_alive(self) -> None:
        """Raises AttemptFailedError with the end of its log if it has ended."""
        if (status := self.child.poll()) is not None:
            raise AttemptFailedError(f"{self.child.args!r} ended with {status}:\n{self._end_of_log()}")

    def wait_ready(self, timeout_s: float, route: str = "/health") -> None:
        """Wait until it answers.

        Raises:
            AttemptFailedError: it ended.
            DeadlineError: it does not answer in time.
        """
        clock = SystemClock()
        deadline = Deadline(clock, timeout_s)
        while True:
            self.require_alive()
            try:
                with urllib.request.urlopen(self.url + route, timeout=5):
                    return
            except OSError as error:
                if deadline.expired:
                    text = f"{self.url}{route} does not answer after {timeout_s:.0f} s:\n{self._end_of_log()}"
                    raise DeadlineError(text) from error
                clock.sleep(_LOOK_S)

    def ask(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST some JSON, or GET without; the answer's JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + route, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            return json.load(answer)

    def stop(self, how: signal.Signals = signal.SIGTERM, timeout_s: float = _END_S) -> int:
        """End it, and what it started; returns its exit status. May be repeated."""
        if self.child.poll() is None:
            self.child.send_signal(how)
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout_s)
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)  # an engine's own processes are in its group
        return self.child.wait(_END_S)

    def _end_of_log(self) -> str:
        return self.log.read_text(errors="replace")[-_LOG_CHARACTERS:]
