"""A refit under way in the background (asynchronous RL): ``publisher.publish()`` returns one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from deltarefit.errors import DeadlineError
from deltarefit.runtime.progress import Progress
from deltarefit.runtime.report import RefitReport

__all__ = ["RefitHandle"]


class RefitHandle:
    """Until it is done the parameters must not change; computing with them is fine. Safe from any thread."""

    def __init__(self, target_version: int, work: Callable[[], RefitReport], progress: Callable[[], Progress]) -> None:
        """Do the work in a thread of its own."""
        self.target_version = target_version
        """The policy version that this refit leads to."""
        self._work = work
        self._progress = progress
        self._report: RefitReport | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deltarefit-publish", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` returns, or raises, at once."""
        return self._done.is_set()

    @property
    def progress(self) -> Progress:
        """How far this rank is in comparing and sending."""
        return self._progress()

    def wait(self, timeout_s: float | None = None) -> RefitReport:
        """Return once the version is committed everywhere and serving goes on; the next optimizer step may follow.

        May be called again, and from several threads: each gets the same report or error.

        Raises:
            DeadlineError: it is still under way after ``timeout_s``; parameters must still not change.
            RejectedError: nothing was changed; the text says what to correct.
            CommitConflictError: another coordinator took the run over; stop.
            OperatorRequiredError: retries cannot repair it; the text names the command to run.
        """
        if not self._done.wait(timeout_s):
            raise DeadlineError(
                f"publishing policy version {self.target_version} takes more than {timeout_s} s; it goes on, so wait again: "
                "parameters must still not change"
            )
        if self._error is not None:
            raise self._error
        if self._report is None:
            raise DeadlineError(f"publishing policy version {self.target_version} ended without a report")
        return self._report

    def _run(self) -> None:
        try:
            self._report = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()
