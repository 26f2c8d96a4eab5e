"""Which attempts an endpoint was bound to, so that late and repeated prepares of any coordinator are told apart."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from deltarefit.errors import AttemptFailedError, CommitConflictError
from deltarefit.ids import AttemptId

__all__ = ["BindingLog"]

_NUM_REMEMBERED = 64
"""Obsolete attempts that are remembered; a transition has a handful."""


class _Binding(Protocol):
    @property
    def attempt(self) -> AttemptId: ...

    @property
    def revision(self) -> int: ...


BindingT = TypeVar("BindingT", bound=_Binding)


class BindingLog(Generic[BindingT]):
    """Grows forward only: the revision of the control record that binds an attempt tells what is later."""

    def __init__(self, who: str) -> None:
        """``who`` names the endpoint in error texts."""
        self._who = who
        self._last: BindingT | None = None
        self._over: deque[AttemptId] = deque(maxlen=_NUM_REMEMBERED)

    @property
    def last(self) -> BindingT | None:
        """The latest attempt that was ever bound here."""
        return self._last

    def is_repeated(self, request: BindingT) -> bool:
        """Whether this very request was the last one. False: it is new, and later than all before.

        Raises:
            CommitConflictError: a later attempt was bound here before.
            AttemptFailedError: its attempt was marked obsolete here, perhaps before its prepare came.
        """
        last = self._last
        if last is not None and request.revision <= last.revision and request != last:
            raise CommitConflictError(
                f"{self._who}: {request.attempt} was bound by record revision {request.revision}, but {last.attempt} (revision "
                f"{last.revision}) came after it; another attempt or coordinator took over"
            )
        if request.attempt in self._over:
            raise AttemptFailedError(f"{self._who}: {request.attempt} is over here; prepare a fresh attempt")
        return request == last

    def bind(self, request: BindingT) -> None:
        """``request`` is the latest from now on."""
        self._last = request

    def mark_obsolete(self, attempt: AttemptId) -> None:
        """``attempt`` is over here, whether or not it was ever bound."""
        if attempt not in self._over:
            self._over.append(attempt)
