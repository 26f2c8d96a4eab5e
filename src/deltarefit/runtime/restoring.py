"""An operator has a receiver restore itself to the committed version, because what its engine holds is not trusted any more."""

from __future__ import annotations

import msgspec

from deltarefit.errors import DeadlineError, RejectedError
from deltarefit.ids import receiver_id
from deltarefit.run_key import check_key, key_print, key_trouble
from deltarefit.runtime import messages
from deltarefit.runtime.clock import Clock, Deadline, IdSource
from deltarefit.runtime.messages import Call, Membership, decode_message, encode_message
from deltarefit.runtime.session import control_plane, mail_settings
from deltarefit.runtime.status import existing_state
from deltarefit.transport import Mailbox, RunStore, keys, open_run, read_beacon, read_beacons

__all__ = ["Restoration", "restore_receiver"]

_LOOK_S = 0.2


class Restoration(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the order."""

    run: str
    receiver: str
    committed_version: int
    is_restored: bool
    """It serves the committed version, which it proved by digest. If not: its gate stays shut until the next refit, which sends
    it whatever it lacks."""
    policy_version: int | None
    """That it holds, as far as it knows."""
    activity: str


def restore_receiver(
    run: str, name: str, *, clock: Clock, ids: IdSource, wait_s: float, key: bytes | None = None
) -> Restoration:
    """Order it, and wait up to ``wait_s`` until the receiver has taken its place in the run again.

    It shuts its gate, forgets what it believed, looks at every bit, catches up over retained payloads if it can, and joins.

    Raises:
        RejectedError: there is no such run, no receiver of that name shows itself, or it has another run key.
        DeadlineError: it did not join again in time.
    """
    check_key(key)
    store = open_run(run, clock=clock, may_be_new=False)
    control = control_plane(store, clock, ids)
    state = existing_state(run, control)
    before = _shown(store, name)
    if before is None:
        others = ", ".join(reading.name for reading in read_beacons(store)[:8]) or "none"
        raise RejectedError(
            f"no receiver {name} shows itself under {run} (there are: {others}); see 'deltarefit status --run {run}', or start "
            f"it: 'deltarefit receiver --run {run} --engine URL --name {name}' restores it by itself"
        )
    if trouble := key_trouble(key_print(key), before.key_print, f"receiver {name}"):
        raise RejectedError(trouble)
    nonce = ids.nonce()
    mailbox = Mailbox(store, f"operator-{nonce}", clock=clock, nonce=nonce, key=key, settings=mail_settings(store))
    call = Call(f"restore-{nonce}", state.epoch, before.incarnation, messages.Restore())
    mailbox.post(receiver_id(name), encode_message(call))
    deadline = Deadline(clock, wait_s)
    while (now := _shown(store, name)) is None or now.incarnation == before.incarnation or not now.summary_digest:
        if now is not None and now.refusal:
            raise RejectedError(f"receiver {name} refuses to take part: {now.refusal}")
        if deadline.expired:
            raise DeadlineError(
                f"receiver {name} did not restore itself within {wait_s:.0f} s"
                + (f"; it is at: {now.activity}" if now is not None and now.activity else "")
                + f". If 'deltarefit status --run {run}' shows no sign of life, restart its process: that restores it, too"
            )
        clock.sleep(min(_LOOK_S, deadline.remaining_s()))
    state = existing_state(run, control)
    return Restoration(
        run=run,
        receiver=name,
        committed_version=state.record.policy_version,
        is_restored=now.is_serving,
        policy_version=now.policy_version,
        activity=now.activity,
    )


def _shown(store: RunStore, name: str) -> Membership | None:
    reading = read_beacon(store, keys.member(name))
    return None if reading is None else decode_message(reading.info, Membership, sender=f"beacon of receiver {name}")
