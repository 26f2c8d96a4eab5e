"""What a demo leaves behind when it ends, in whatever way: no process, and no directory that nobody asked for."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

import click

__all__ = ["EndedBySignal", "Ending", "workplace"]


class EndedBySignal(SystemExit):
    """Somebody asked for the end. Exit status as shells give it to processes that a signal ended."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class Ending:
    """Within its context SIGTERM raises EndedBySignal in the main thread, once: what is held is then given back as after an
    error."""

    def __init__(self) -> None:
        self._is_put_off = False
        self._number = 0
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, self._end)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _end(self, number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_IGN)  # another one would break off the clearing up, which takes seconds at most
        self._number = number
        if not self._is_put_off:
            raise EndedBySignal(number)

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """While something is taken that would be lost if the end came before it is held."""
        self._is_put_off = True
        try:
            yield
        finally:
            self._is_put_off = False
        if self._number:
            raise EndedBySignal(self._number)


@contextmanager
def workplace(directory: Path | None) -> Iterator[Path]:
    """The named directory, which stays; or a temporary one, which stays only if something failed: its logs say what."""
    home = directory if directory is not None else Path(tempfile.mkdtemp(prefix="deltarefit-demo-"))
    keeps = directory is not None
    try:
        home.mkdir(parents=True, exist_ok=True)
        yield home
    except BaseException as error:
        keeps = keeps or not isinstance(error, EndedBySignal)
        if keeps:
            click.echo(f"everything is kept in {home}", err=True)
        raise
    finally:
        if not keeps:
            shutil.rmtree(home, ignore_errors=True)
