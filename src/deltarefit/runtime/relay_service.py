"""A relay that stands by itself on a rollout node: listens, shows its beacon under the run, serves the node's engines."""

from __future__ import annotations

import logging
import platform
import threading
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from deltarefit.control import ControlSettings
from deltarefit.errors import RefitError, RejectedError
from deltarefit.ids import AttemptId
from deltarefit.run_key import check_key, key_print
from deltarefit.runtime.clock import Clock, IdSource, RandomIds, SystemClock
from deltarefit.runtime.messages import encode_message
from deltarefit.runtime.node_share import open_node_share
from deltarefit.runtime.relays import RelayNotice, relay_context
from deltarefit.runtime.session import control_plane, lease_settings
from deltarefit.runtime.settings import RelayServiceSettings
from deltarefit.transport import Beacon, keys, open_run
from deltarefit.transport.relay import Peer, RelayNode

__all__ = ["RelayService"]

_LOG = logging.getLogger(__name__)
_LOOPBACK = ("127.", "localhost", "::1")


class RelayService:
    """One per rollout node and run. A context manager."""

    def __init__(
        self,
        run: str,
        *,
        listen: str = "127.0.0.1:0",
        advertise: str | None = None,
        key: bytes | None = None,
        settings: RelayServiceSettings | None = None,
        clock: Clock | None = None,
        ids: IdSource | None = None,
    ) -> None:
        """Listen and show the beacon.

        Args:
            run: the run's URL, as the trainer names it.
            listen: ``host:port`` to listen on; port 0 lets the system choose.
            advertise: ``host`` or ``host:port`` by which trainer and relays reach it, if that is another one.
            key: the run's secret, if it has one: then strangers are turned away.
            settings: how.
            clock: time.
            ids: fresh names.

        Raises:
            RejectedError: the address, the key or the shared directory cannot be used, or another relay serves this node.
        """
        check_key(key)
        self.settings = settings or RelayServiceSettings()
        self._key_print = key_print(key)
        self._clock = clock or SystemClock()
        ids = ids or RandomIds()
        host, port = _address(listen, "listen")
        self._store = open_run(run, clock=self._clock)
        share = open_node_share(self.settings.shared_directory, self._store.url, ids, makes=True)
        if share is None:
            raise RejectedError(f"relay: the shared directory {self.settings.shared_directory!r} cannot be used; see the log")
        self.node = share.node
        self.name = f"relay-{share.node}"
        """One name per node and run, so that a relay that is started again goes on where it was."""
        self._stack = ExitStack()
        self._stack.callback(share.close)
        try:
            context = relay_context(self._store.url, self.name, key=key, tls=self.settings, clock=self._clock, ids=ids)
            if not key and context.server_tls is None and not host.startswith(_LOOPBACK):
                _LOG.warning("relay on %s: neither a key nor TLS, so whoever reaches this address can use it", listen)
            self._stack.callback(share.lock_relay().close)
            self._relay = RelayNode(context, share.relay, host=host, port=port, max_nbytes=self.settings.max_nbytes)
            self._stack.callback(self._relay.close)
            self.peer = self._advertised(self._relay.start(), advertise)
            self._beacon = Beacon(self._store, keys.relay(self.name), nonce=ids.nonce(), info=self._notice())
            # One try: the next look comes soon, and signs of life wait for this one.
            self._control = control_plane(self._store, self._clock, ids, ControlSettings(max_tries=1))
            self._beacon.beat()
        except BaseException:
            self._stack.close()
            raise
        self._seen: frozenset[AttemptId] = frozenset()
        """Attempts of which something lay here at the last look."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._show, name="deltarefit-relay-beacon", daemon=True)
        self._thread.start()

    @property
    def received_nbytes(self) -> int:
        """Payload bytes that came in."""
        return self._relay.received_nbytes

    @property
    def forwarded_nbytes(self) -> int:
        """Payload bytes written to relays below."""
        return self._relay.forwarded_nbytes

    def close(self) -> None:
        """Say goodbye and stop. Payloads stay on the shelf for a relay that is started again."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        try:
            self._beacon.remove()
        except RefitError as error:
            _LOG.info("the relay's beacon stays for now: %s", error)
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _advertised(self, peer: Peer, advertise: str | None) -> Peer:
        if advertise:
            host, port = _address(advertise if ":" in advertise else f"{advertise}:{peer.port}", "advertise")
            return Peer(peer.name, host, port or peer.port)
        if peer.host in ("0.0.0.0", "::", ""):
            return Peer(peer.name, platform.node(), peer.port)
        return peer

    def _notice(self) -> bytes:
        return encode_message(RelayNotice(self.peer.host, self.peer.port, self.node, self._key_print))

    def _show(self) -> None:
        every_s = lease_settings(self.settings.lease_s).renew_s
        while not self._closing.wait(every_s):
            try:
                self._beacon.beat()
            except RefitError as error:
                _LOG.warning("relay %s: sign of life not written, will try again: %s", self.name, error)
            try:
                self._tidy()
            except (RefitError, OSError) as error:
                _LOG.info("relay %s: what ended attempts left here stays for now: %s", self.name, error)

    def _tidy(self) -> None:
        """Forget attempts that ended while this relay was dead, frozen or out of reach.

        The record is read after the shelf was listed: an attempt is bound to it before any of its payloads is sent, so what is
        here and not bound is over.
        """
        here = self._relay.attempts()
        waiting, self._seen = here & self._seen, here
        if not waiting:
            return
        state = self._control.read()
        bound = state.attempt.attempt if state is not None and state.attempt is not None else None
        for attempt in waiting - {bound}:
            self._relay.forget(attempt)


def _address(text: str, what: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise RejectedError(f"relay: {what} {text!r}: expected HOST:PORT, such as 10.0.0.5:7411")
    return host.strip("[]"), int(port)
