"""A child process that speaks lines of JSON: one when it is ready, and one for each line it is told."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from deltarefit.errors import AttemptFailedError, DeadlineError

__all__ = ["RoleProcess"]

_END_S = 20.0


class RoleProcess:
    """A context manager: entering waits until the child is ready, leaving ends it."""

    def __init__(self, name: str, command: Sequence[str], *, environment: Mapping[str, str], log: Path, start_s: float) -> None:
        """Start it; what it writes to standard error goes to ``log``."""
        self.name = name
        self.ready: dict[str, Any] = {}
        """What it said when it was ready."""
        self._log = log
        self._start_s = start_s
        self._answers: queue.Queue[bytes] = queue.Queue()
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name=f"read-{name}", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        try:
            self.ready = self.answer(self._start_s)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._end()

    def ask(self, command: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Tell it something and wait for its answer."""
        self.tell(command)
        return self.answer(timeout_s)

    def tell(self, command: Mapping[str, Any]) -> None:
        """Tell it something.

        Raises:
            AttemptFailedError: it has ended.
        """
        try:
            self._stdin.write(msgspec.json.encode(command) + b"\n")
            self._stdin.flush()
        except OSError as error:
            raise AttemptFailedError(self.obituary()) from error

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Its next answer.

        Raises:
            AttemptFailedError: it failed or ended; the text has the end of its log.
            DeadlineError: it said nothing for so long.
        """
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty as error:
            raise DeadlineError(f"{self.name} said nothing for {timeout_s:.0f} s; see {self._log}") from error
        if not line:
            raise AttemptFailedError(self.obituary())
        found: dict[str, Any] = msgspec.json.decode(line)
        if "error" in found:
            raise AttemptFailedError(f"{self.name}: {found['error']}")
        return found

    def kill(self) -> None:
        """End it at once, as a crash does."""
        self.process.kill()
        self.process.wait(_END_S)

    def obituary(self) -> str:
        """How it ended, with the end of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        tail = self._log.read_text(errors="replace")[-2000:]
        return f"{self.name} ended with exit code {self.process.poll()}; the end of {self._log}:\n{tail}"

    @property
    def _stdin(self) -> Any:
        return self.process.stdin

    def _read(self) -> None:
        if self.process.stdout is not None:
            for line in self.process.stdout:
                self._answers.put(line)
        self._answers.put(b"")

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_END_S)
        self._reader.join(_END_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
