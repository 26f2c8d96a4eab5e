"""What the source side asks of the training job's own process group, and nothing more (design section 3).

No collective ever spans the trainer and the rollout side; this one joins the training ranks at set-up, for the audits and for
residual conversion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from deltarefit.errors import RejectedError

__all__ = ["Collective", "LocalCollective", "together"]

ResultT = TypeVar("ResultT")


class Collective(Protocol):
    """Exchange of bytes between training ranks.

    Every rank must make the same calls in the same order, from one thread. A call returns when all ranks made it, or raises
    TransportError when the group is broken.
    """

    @property
    def rank(self) -> int:
        """This process, 0-based."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks, at least 1."""
        ...

    def all_gather(self, data: bytes) -> list[bytes]:
        """The data of every rank, by rank. Lengths may differ and may be 0."""
        ...

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        """The root's data, on every rank. Other ranks pass None."""
        ...

    def barrier(self) -> None:
        """Return when every rank called it."""
        ...


class LocalCollective:
    """A training job of one rank."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        if root != 0 or data is None:
            raise RejectedError(f"broadcast from rank {root} of a world of 1: expected rank 0 with data")
        return data

    def barrier(self) -> None:
        return None


class _Outcome(msgspec.Struct, frozen=True):
    error: str | None


def together(collective: Collective, what: str, action: Callable[[], ResultT]) -> ResultT:
    """Do something on every rank that may fail on some, and fail on all of them if it did.

    Without this a rank that raises leaves the others waiting in their next collective call.

    Raises:
        RejectedError: the action failed on at least one rank; the text names the ranks and their errors.
    """
    failure: Exception | None = None
    result: ResultT | None = None
    try:
        result = action()
    except Exception as error:  # re-raised below, after the other ranks know
        failure = error
    mine = _Outcome(None if failure is None else f"{type(failure).__name__}: {failure}")
    outcomes = [msgspec.msgpack.decode(data, type=_Outcome) for data in collective.all_gather(msgspec.msgpack.encode(mine))]
    if failure is not None:
        raise failure
    failed = [(rank, outcome.error) for rank, outcome in enumerate(outcomes) if outcome.error is not None]
    if failed:
        shown = "; ".join(f"rank {rank}: {error}" for rank, error in failed[:3])
        raise RejectedError(f"{what} failed on {len(failed)} of {collective.world_size} training ranks: {shown}")
    return result  # type: ignore[return-value]  # set whenever nothing failed
