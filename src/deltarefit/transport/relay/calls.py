"""Stop and cleanup, carried round a tree: each relay passes the call on, and answers for all below it."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import msgspec

from deltarefit.errors import RejectedError, TransportError
from deltarefit.transport.relay.channel import Channel, RelayContext, connect
from deltarefit.transport.relay.frame import Alive, Call, Peer, Reply
from deltarefit.transport.relay.tree import split

__all__ = ["call_tree"]

_LOG = logging.getLogger(__name__)
_SHARE = 0.8
"""Of the time left, what a relay gives those below, so that its own answer still comes in time."""


def call_tree(context: RelayContext, call: Call) -> tuple[int, tuple[str, ...]]:
    """Make the call at every peer of ``call.peers``; returns how many did it, and the names of those not reached.

    A relay that cannot be reached is passed over, and those below it are called directly.
    """
    parts = split(call.peers, call.fan_out)
    if not parts:
        return 0, ()
    with ThreadPoolExecutor(len(parts), thread_name_prefix="relay-call") as pool:
        outcomes = list(pool.map(lambda part: _call_part(context, call, part), parts))
    lost = tuple(name for _, names in outcomes for name in names)
    return sum(reached for reached, _ in outcomes), lost


def _call_part(context: RelayContext, call: Call, part: tuple[Peer, ...]) -> tuple[int, tuple[str, ...]]:
    end_s = context.clock.monotonic_s() + call.timeout_s
    lost: tuple[str, ...] = ()
    while part:
        left_s = end_s - context.clock.monotonic_s()
        if left_s <= 0:
            return 0, (*lost, *(peer.name for peer in part))
        try:
            reply = _ask(context, part[0], msgspec.structs.replace(call, peers=part[1:], timeout_s=left_s * _SHARE), end_s)
        except (OSError, TransportError, RejectedError) as error:
            _LOG.warning("%s of attempt %s: %s was passed over: %s", call.verb, call.attempt, part[0], error)
            lost, part = (*lost, part[0].name), part[1:]
        else:
            return reply.reached, (*lost, *reply.lost)
    return 0, lost


def _ask(context: RelayContext, peer: Peer, call: Call, end_s: float) -> Reply:
    channel = connect(peer, context)
    try:
        channel.send(call)
        return _reply(channel, context, peer, end_s)
    finally:
        channel.abort()
        channel.close()


def _reply(channel: Channel, context: RelayContext, peer: Peer, end_s: float) -> Reply:
    while context.clock.monotonic_s() < end_s:
        message = channel.receive_message()
        if isinstance(message, Reply):
            return message
        if not isinstance(message, Alive):
            raise TransportError(f"{peer} answered a call with {type(message).__name__}")
    raise TransportError(f"{peer} did not answer in time")
