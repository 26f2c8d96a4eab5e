"""One rank's end of the exchange: it does what the driver in charge asks, and answers by file. Free of any engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltarefit.errors import RejectedError
from deltarefit.integrations.exchange.directory import Exchange
from deltarefit.integrations.exchange.operations import RankOperations
from deltarefit.run_key import read_key
from deltarefit.runtime.messages import Failure

__all__ = ["RankEndpoint"]

_log = logging.getLogger(__name__)


class RankEndpoint:
    """Answers one driver at a time.

    Failures do not leave as exceptions, for an engine would end the update session and show the driver a text at best: they
    travel in the reply, with their kind, and the driver raises them again.
    """

    def __init__(self, rank: int, world_size: int, make_operations: Callable[[bytes | None], RankOperations]) -> None:
        """``make_operations`` is called with the run's key for each driver that arrives; it may raise RejectedError."""
        self._rank = rank
        self._world_size = world_size
        self._make_operations = make_operations
        self._exchange: Exchange | None = None
        self._operations: RankOperations | None = None

    def meet(self, directory: str, session: str, key_file: str) -> None:
        """Answer to this driver from now on, and to no other: a restarted one takes over.

        Raises:
            RejectedError: the directory is no exchange directory on this node.
        """
        self._operations = None
        self._exchange = Exchange(Path(directory), session)
        self._answer(self._exchange, 0, lambda: self._set_up(key_file))

    def _set_up(self, key_file: str) -> None:
        self._operations = self._make_operations(read_key(Path(key_file)) if key_file else None)

    def receive(self, session: str, number: int, operation: str) -> None:
        """Carry out one operation whose input lies in the exchange directory.

        Raises:
            RejectedError: the operation is not from the driver that this rank answers to.
        """
        exchange = self._exchange
        if exchange is None or exchange.session != session:
            answers_to = exchange.session if exchange is not None else "nobody yet"
            raise RejectedError(
                f"operation {operation} of driver {session}: this engine answers to {answers_to}; "
                "another driver may have taken it over"
            )
        self._answer(exchange, number, lambda: self._run(exchange, number, operation))

    def _run(self, exchange: Exchange, number: int, operation: str) -> Any:
        if self._operations is None:
            raise RejectedError(f"operation {operation}: setting this engine up for refits was refused; see that error")
        return self._operations.run(operation, exchange.get(number))

    def _answer(self, exchange: Exchange, number: int, action: Callable[[], Any]) -> None:
        result, failure = None, None
        try:
            result = action()
        except Exception as error:
            _log.debug("rank %d: operation %d failed", self._rank, number, exc_info=True)
            failure = Failure.of(error)
        exchange.reply(number, self._rank, self._world_size, result, failure)

    def forget(self) -> None:
        """Answer to nobody."""
        self._exchange = None
        self._operations = None
