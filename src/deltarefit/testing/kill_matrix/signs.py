"""How the processes of one case and their director speak: small JSON files in the case's directory, written whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from deltarefit.errors import DeadlineError
from deltarefit.runtime.clock import Deadline, SystemClock

__all__ = ["Breakpoint", "Signs"]

_LOOK_S = 0.005


class Signs:
    """Files that appear once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._clock = SystemClock()

    def put(self, name: str, value: Any = None) -> None:
        """Show a sign; readers see all of it or nothing."""
        path = self.directory / f"{name}.json"
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(value))
        draft.rename(path)

    def has(self, name: str) -> bool:
        return (self.directory / f"{name}.json").exists()

    def read(self, name: str) -> Any:
        """The value of a sign; None if it is not there."""
        try:
            return msgspec.json.decode((self.directory / f"{name}.json").read_bytes())
        except FileNotFoundError:
            return None

    def wait(self, name: str, timeout_s: float, *, unless: str = "") -> Any:
        """Wait for a sign and return its value; if a sign whose name starts with ``unless`` comes instead, raise.

        Raises:
            DeadlineError: it did not come.
        """
        deadline = Deadline(self._clock, timeout_s)
        while not self.has(name):
            if unless and (bad := sorted(self.directory.glob(f"{unless}*.json"))):
                raise DeadlineError(f"waited for '{name}', but {bad[0].stem}: {self.read(bad[0].stem)}")
            if deadline.expired:
                raise DeadlineError(f"waited {timeout_s:.0f} s for '{name}' in {self.directory}")
            self._clock.sleep(_LOOK_S)
        return self.read(name)


class Breakpoint:
    """Holds its process at one point of the refit under test, until the director lets it go."""

    def __init__(self, signs: Signs, point: str, count: int) -> None:
        """``point`` empty: none. ``count``: at which passage, from 1, once the director has armed it."""
        self._signs = signs
        self._point = point
        self._count = count
        self._seen = 0

    def reach(self, point: str) -> None:
        """Say that the process is at ``point``; returns when it may go on."""
        if point != self._point or not self._signs.has("armed"):
            return
        self._seen += 1
        if self._seen == self._count:
            self._signs.put("reached", point)
            self._signs.wait("go on", 120.0)
