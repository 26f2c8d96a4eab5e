"""One attempt's payloads at a receiver, from their arrival to the engine: the shell around ``protocol.Reception``.

Reception decides what is taken and in which order; this carries it out, so that fetching, decoding and applying overlap while
what is held stays bounded (paper 7.2, App. C): bytes fetched ahead of application, payloads decoded ahead of it, staged bytes
in memory and on disk. Used by the receiver's one thread; bytes are fetched and decoded on others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from deltarefit import payload
from deltarefit.errors import AttemptFailedError, PayloadInvalidError
from deltarefit.ids import AttemptId, PayloadId
from deltarefit.protocol import Arrival, Phase, Reception, Verdict
from deltarefit.receiver import ReadyPayload
from deltarefit.runtime.clock import Clock, Deadline, Pace
from deltarefit.runtime.engine import DecodingEngine, EngineDriver
from deltarefit.runtime.events import EventLog
from deltarefit.runtime.feeds import Brought, Feed
from deltarefit.runtime.intake import Intake
from deltarefit.runtime.staging import Decoded, Staging

__all__ = ["AttemptDelivery", "DeliveryLimits"]


@dataclass(frozen=True, slots=True)
class DeliveryLimits:
    """How much is held, and how many threads work on it."""

    ahead_nbytes: int = 1 << 30
    """Fetched and neither applied nor staged, beside the payload that is wanted next."""
    fetch_threads: int = 2
    decode_threads: int = 2
    decode_ahead: int = 8
    """Payloads decoded or being decoded and not applied: one of the paper's groups (App. C)."""
    decoded_nbytes: int = 1 << 30
    """Asynchronous delivery: most bytes that decoded payloads hold while the engine serves, beside one payload per thread."""
    spill_directory: str = ""


class AttemptDelivery:
    """From ``prepare`` to ``close``."""

    def __init__(
        self,
        attempt: AttemptId,
        reception: Reception,
        engine: EngineDriver,
        feed: Feed,
        *,
        limits: DeliveryLimits,
        log: EventLog,
        clock: Clock,
        pace: Pace,
        may_act: Callable[[], bool],
        news: threading.Event,
    ) -> None:
        """Begin; ``news`` is set whenever there is something for ``pump`` to do."""
        self.written_elements = 0
        self.applied: list[int] = []
        """Length of each payload that was applied."""
        self.attempt = attempt
        self._reception = reception
        self._engine = engine
        self._decoder = engine if isinstance(engine, DecodingEngine) else None
        self._limits = limits
        self._log = log
        self._clock = clock
        self._may_act = may_act
        self._staging = Staging(self._decode, num_threads=limits.decode_threads, directory=limits.spill_directory, news=news)
        self._waiting: list[Brought] = []
        """Without a place so far."""
        self._queued: list[PayloadId] = []
        """Accepted in synchronous delivery and not being decoded yet."""
        self._held: dict[PayloadId, int] = {}
        """Bytes of each payload that the intake still counts."""
        self.patience_s = feed.patience_s
        """See ``Feed``."""
        self._intake = Intake(
            feed,
            clock=clock,
            pace=pace,
            news=news,
            max_held_nbytes=limits.ahead_nbytes,
            num_threads=limits.fetch_threads,
        )

    def pump(self, budget_s: float) -> bool:
        """Take in what arrived, and apply what is next, for about so long; whether there was anything.

        Raises:
            RefitError: the attempt failed here.
        """
        deadline = Deadline(self._clock, budget_s)
        progressed = self._take_in()
        self._decode_ahead()
        while self._apply_next():
            progressed = True
            self._decode_ahead()
            if deadline.expired:
                break
        return progressed

    def unseen(self, expected: dict[int, int]) -> tuple[list[PayloadId], float]:
        """Of so many payloads per owner, those that no look has shown, and for how many seconds nothing new was seen."""
        return self._intake.unseen(self.attempt, expected)

    @property
    def is_checked(self) -> bool:
        """Whether what may be decoded by now is, and so proved to be whole. Raises what decoding raised."""
        return self._decoder is None or self._staging.is_all_decoded

    def close(self, *, wait_s: float = 0.0) -> None:
        """Take in nothing more and drop what is held. May be called again."""
        self._intake.close(wait_s=wait_s)
        self._staging.close()
        self._waiting.clear()

    # --- arrivals ---------------------------------------------------------------------------------------------------

    def _take_in(self) -> bool:
        brought, ended = self._intake.arrived()
        for marker in ended:
            self._reception.end(marker)
        for one in brought:
            self._held[one.name] = len(one.data)
        waiting, self._waiting = [*self._waiting, *brought], []
        for one in waiting:
            self._place(one)
        self._intake.want(self._reception.next_payload())
        return bool(brought or ended)

    def _place(self, one: Brought) -> None:
        """Put an arrived payload where reception says."""
        match self._reception.arrive(_arrival(one)):
            case Verdict.QUEUE:
                self._staging.keep(one.name, one.data)
                self._queued = sorted([*self._queued, one.name])
            case Verdict.STAGE:
                self._staging.keep(one.name, one.data)
                self._release(one.name)
            case Verdict.SPILL:
                self._staging.spill(one.name, one.data)
                self._release(one.name)
            case Verdict.WAIT:
                self._waiting.append(one)
            case Verdict.IGNORE_DUPLICATE | Verdict.DROP_LATE:
                self._release(one.name)

    def _release(self, name: PayloadId) -> None:
        self._intake.release(self._held.pop(name, 0))

    # --- decoding ---------------------------------------------------------------------------------------------------

    def _decode_ahead(self) -> None:
        """Keep the decoders busy, so far ahead as is allowed. What is wanted next is always let in.

        In asynchronous delivery they work while the engine serves, as far as memory is given for it: what is decoded before the
        gate closes is not decoded after it, and a payload that is damaged fails the attempt while nothing has been stopped.
        """
        wanted = self._reception.next_payload()
        while self._queued and (self._staging.num_decoding < self._limits.decode_ahead or self._queued[0] == wanted):
            self._staging.begin_decoding(self._queued.pop(0))
        while self._may_decode_staged():
            name = self._reception.next_to_decode()
            if name is None:
                return
            self._staging.begin_decoding(name)

    def _may_decode_staged(self) -> bool:
        if self._reception.phase is Phase.APPLYING:
            return self._staging.num_decoding < self._limits.decode_ahead
        if self._decoder is None or self._staging.num_undecoded >= self._limits.decode_threads:
            return False
        return self._staging.decoded_nbytes < self._limits.decoded_nbytes

    def _decode(self, name: PayloadId, data: bytes) -> Decoded:
        if self._decoder is None:
            return Decoded(data, len(data))
        with self._log.stage("decode", name.attempt, nbytes=len(data), payload=str(name)):
            found = self._decoder.decode(data)
        return Decoded(found, found.held_nbytes)

    # --- application ------------------------------------------------------------------------------------------------

    def _apply_next(self) -> bool:
        if self._reception.phase is not Phase.APPLYING:
            return False
        name = self._reception.next_payload()
        self._intake.want(name)
        if name is None or not self._staging.is_decoded(name):
            return False
        if not self._may_act():
            raise AttemptFailedError(f"its lease ran out during {name.attempt}; it writes nothing more of it")
        decoded, nbytes = self._staging.take(name)
        if self._reception.take() != name:
            raise AttemptFailedError(f"{name}: decoded, but the reception does not name it as next")
        try:
            with self._log.stage("apply", name.attempt, nbytes=nbytes, payload=str(name)):
                self.written_elements += self._write(decoded)
        except Exception as error:
            self._reception.write_failed(name, str(error))
            raise
        self._reception.applied(name)
        self.applied.append(nbytes)
        self._release(name)
        return True

    def _write(self, decoded: object) -> int:
        if isinstance(decoded, bytes):
            return self._engine.apply(decoded)
        if self._decoder is not None and isinstance(decoded, ReadyPayload):
            return self._decoder.apply(decoded)
        raise AttemptFailedError(f"{self.attempt}: a {type(decoded).__name__} cannot be applied")


def _arrival(one: Brought) -> Arrival:
    """What a payload says of itself: a key in a store is no proof.

    Raises:
        PayloadInvalidError: it is another payload than its key says.
    """
    header = payload.read_header(one.data)
    found = PayloadId(header.attempt, header.sequence, header.owner)
    if found != one.name:
        raise PayloadInvalidError(f"{one.name}: its header says {found}; it was not applied")
    return Arrival(
        payload=one.name,
        base_version=header.base_version,
        target_version=header.target_version,
        plan_digest=header.plan_digest,
        nbytes=len(one.data),
        digest=one.digest,
    )
