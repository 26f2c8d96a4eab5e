"""Shows a sign of life at regular intervals, from a thread of its own, and knows when it could not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from deltarefit.errors import RefitError
from deltarefit.protocol import LeaseSettings, SelfFence
from deltarefit.runtime.clock import Clock
from deltarefit.transport import Beacon

__all__ = ["Heartbeat"]

_LOG = logging.getLogger(__name__)


class Heartbeat:
    """Beats a beacon until closed. ``may_act`` is False once the lease may have run out in other eyes.

    A lease that ran out is not renewed by itself: the beacon stands still until ``restore``, so that nobody takes a holder for
    alive that others may have given up.
    """

    def __init__(self, beacon: Beacon, lease: LeaseSettings, clock: Clock, info: Callable[[], bytes]) -> None:
        """``info`` gives what to show; it is called from the thread too, at each beat."""
        self.lease = lease
        self._beacon = beacon
        self._clock = clock
        self._info = info
        self._lock = threading.Lock()
        self._stop = threading.Event()
        sent_s = clock.monotonic_s()
        beacon.beat(info())
        self._fence = SelfFence(lease, now_s=sent_s)
        self._thread = threading.Thread(target=self._run, name="deltarefit-heartbeat", daemon=True)
        self._thread.start()

    @property
    def is_replaced(self) -> bool:
        """Whether a later start beats under the beacon's key, so that this one does no more."""
        return self._beacon.is_replaced

    @property
    def may_act(self) -> bool:
        """Ask before every write and every reopening of the request gate."""
        if self.is_replaced:
            return False
        with self._lock:
            return self._fence.may_act(self._clock.monotonic_s())

    def show(self) -> None:
        """What is shown has changed: beat at once. Nothing happens if the lease ran out."""
        self._beat()

    def restore(self) -> None:
        """The holder starts anew after its lease ran out."""
        sent_s = self._clock.monotonic_s()
        self._beacon.beat(self._info())
        with self._lock:
            self._fence.restore(sent_s=sent_s)

    def close(self, *, say_goodbye: bool = True) -> None:
        """Beat no more; with a goodbye others see at once that the holder left on purpose, unless the store is out of reach."""
        self._stop.set()
        self._thread.join(self.lease.lease_s)
        if not say_goodbye:
            return
        try:
            self._beacon.remove()
        except RefitError as error:
            _LOG.warning("left without a goodbye, so others see it when the lease runs out: %s", error)

    def _beat(self) -> None:
        if not self.may_act:
            return
        sent_s = self._clock.monotonic_s()
        self._beacon.beat(self._info())
        with self._lock:
            self._fence.renewed(sent_s=sent_s, now_s=self._clock.monotonic_s())

    def _run(self) -> None:
        while not self._stop.wait(self.lease.renew_s):
            try:
                self._beat()
            except RefitError as error:
                _LOG.warning("sign of life not written, will try again: %s", error)
            except Exception:
                _LOG.exception("sign of life not written, will try again")
