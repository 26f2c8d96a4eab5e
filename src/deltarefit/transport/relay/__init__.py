"""The relay tree: one crossing of the cluster boundary per payload, then over local links (paper 7.1).

Plain TCP or TLS streams with a small framing of our own. Owners send to one root each; every relay forwards frames as they
arrive, keeps payloads for the engines of its node, and says when they are whole at all relays below. May import what
``deltarefit.transport`` may.
"""

from deltarefit.transport.relay.channel import RelayContext, RelaySettings
from deltarefit.transport.relay.client import RelaySender
from deltarefit.transport.relay.frame import Peer
from deltarefit.transport.relay.link import StreamKey
from deltarefit.transport.relay.node import RelayNode
from deltarefit.transport.relay.source import RelaySource
from deltarefit.transport.relay.tls import caller_tls, listener_tls

__all__ = [
    "Peer",
    "RelayContext",
    "RelayNode",
    "RelaySender",
    "RelaySettings",
    "RelaySource",
    "StreamKey",
    "caller_tls",
    "listener_tls",
]
