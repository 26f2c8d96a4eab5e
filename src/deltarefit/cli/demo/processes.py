"""Child processes of the demo: started with a log each, ended whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Listener
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType
from typing import Any, Self

from deltarefit.cli.demo.wire import Link
from deltarefit.errors import AttemptFailedError, DeadlineError

__all__ = ["Child", "start_child"]

_EXIT_TIMEOUT_S = 120.0
_LOOK_S = 0.5


class Child:
    """One process and, once it connected, the link to it."""

    def __init__(self, role: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.role = role
        self.process = process
        self.log = log
        self._link: Link | None = None

    @property
    def link(self) -> Link:
        if self._link is None:
            raise AttemptFailedError(f"{self.role} never connected; see {self.log}")
        return self._link

    def adopt(self, link: Link) -> None:
        link.peer = f"{self.role} (log: {self.log})"
        self._link = link

    @staticmethod
    def accept(listener: Listener, children: Sequence[Child]) -> Link:
        """The next child that connects.

        Raises:
            AttemptFailedError: a child ended before it connected; the text has the end of its log.
        """
        connections: Queue[Any] = Queue()
        thread = threading.Thread(target=lambda: connections.put(listener.accept()), daemon=True)
        thread.start()
        while True:
            try:
                return Link(connections.get(timeout=_LOOK_S), "a starting process")
            except Empty:
                for child in children:
                    if child.process.poll() is not None:
                        raise AttemptFailedError(child.obituary()) from None

    def obituary(self) -> str:
        tail = self.log.read_text(errors="replace")[-1500:]
        return f"{self.role} ended with exit code {self.process.poll()}; the end of {self.log}:\n{tail}"

    def wait(self) -> int:
        """Wait until the process has ended; its exit status, negative if a signal ended it.

        Raises:
            DeadlineError: it did not end.
        """
        try:
            return self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"{self.role} has not ended after {_EXIT_TIMEOUT_S:.0f} s; see {self.log}") from error

    def terminate(self) -> None:
        """Ask the process to end; leaving the context waits for it."""
        if self.process.poll() is None:
            self.process.terminate()

    def close(self) -> None:
        """Close the link to a process that has ended."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._link is not None:
            self._link.close()
        if self.process.poll() is None:
            self.terminate()
            try:
                self.process.wait(5.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()


def start_child(role: str, module: str, arguments: Sequence[str], environment: Mapping[str, str], logs: Path) -> Child:
    """Start ``python -m deltarefit.cli.demo.<module>`` with its output in a log file."""
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{role}.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", f"deltarefit.cli.demo.{module}", *arguments],
            env={**os.environ, **_ENVIRONMENT, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    return Child(role, process, log)


_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""No hub, little output, one thread each: five processes share this machine."""
