"""What the source side asks of the training job's own process group, and nothing more.

No collective ever spans the trainer and the rollout side; this one joins the training ranks at set-up, for the audits and for
residual conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from deltarefit import errors
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

    def all_to_all(self, data: Sequence[bytes]) -> list[bytes]:
        """A message to every rank, this one included; returns what every rank sent here, by rank."""
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

    def all_to_all(self, data: Sequence[bytes]) -> list[bytes]:
        return list(data)

    def barrier(self) -> None:
        return None


class _Outcome(msgspec.Struct, frozen=True):
    kind: str = ""
    """Class of the error; empty if there was none."""
    text: str = ""


def together(collective: Collective, what: str, action: Callable[[], ResultT]) -> ResultT:
    """Do something on every rank that may fail on some, and fail on all of them if it did.

    Without this a rank that raises leaves the others waiting in their next collective call.

    Raises:
        RefitError: the action failed on at least one rank. The rank itself raises what it met; the others raise the kind that
            the first of them met (RejectedError if that is none of ours), with the ranks and their texts.
    """
    failure: Exception | None = None
    result: ResultT | None = None
    try:
        result = action()
    except Exception as error:  # re-raised below, after the other ranks know
        failure = error
    mine = _Outcome() if failure is None else _Outcome(type(failure).__name__, str(failure))
    outcomes = [msgspec.msgpack.decode(data, type=_Outcome) for data in collective.all_gather(msgspec.msgpack.encode(mine))]
    if failure is not None:
        raise failure
    failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.kind]
    if failed:
        shown = "; ".join(f"rank {rank}: {outcome.kind}: {outcome.text}" for rank, outcome in failed[:3])
        kind = getattr(errors, failed[0][1].kind, None) if failed[0][1].kind in errors.__all__ else None
        raise (kind or RejectedError)(f"{what} failed on {len(failed)} of {collective.world_size} training ranks: {shown}")
    return result  # type: ignore[return-value]  # set whenever nothing failed
