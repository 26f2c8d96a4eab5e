"""What a receiver shows of itself: who it is, what it holds, and that it lives."""

from __future__ import annotations

import msgspec

from deltarefit.ids import ReceiverId
from deltarefit.protocol import LeaseSettings
from deltarefit.runtime.clock import Clock, IdSource
from deltarefit.runtime.heartbeat import Heartbeat
from deltarefit.runtime.messages import Membership, encode_message
from deltarefit.transport import Beacon, RunStore, keys, read_beacon

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
        self._store = store
        self._key = keys.member(name)
        before = read_beacon(store, self._key)
        self._known = {nonce} if before is None else {nonce, before.nonce}
        """Of this start, and of the one that had the name before it."""
        self._is_replaced = False
        self._shown = self._seen = Membership(nonce, engine, "", "", None, key_print=key_print)
        self._heartbeat = Heartbeat(Beacon(store, self._key, nonce=nonce), lease, clock, lambda: encode_message(self._shown))

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

    def look_for_another(self) -> bool:
        """Whether a later start of a receiver shows itself under this name. If so, show nothing any more: the name is its."""
        if not self._is_replaced:
            reading = read_beacon(self._store, self._key)
            self._is_replaced = reading is not None and reading.nonce not in self._known
            if self._is_replaced:
                self._heartbeat.close(say_goodbye=False)
        return self._is_replaced

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
        if not self._is_replaced:
            self._heartbeat.close()
