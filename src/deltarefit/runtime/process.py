"""The process that an object lives in. A fork gets a copy of it, and none of its threads."""

from __future__ import annotations

import os

from deltarefit.errors import RejectedError

__all__ = ["HomeProcess"]


class HomeProcess:
    """The process in which it is made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in a fork of it."""
        return os.getpid() == self._pid

    def check(self, what: str) -> None:
        """Refuse ``what`` in a fork: it would wait for threads that do not exist there, and act in the name of its parent.

        Raises:
            RejectedError: this is a fork.
        """
        if not self.is_here:
            raise RejectedError(
                f"{what} in process {os.getpid()}, a fork of {self._pid}, where it was made; expected that process. A fork has "
                "none of its threads and no part in the run: make it after forking, or start processes with 'spawn'"
            )
