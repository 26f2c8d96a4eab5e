"""One connection: whole frames in and out, by two threads at once, plain or under TLS; and the handshake."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import select
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from deltarefit.errors import RejectedError, TransportError
from deltarefit.transport.base import Clock
from deltarefit.transport.relay import frame
from deltarefit.transport.relay.frame import Hello, Message, Peer, Proof, Welcome

__all__ = ["Channel", "RelayContext", "RelaySettings", "accept", "connect"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """Times of a relay's connections."""

    connect_s: float = 3.0
    """For one try to connect, TLS and greeting included."""
    alive_s: float = 1.0
    """A side that has said nothing for this long says that it lives."""
    silence_s: float = 5.0
    """A connection on which nothing came for this long, or nothing could be written, is given up and made anew."""
    dead_after_s: float = 10.0
    """A relay that could not be reached for this long is dead for this attempt: its children get a new parent."""
    call_s: float = 30.0
    """Longest wait until a stop or a cleanup went round the tree."""

    def __post_init__(self) -> None:
        if not 0 < self.alive_s < self.silence_s or min(self.connect_s, self.dead_after_s, self.call_s) <= 0:
            raise RejectedError(f"{self}: expected positive times and alive_s below silence_s")


@dataclass(frozen=True, slots=True)
class RelayContext:
    """What every connection of one participant shares."""

    run: str
    """The run's URL: a relay serves one run and refuses others."""
    name: str
    nonce: Callable[[], bytes]
    """16 fresh random bytes per call."""
    clock: Clock
    key: bytes = b""
    """The run's secret, at most 64 bytes. With it, both sides prove that they know it before anything else is said."""
    client_tls: ssl.SSLContext | None = None
    server_tls: ssl.SSLContext | None = None
    settings: RelaySettings = RelaySettings()

    def proof(self, role: bytes, caller: bytes, listener: bytes) -> bytes:
        """What only a holder of the key can compute for these two nonces."""
        text = role + caller + listener + self.run.encode()
        return hashlib.blake2b(text, digest_size=16, key=self.key).digest()


class Channel:
    """Frames on a connected socket. One thread receives; any number send, one frame at a time."""

    def __init__(self, sock: socket.socket, *, silence_s: float) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._silence_ms = int(silence_s * 1000)
        # OpenSSL's objects take one call at a time; plain sockets need no lock.
        self._tls: contextlib.AbstractContextManager[object] = (
            threading.Lock() if isinstance(sock, ssl.SSLSocket) else contextlib.nullcontext()
        )
        self._sending = threading.Lock()
        self._header = bytearray(frame.HEADER.size)
        self._body = bytearray(frame.MAX_BODY_NBYTES)
        self.sent_nbytes = 0
        self.received_nbytes = 0

    def send(self, message: Message) -> None:
        """Write a message. Raises ``OSError`` (a ``TimeoutError`` if the peer takes nothing)."""
        self.send_frame(frame.encode(message))

    def send_frame(self, whole: bytes | memoryview) -> None:
        """Write one whole frame."""
        view = memoryview(whole)
        with self._sending:
            while view:
                sent = self._patiently(lambda view=view: self._sock.send(view), select.POLLOUT)  # type: ignore[misc]
                self.sent_nbytes += sent
                view = view[sent:]

    def receive(self) -> tuple[int, memoryview]:
        """The next frame's kind and body; the body is valid until the next call.

        Raises:
            OSError: the connection broke, or nothing came within the time of silence.
            TransportError: what came is no frame.
        """
        self._fill(memoryview(self._header))
        kind, nbytes = frame.body_nbytes(self._header)
        body = memoryview(self._body)[:nbytes]
        self._fill(body)
        return kind, body

    def receive_message(self) -> Message:
        """The next frame, which must be a message."""
        kind, body = self.receive()
        if kind != frame.MESSAGE:
            raise TransportError("expected a message, got payload bytes")
        return frame.decode(body)

    def abort(self) -> None:
        """Make both directions fail at once; any thread may call it."""
        with contextlib.suppress(OSError):
            # Not SSLSocket's own: that would let the other thread go on in plain text.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket; call it when no thread uses the channel any more."""
        self._sock.close()

    def _fill(self, view: memoryview) -> None:
        while view:
            got = self._patiently(lambda view=view: self._sock.recv_into(view), select.POLLIN)  # type: ignore[misc]
            if got == 0:
                raise ConnectionResetError("the other side closed the connection")
            self.received_nbytes += got
            view = view[got:]

    def _patiently(self, call: Callable[[], _T], event: int) -> _T:
        while True:
            try:
                with self._tls:
                    return call()
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)
            except BlockingIOError:
                self._wait(event)

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._sock, event)
        if not poll.poll(self._silence_ms):
            raise TimeoutError(f"nothing moved on the connection for {self._silence_ms / 1000:g} s")


def connect(peer: Peer, context: RelayContext) -> Channel:
    """Connect and greet.

    Raises:
        OSError: not reached, or the connection broke.
        TransportError: what answers is no relay.
        RejectedError: it is a relay of another run, or one side does not know the run's key, or TLS failed.
    """
    settings = context.settings
    sock = socket.create_connection((peer.host, peer.port), settings.connect_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context.client_tls is not None:
            sock = _under_tls(sock, context.client_tls, peer)
        channel = Channel(sock, silence_s=settings.silence_s)
        nonce = context.nonce()
        channel.send(Hello(context.run, context.name, nonce))
        welcome = channel.receive_message()
        if not isinstance(welcome, Welcome):
            raise RejectedError(f"{peer}: it refused us: {getattr(welcome, 'text', welcome)}")
        if not hmac.compare_digest(welcome.proof, context.proof(b"listener", nonce, welcome.nonce)):
            raise RejectedError(f"{peer}: it does not know this run's key; give every relay the run's URL and key")
        channel.send(Proof(context.proof(b"caller", nonce, welcome.nonce)))
    except BaseException:
        sock.close()
        raise
    return channel


def accept(sock: socket.socket, context: RelayContext) -> tuple[Channel, str]:
    """Answer a greeting; returns the channel and the caller's name. Raises as ``connect``."""
    settings = context.settings
    sock.settimeout(settings.connect_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context.server_tls is not None:
            sock = context.server_tls.wrap_socket(sock, server_side=True)
        channel = Channel(sock, silence_s=settings.silence_s)
        hello = channel.receive_message()
        if not isinstance(hello, Hello):
            raise TransportError(f"expected a greeting, got {type(hello).__name__}")
        if hello.run != context.run:
            channel.send(frame.Failed(0, f"this relay serves run {context.run}, not {hello.run}"))
            raise RejectedError(f"{hello.name} belongs to run {hello.run}")
        nonce = context.nonce()
        channel.send(Welcome(context.name, nonce, context.proof(b"listener", hello.nonce, nonce)))
        proof = channel.receive_message()
        if not isinstance(proof, Proof) or not hmac.compare_digest(proof.proof, context.proof(b"caller", hello.nonce, nonce)):
            raise RejectedError(f"{hello.name} does not know this run's key")
    except BaseException:
        sock.close()
        raise
    return channel, hello.name


def _under_tls(sock: socket.socket, tls: ssl.SSLContext, peer: Peer) -> ssl.SSLSocket:
    try:
        return tls.wrap_socket(sock, server_hostname=peer.host)
    except ssl.SSLCertVerificationError as error:
        raise RejectedError(f"{peer}: its certificate is not accepted: {error.verify_message}") from error
