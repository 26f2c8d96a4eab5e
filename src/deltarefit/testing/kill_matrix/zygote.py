"""Starts the processes of the cases quickly: everything heavy is imported once, then each process is a fork.

Its process reads one order as JSON per line from stdin and answers each with one line: a ``Start`` with the new process's id,
an empty line with ids and exit statuses of the processes that ended since. When stdin ends, every process that still runs is
killed. On SIGUSR1 a process writes the stacks of its threads to its log.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from deltarefit.errors import AttemptFailedError
from deltarefit.testing.kill_matrix.roles import Task, serve_role

__all__ = ["Zygote", "main"]


class Start(msgspec.Struct, frozen=True):
    """Begin a process."""

    task: Task
    log: str
    environment: dict[str, str]


class Zygote:
    """The director's end. Usable from any thread."""

    def __init__(self, log: Path) -> None:
        self._lock = threading.Lock()
        self._ended: dict[int, int] = {}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from deltarefit.testing.kill_matrix.zygote import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def start(self, task: Task, log: Path, environment: Mapping[str, str]) -> int:
        """Begin a process; returns its id."""
        with self._lock:
            pid = int(self._ask(msgspec.json.encode(Start(task, str(log), dict(environment)))))
            self._ended.pop(pid, None)  # an earlier process had the same id
        return pid

    def status(self, pid: int) -> int | None:
        """Exit status of a process: negative if a signal ended it, None while it runs."""
        with self._lock:
            if pid not in self._ended:
                self._ended |= msgspec.json.decode(self._ask(b""), type=dict[int, int])
            return self._ended.get(pid)

    def _ask(self, line: bytes) -> bytes:
        if self._process.stdin is None or self._process.stdout is None:
            raise AttemptFailedError("the zygote has no pipes")
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise AttemptFailedError(f"the zygote ended with {self._process.poll()}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(30.0)
        if self._process.stdout is not None:
            self._process.stdout.close()


def main() -> None:
    """The zygote itself."""
    running: set[int] = set()
    for line in sys.stdin.buffer:
        if line.strip():
            answer = str(_fork(msgspec.json.decode(line, type=Start), running)).encode()
        else:
            answer = msgspec.json.encode(_reap(running))
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _reap(running: set[int]) -> dict[int, int]:
    ended = {}
    for pid in sorted(running):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            ended[pid] = os.waitstatus_to_exitcode(status)
            running.discard(pid)
    return ended


def _fork(order: Start, running: set[int]) -> int:
    pid = os.fork()
    if pid:
        running.add(pid)
        return pid
    status = 1
    try:
        out = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        faulthandler.register(signal.SIGUSR1, file=sys.stderr)
        os.environ.update(order.environment)
        serve_role(order.task)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
