"""Brings the payloads of one attempt here, ahead of their application and from threads of its own, within a bound of bytes.

Later payloads may arrive before the next one to apply, so the bound makes one exception: the payload that is wanted next is
always fetched. Without it, later ones could fill all the room and nothing would ever move.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping

from deltarefit.errors import AttemptFailedError, RefitError, TransportError
from deltarefit.ids import AttemptId, OwnerId, PayloadId
from deltarefit.protocol import EndMarker
from deltarefit.runtime.clock import Clock, Deadline, Pace
from deltarefit.runtime.feeds import Brought, Feed, Offer

__all__ = ["Intake"]

_PATIENCE_S = 20.0
"""How long a feed may be out of sight before the attempt fails here. Its own calls are repeated too."""


class Intake:
    """Of one attempt. Its methods are called by one thread."""

    def __init__(
        self, feed: Feed, *, clock: Clock, pace: Pace, news: threading.Event, max_held_nbytes: int, num_threads: int
    ) -> None:
        """Begin.

        Args:
            feed: where payloads come from.
            clock: time.
            pace: how often to look for new ones.
            news: set whenever there is something for ``arrived`` to return or raise.
            max_held_nbytes: most bytes fetched and not released, beside the payload that is wanted next.
            num_threads: payloads on their way at the same time.
        """
        self._feed = feed
        self._clock = clock
        self._pace = pace
        self._news = news
        self._max_held_nbytes = max_held_nbytes
        self._changed = threading.Condition()
        self._offers: list[Offer] = []
        """Not begun yet, in the declared order."""
        self._arrived: deque[Brought] = deque()
        self._ended: deque[EndMarker] = deque()
        self._seen: set[PayloadId] = set()
        self._seen_s = clock.monotonic_s()
        self._held_nbytes = 0
        self._wanted: PayloadId | None = None
        self._failure: RefitError | None = None
        self._is_closed = False
        looker = threading.Thread(target=self._guarded, args=(self._look_on,), name="deltarefit-look", daemon=True)
        fetchers = [
            threading.Thread(target=self._guarded, args=(self._fetch_on,), name=f"deltarefit-fetch-{n}", daemon=True)
            for n in range(num_threads)
        ]
        self._threads = [looker, *fetchers]
        for thread in self._threads:
            thread.start()

    @property
    def held_nbytes(self) -> int:
        """Fetched, or being fetched, and not released."""
        with self._changed:
            return self._held_nbytes

    def arrived(self) -> tuple[list[Brought], list[EndMarker]]:
        """What came since the last call. Raises what made it impossible to go on, once nothing is left before that."""
        with self._changed:
            brought, ended = list(self._arrived), list(self._ended)
            self._arrived.clear()
            self._ended.clear()
            if self._failure is not None and not brought and not ended:
                raise self._failure
        return brought, ended

    def want(self, name: PayloadId | None) -> None:
        """The next payload to apply."""
        with self._changed:
            if name != self._wanted:
                self._wanted = name
                self._changed.notify_all()

    def release(self, nbytes: int) -> None:
        """So many bytes that arrived are not held any more, or are counted elsewhere."""
        with self._changed:
            self._held_nbytes -= nbytes
            self._changed.notify_all()

    def unseen(self, attempt: AttemptId, expected: Mapping[int, int]) -> tuple[list[PayloadId], float]:
        """Of so many payloads per owner, those that no look has shown, and for how many seconds nothing new was seen."""
        names = (PayloadId(attempt, n, OwnerId(owner)) for owner, count in expected.items() for n in range(count))
        with self._changed:
            absent = [name for name in names if name not in self._seen]
            return absent, self._clock.monotonic_s() - self._seen_s

    def close(self, *, wait_s: float = 0.0) -> None:
        """Fetch nothing more, and wait so long for fetches under way. Those that take longer end by themselves, and what they
        bring is dropped: a fetch writes nothing."""
        with self._changed:
            self._is_closed = True
            self._arrived.clear()
            self._changed.notify_all()
        deadline = Deadline(self._clock, wait_s)
        for thread in self._threads:
            thread.join(deadline.remaining_s())

    # --- threads ----------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except RefitError as error:
            self._fail(error)
        except Exception as error:
            self._fail(AttemptFailedError(f"payloads cannot be brought here: {type(error).__name__}: {error}"))

    def _fail(self, error: RefitError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        self._news.set()

    def _look_on(self) -> None:
        patience = Deadline(self._clock, _PATIENCE_S)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._pace.is_due, self._pace.remaining_s)
                if self._is_over:
                    return
                wanted = self._wanted
            try:
                look = self._feed.look(wanted)
            except TransportError:
                if patience.expired:
                    raise
                continue
            patience = Deadline(self._clock, _PATIENCE_S)
            if look.is_moving:
                with self._changed:
                    self._seen_s = self._clock.monotonic_s()
            if look.offers or look.ended:
                self._pace.reset()
                with self._changed:
                    self._offers = sorted([*self._offers, *look.offers])
                    self._seen.update(offer.name for offer in look.offers)
                    self._seen_s = self._clock.monotonic_s()
                    self._ended.extend(look.ended)
                    self._changed.notify_all()
                self._news.set()

    def _fetch_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._admissible() is not None)
                offer = self._admissible()
                if self._is_over or offer is None:
                    return
                self._offers.remove(offer)
                self._held_nbytes += offer.nbytes
            brought = self._feed.bring(offer)
            with self._changed:
                if not self._is_over:
                    self._arrived.append(brought)
            self._news.set()

    # With the condition held.

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._failure is not None

    def _admissible(self) -> Offer | None:
        """The first payload in the declared order, if there is room for it. The wanted one needs none."""
        if not self._offers:
            return None
        offer = self._offers[0]
        fits = not self._held_nbytes or self._held_nbytes + offer.nbytes <= self._max_held_nbytes
        return offer if fits or offer.name == self._wanted else None
