"""All owners of a run: the coordinator's commands reach every training rank through the training job's own collective."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from deltarefit.errors import OperatorRequiredError, TransportError
from deltarefit.runtime.clock import Clock
from deltarefit.runtime.events import StageEvent
from deltarefit.runtime.owner_worker import (
    Command,
    End,
    OwnerReply,
    OwnerWorker,
)
from deltarefit.runtime.progress import Progress
from deltarefit.runtime.trace_clock import TimeAxis
from deltarefit.source import Collective

__all__ = ["OwnerGroup", "OwnersLostError"]


class OwnersLostError(OperatorRequiredError):
    """The training ranks cannot talk to each other any more: one of them died or hangs. The training job must be restarted."""


class OwnerGroup:
    """Rank 0 commands; the other ranks follow until the transition ends. Every rank must enter each refit together."""

    def __init__(self, worker: OwnerWorker, collective: Collective, *, clock: Clock, axis: TimeAxis) -> None:
        """``axis`` learns how the other ranks' clocks stand to this one's."""
        self.is_lost = False
        self._clock = clock
        self._axis = axis
        self._worker = worker
        self._collective = collective

    def progress(self) -> Progress:
        """How far this rank's owner is in the build under way, or was in the latest."""
        return self._worker.progress()

    def subscribe(self, listener: Callable[[StageEvent], None]) -> None:
        """Hear what this rank's owner does."""
        self._worker.subscribe(listener)

    def command(self, command: Command) -> list[OwnerReply]:
        """Have every rank do it, this one included; replies by rank. Rank 0 only.

        Raises:
            OwnersLostError: the training job's group is broken.
        """
        asked_s = self._clock.monotonic_s()
        try:
            self._collective.broadcast(msgspec.msgpack.encode(command))
            replies = self._gather(self._worker.execute(command))
        except TransportError as error:
            self.is_lost = True
            raise lost(error) from error
        answered_s = self._clock.monotonic_s()
        for reply in replies:
            if reply.clock is not None and reply.owner != self._worker.owner:
                self._axis.observe(f"owner {reply.owner}", asked_s=asked_s, reading=reply.clock, answered_s=answered_s)
        return replies

    def demand(self, command: Command) -> list[OwnerReply]:
        """``command``, but raise the first failure.

        Raises:
            AttemptFailedError: an owner failed; the text names its rank.
        """
        replies = self.command(command)
        for reply in replies:
            if reply.failure is not None:
                raise reply.failure.error(f"owner {reply.owner}")
        return replies

    def follow(self) -> End:
        """Do what rank 0 says until it says that the transition ended. All ranks but 0.

        Raises:
            OwnersLostError: the training job's group is broken.
        """
        try:
            while True:
                command = self._decode(self._collective.broadcast(None))
                self._gather(self._worker.execute(command))
                if isinstance(command, End):
                    return command
        except TransportError as error:
            self.is_lost = True
            raise lost(error) from error

    def end(self, end: End) -> None:
        """Let the other ranks go. Rank 0 only."""
        self.command(end)

    def _gather(self, reply: OwnerReply) -> list[OwnerReply]:
        replies = [self._reply(data) for data in self._collective.all_gather(msgspec.msgpack.encode(reply))]
        if len(replies) != self._collective.world_size:
            raise TransportError(f"{len(replies)} owners answered, expected {self._collective.world_size}")
        return replies

    @staticmethod
    def _decode(data: bytes) -> Command:
        try:
            return msgspec.msgpack.decode(data, type=Command)
        except msgspec.DecodeError as error:
            raise TransportError(f"command from rank 0: {error}") from error

    @staticmethod
    def _reply(data: bytes) -> OwnerReply:
        try:
            return msgspec.msgpack.decode(data, type=OwnerReply)
        except msgspec.DecodeError as error:
            raise TransportError(f"reply of an owner: {error}") from error


def lost(error: TransportError) -> OwnersLostError:
    return OwnersLostError(
        f"the training ranks lost each other during a refit ({error}); a rank has died or hangs. Restart the training job with "
        "the same run: it ends what was left open, and its next refit() sends every element if its weights are not the "
        "committed ones. Until then receivers keep serving the committed version, or keep their request gates closed"
    )
