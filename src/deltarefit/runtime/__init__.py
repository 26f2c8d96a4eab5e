"""The shell: threads, clocks, retries and messages; joins the other rooms into a Publisher and a Receiver.

May import every room below it (source, receiver, payload, protocol, transport, control) but no integration: those are found
by name (``adapters``). The two public objects are ``publisher.Publisher`` and ``receiver_agent.Receiver``.
"""

from __future__ import annotations

__all__: list[str] = []
