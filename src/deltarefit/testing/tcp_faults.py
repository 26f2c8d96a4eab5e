"""A TCP proxy that cuts connections at given bytes, or goes silent, and counts what crossed it."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator

__all__ = ["CuttingProxy"]

_PIECE_NBYTES = 64 << 10


class CuttingProxy:
    """Stands before ``(host, port)``; use it within ``running()`` and connect to ``port``."""

    def __init__(self, host: str, port: int, *, cut_at: tuple[int, ...] = ()) -> None:
        """``cut_at``: the connection is cut when so many bytes crossed towards the listener, counted over all connections."""
        self.port = 0
        self.crossed_nbytes = 0
        """Bytes towards the listener, over all connections."""
        self.connections = 0
        self.cuts = 0
        """How often a connection was cut: assert that it was."""
        self._target = (host, port)
        self._cut_at = sorted(cut_at)
        self._silent = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    @contextlib.contextmanager
    def running(self) -> Iterator[CuttingProxy]:
        """Listen until the block ends."""
        server = socket.create_server(("127.0.0.1", 0))
        self.port = server.getsockname()[1]
        thread = threading.Thread(target=self._accept, args=(server,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._closing.set()
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()
            self.cut()
            thread.join()

    def cut(self) -> None:
        """Reset every connection that is open now."""
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def be_silent(self) -> None:
        """Let nothing through any more, and close nothing: a cable that was pulled."""
        self._silent.set()

    def speak(self) -> None:
        """End the silence."""
        self._silent.clear()

    def _accept(self, server: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                near, _ = server.accept()
                far = socket.create_connection(self._target, 5)
            except OSError:
                if self._closing.is_set():
                    return
                with contextlib.suppress(UnboundLocalError):
                    near.close()
                continue
            self.connections += 1
            threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with self._lock:
            self._open |= {near, far}
        try:
            with contextlib.suppress(OSError):
                while self._step(near, far):
                    pass
        finally:
            with self._lock:
                self._open -= {near, far}
            near.close()
            far.close()

    def _step(self, near: socket.socket, far: socket.socket) -> bool:
        if self._closing.is_set():
            return False
        if self._silent.is_set():
            return not self._closing.wait(0.02)
        readable, _, _ = select.select([near, far], [], [], 0.02)
        for sock in readable:
            data = sock.recv(_PIECE_NBYTES)
            if not data:
                return False
            if sock is far:
                near.sendall(data)
                continue
            allowed = self._allow(len(data))
            far.sendall(data[:allowed])
            if allowed < len(data):
                self.cuts += 1
                return False
        return True

    def _allow(self, nbytes: int) -> int:
        with self._lock:
            if self._cut_at and self._cut_at[0] < self.crossed_nbytes + nbytes:
                nbytes = max(0, self._cut_at.pop(0) - self.crossed_nbytes)
            self.crossed_nbytes += nbytes
            return nbytes
