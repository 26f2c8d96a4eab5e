"""What a receiver shows of itself: who it is, what it holds, and that it lives."""

from __future__ import annotations

import msgspec

from deltarefit.ids import ReceiverId
from deltarefit.protocol import LeaseSettings
from deltarefit.runtime.clock import Clock, IdSource
from deltarefit.runtime.heartbeat import Heartbeat
from deltarefit.runtime.messages import Membership, encode_message
from deltarefit.transport import Beacon, RunStore, keys

__all__ = ["Presence"]

_MAX_REFUSAL = 4000  # a beacon is a small object; the receiver's own log has the whole text


class Presence:
    """A receiver's beacon and the lease behind it. ``show`` may be called from any thread."""

    def __init__(
        self,
        store: RunStore,
        name: ReceiverId,
        engine: str,
        *,
        nonce: str,
        lease: LeaseSettings,
        clock: Clock,
        ids: IdSource,
        key_print: str = "",
    ) -> None:
        """Give the first sign of life."""
        self._ids = ids
        self._shown = self._seen = Membership(nonce, engine, "", "", None, key_print=key_print)
        beacon = Beacon(store, keys.member(name), nonce=nonce, yields=True)
        self._heartbeat = Heartbeat(beacon, lease, clock, lambda: encode_message(self._shown))

    @property
    def shown(self) -> Membership:
        """What the next beat shows."""
        return self._shown

    @property
    def seen(self) -> Membership:
        """What others can see since the last ``show``."""
        return self._seen

    @property
    def lease(self) -> LeaseSettings:
        return self._heartbeat.lease

    @property
    def may_act(self) -> bool:
        """Whether the lease holds. Ask before every write and every reopening of the request gate."""
        return self._heartbeat.may_act

    @property
    def is_replaced(self) -> bool:
        """Whether a later start of a receiver shows itself under this name. Then this one shows nothing any more."""
        return self._heartbeat.is_replaced

    def note(self, **changes: object) -> None:
        """Change what the next beat shows."""
        self._shown = msgspec.structs.replace(self._shown, **changes)

    def show(self, **changes: object) -> None:
        """Change what is shown, and show it at once."""
        if isinstance(refusal := changes.get("refusal"), str):
            changes["refusal"] = refusal[:_MAX_REFUSAL]
        self.note(**changes)
        self._heartbeat.show()
        self._seen = self._shown

    def register_anew(self) -> None:
        """After the lease ran out: show a new incarnation, so that others take this receiver for a new one."""
        self.note(incarnation=self._ids.nonce())
        self._heartbeat.restore()

    def close(self) -> None:
        self._heartbeat.close()
