"""An HTTP proxy in front of a real object store that answers 500, cuts, stalls, trickles and damages, as told.

Tests point the client at the proxy. Every fault counts how often it struck, and every request is logged, so a test can assert
both that its fault fired and how many bytes crossed.
"""

from __future__ import annotations

import contextlib
import enum
import http.client
import http.server
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

__all__ = ["FaultKind", "FaultyProxy", "HttpFault", "LoggedRequest"]

_PIECE_NBYTES = 64 << 10


class FaultKind(enum.Enum):
    """What happens to one request."""

    STATUS = "answer with an error status; the store never hears of it"
    RESET_BEFORE = "reset the connection; the store never hears of it"
    RESET_AFTER = "reset the connection once the store has done it: a lost reply"
    CUT = "promise the whole body, send half of it, close"
    SHORTEN = "answer with half of the body and a length that fits it: whole as HTTP, wrong as an object"
    DAMAGE = "flip one bit in the middle of the body"
    STALL = "send half of the body, then nothing until the client gives up"
    TRICKLE = "send the body in small pieces with pauses in between"
    IGNORE_RANGE = "answer a ranged request with status 200 instead of 206, as some gateways do"


@dataclass(slots=True)
class HttpFault:
    """Strikes the first ``times`` requests that match."""

    kind: FaultKind
    when: Callable[[str, str], bool] = lambda method, path: True
    """(method, path with query) of the request."""
    times: int | None = 1
    status: int = 500
    pause_s: float = 0.01
    fired: int = 0
    """How often it struck."""


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request as the proxy saw it."""

    method: str
    path: str
    """With query."""
    status: int
    """What the client was told; 0 if the connection was reset."""
    request_nbytes: int
    """Of the body."""
    response_nbytes: int
    """Of the body, as far as it was sent."""


@dataclass(slots=True)
class _Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(slots=True)
class FaultyProxy:
    """Forwards to ``upstream`` (``http://host:port``). A context manager; ``endpoint`` is where it listens."""

    upstream: str
    faults: list[HttpFault] = field(default_factory=list)
    """Asked in order; the first that matches strikes. May be changed while requests run."""
    requests: list[LoggedRequest] = field(default_factory=list)
    endpoint: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closing: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def running(self) -> Iterator[FaultyProxy]:
        """Listen until the block ends."""
        server = _Server(self)
        self.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=lambda: server.serve_forever(0.02), name="faulty-proxy", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._closing.set()
            server.shutdown()
            server.server_close()
            thread.join()

    def strike(self, method: str, path: str) -> HttpFault | None:
        """The fault for this request, counted."""
        with self._lock:
            for fault in self.faults:
                if (fault.times is None or fault.fired < fault.times) and fault.when(method, path):
                    fault.fired += 1
                    return fault
        return None

    def log(self, request: LoggedRequest) -> None:
        """Remember a request."""
        with self._lock:
            self.requests.append(request)

    def pause(self, seconds: float) -> bool:
        """Wait, unless the proxy closes; returns whether it does."""
        return self._closing.wait(seconds)

    def count(self, method: str, part: str) -> int:
        """Requests of that method, answered with success, whose path holds ``part``."""
        with self._lock:
            return sum(r.method == method and part in r.path and 200 <= r.status < 300 for r in self.requests)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, proxy: FaultyProxy) -> None:
        self.proxy = proxy
        parts = urlsplit(proxy.upstream)
        self.upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are what this proxy is for."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _serve(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = proxy.strike(self.command, self.path)
        status, sent = 0, 0
        try:
            status, sent = self._answer(fault, body)
        finally:
            proxy.log(LoggedRequest(self.command, self.path, status, len(body), sent))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve  # noqa: N815

    def _answer(self, fault: HttpFault | None, body: bytes) -> tuple[int, int]:
        kind = fault.kind if fault is not None else None
        if kind is FaultKind.RESET_BEFORE:
            return self._reset()
        if fault is not None and kind is FaultKind.STATUS:
            text = b"<Error><Code>Injected</Code></Error>"
            return self._send(_Answer(fault.status, [("Content-Type", "application/xml")], text), len(text))
        answer = self._forward(body)
        if kind is FaultKind.RESET_AFTER:
            return self._reset()
        if fault is None or not 200 <= answer.status < 300:
            return self._send(answer, len(answer.body))
        return self._send_badly(fault, answer)

    def _forward(self, body: bytes) -> _Answer:
        connection = http.client.HTTPConnection(*self.server.upstream, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
        try:
            connection.request(self.command, self.path, body=body, headers=headers)
            response = connection.getresponse()
            data = response.read()
            kept = [
                (k, v) for k, v in response.getheaders() if k.lower() not in {"connection", "transfer-encoding", "keep-alive"}
            ]
            return _Answer(response.status, kept, data)
        finally:
            connection.close()

    def _send_badly(self, fault: HttpFault, answer: _Answer) -> tuple[int, int]:
        half = len(answer.body) // 2
        if fault.kind is FaultKind.SHORTEN:
            answer.body = answer.body[:half]
            answer.headers = [(k, v) for k, v in answer.headers if k.lower() != "content-length"]
        elif fault.kind is FaultKind.DAMAGE and answer.body:
            damaged = bytearray(answer.body)
            damaged[half] ^= 0x10
            answer.body = bytes(damaged)
        elif fault.kind is FaultKind.IGNORE_RANGE:
            answer.status = 200
            answer.headers = [(k, v) for k, v in answer.headers if k.lower() != "content-range"]
        elif fault.kind in (FaultKind.CUT, FaultKind.STALL):
            status_and_sent = self._send(answer, half)
            self.wfile.flush()
            if fault.kind is FaultKind.STALL:
                self.server.proxy.pause(60)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return status_and_sent
        pause_s = fault.pause_s if fault.kind is FaultKind.TRICKLE else None
        return self._send(answer, len(answer.body), pause_s)

    def _send(self, answer: _Answer, nbytes: int, pause_s: float | None = None) -> tuple[int, int]:
        self.send_response_only(answer.status)
        names = {name.lower() for name, _ in answer.headers}
        for name, value in answer.headers:
            self.send_header(name, value)
        if "content-length" not in names:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command == "HEAD":
            return answer.status, 0
        for first in range(0, nbytes, _PIECE_NBYTES):
            if pause_s is not None and self.server.proxy.pause(pause_s):
                break
            self.wfile.write(answer.body[first : min(nbytes, first + _PIECE_NBYTES)])
        return answer.status, nbytes

    def _reset(self) -> tuple[int, int]:
        """Close with RST, so that the client sees a reset and no orderly end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
        return 0, 0

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name in the base class
        """Silent: the proxy keeps its own log."""
