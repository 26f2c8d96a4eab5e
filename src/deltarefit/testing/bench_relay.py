"""What a relay costs: bytes passed on per second of processor time, beside a bare loop over sockets and beside copying memory.

Three processes over loopback: a sender, whoever passes on, a sink. The middle one is a relay with one child, or a loop that
receives into a buffer and sends it on, over plain sockets or under TLS 1.3. Processor time of the middle process counts, as
measured by the kernel: it hardly depends on what else the machine does, where seconds on the clock do.

Needs the ``openssl`` command for the rows with TLS.
"""

from __future__ import annotations

import resource
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from deltarefit.ids import AttemptId, OwnerId, PayloadId, attempt_id
from deltarefit.runtime.clock import RandomIds, SystemClock
from deltarefit.testing.role_process import RoleProcess
from deltarefit.transport.relay import Peer, RelayContext, RelayNode, RelaySender, caller_tls, listener_tls

__all__ = ["run"]

_RUN = "memory://bench-relay"
_HOST = "127.0.0.1"
_PAYLOAD_NBYTES = 8 << 20
_PIECE_NBYTES = 1 << 20
_TIMEOUT_S = 120.0
_REPEATS = 3
_COPIES = 8
_CLOCK = SystemClock()
Files = Mapping[str, str]


def run(*, nbytes: int = 256 << 20, repeats: int = _REPEATS) -> dict[str, Any]:
    """Measure; about half a minute."""
    copied = statistics.median(_copy_rate(nbytes) for _ in range(repeats))
    rows: list[dict[str, Any]] = []
    root = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(prefix="deltarefit-bench-", dir=root) as folder:
        files = _certificates(Path(folder))
        for tls in ({}, files) if files else ({},):
            raw = _median(repeats, partial(_raw, Path(folder), tls, nbytes))
            relay = _median(repeats, partial(_relayed, Path(folder), tls, nbytes))
            rows.extend(
                {
                    "what": name,
                    "tls": bool(tls),
                    "bytes_per_core_second": found["rate"],
                    "to_raw_sockets": found["rate"] / raw["rate"],
                    "to_memcpy": found["rate"] / copied,
                    "bytes_per_second": found["wall_rate"],
                }
                for name, found in (("raw sockets", raw), ("relay", relay))
            )
    return {"rows": rows, "memcpy_bytes_per_core_second": copied, "nbytes": nbytes, "repeats": repeats}


def _copy_rate(nbytes: int) -> float:
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    start_s = _cpu_s()
    for _ in range(_COPIES):
        np.copyto(target, source)
    return _COPIES * nbytes / (_cpu_s() - start_s)


def _median(repeats: int, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    found = [measure() for _ in range(repeats)]
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def _certificates(folder: Path) -> Files:
    """An authority and one certificate of it for loopback; nothing without ``openssl``."""
    program = shutil.which("openssl")
    if program is None:
        return {}

    def openssl(*words: str) -> None:
        subprocess.run([program, *words], cwd=folder, check=True, capture_output=True, timeout=_TIMEOUT_S)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    (folder / "ext").write_text(f"subjectAltName=IP:{_HOST}\n", encoding="ascii")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=bench", "-days", "2")
    openssl("req", *curve, "-keyout", "own.key", "-out", "own.csr", "-subj", "/CN=bench")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "ext")
    openssl("x509", "-req", "-in", "own.csr", *signing, "-out", "own.pem", "-days", "2")
    return {"authority": str(folder / "ca.pem"), "certificate": str(folder / "own.pem"), "key": str(folder / "own.key")}


# --- the measured chains -----------------------------------------------------------------------------------------------


def _start(stack: ExitStack, folder: Path, name: str, role: str, options: dict[str, Any]) -> RoleProcess:
    command = [sys.executable, "-m", __name__, role, msgspec.json.encode(options).decode()]
    return stack.enter_context(RoleProcess(name, command, environment={}, log=folder / f"{name}.log", start_s=_TIMEOUT_S))


def _raw(folder: Path, tls: Files, nbytes: int) -> dict[str, float]:
    """Through a bare loop."""
    with ExitStack() as stack:
        sink = _start(stack, folder, "sink", "sink", {"tls": dict(tls)})
        middle = _start(stack, folder, "middle", "pass", {"tls": dict(tls), "port": sink.ready["port"]})
        data = memoryview(np.random.default_rng(0).integers(0, 256, _PIECE_NBYTES, dtype=np.uint8).tobytes())
        start_s = _CLOCK.monotonic_s()
        with _connect(middle.ready["port"], tls) as sock:
            for _ in range(nbytes // _PIECE_NBYTES):
                sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            spent = middle.answer(_TIMEOUT_S)
            sink.answer(_TIMEOUT_S)
        wall_s = _CLOCK.monotonic_s() - start_s
    return {"rate": nbytes / spent["cpu_s"], "wall_rate": nbytes / wall_s}


def _relayed(folder: Path, tls: Files, nbytes: int) -> dict[str, float]:
    """Through a relay with one child."""
    with ExitStack() as stack:
        relays = []
        for name in ("first", "second"):
            (folder / name).mkdir(exist_ok=True)
            relays.append(_start(stack, folder, name, "relay", {"tls": dict(tls), "name": name, "folder": str(folder / name)}))
        peers = tuple(msgspec.convert((relay.ready["name"], _HOST, relay.ready["port"]), Peer) for relay in relays)
        sender = stack.enter_context(RelaySender(_context("sender", tls), lambda: peers, fan_out=1))
        data = np.random.default_rng(0).integers(0, 256, _PAYLOAD_NBYTES, dtype=np.uint8).tobytes()
        attempt = attempt_id(1, 1, RandomIds().nonce())
        before = relays[0].ask({}, _TIMEOUT_S)
        start_s = _CLOCK.monotonic_s()
        for number in range(nbytes // _PAYLOAD_NBYTES):
            sender.send(PayloadId(AttemptId(attempt), number, OwnerId(0)), data)
        if not sender.wait_until_delivered(attempt, _TIMEOUT_S):
            raise TimeoutError(f"relays did not take {nbytes} bytes within {_TIMEOUT_S:.0f} s")
        wall_s = _CLOCK.monotonic_s() - start_s
        after = relays[0].ask({}, _TIMEOUT_S)
        sender.cleanup(attempt)
    return {"rate": nbytes / (after["cpu_s"] - before["cpu_s"]), "wall_rate": nbytes / wall_s}


def _context(name: str, tls: Files) -> RelayContext:
    ids = RandomIds()
    paths = {key: Path(path) for key, path in tls.items()}
    return RelayContext(
        _RUN,
        name,
        lambda: b"".join(bytes.fromhex(ids.nonce()) for _ in range(4)),
        _CLOCK,
        client_tls=caller_tls(**paths) if tls else None,
        server_tls=listener_tls(**paths) if tls else None,
    )


def _connect(port: int, tls: Files) -> socket.socket:
    sock = socket.create_connection((_HOST, port), _TIMEOUT_S)
    context = _context("raw", tls).client_tls
    return context.wrap_socket(sock, server_hostname=_HOST) if context is not None else sock


# --- roles -------------------------------------------------------------------------------------------------------------


def _cpu_s() -> float:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


def _accepted(options: dict[str, Any]) -> socket.socket:
    """Show a port, and take one connection on it."""
    context: ssl.SSLContext | None = _context("raw", options["tls"]).server_tls
    with socket.create_server((_HOST, 0)) as server:
        server.settimeout(_TIMEOUT_S)
        _say({"port": server.getsockname()[1]})
        sock, _ = server.accept()
    sock.settimeout(_TIMEOUT_S)
    return context.wrap_socket(sock, server_side=True) if context is not None else sock


def _pieces(sock: socket.socket) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_PIECE_NBYTES))
    while (received := sock.recv_into(buffer)) > 0:
        yield buffer[:received]


def _sink(options: dict[str, Any]) -> None:
    with _accepted(options) as sock:
        _say({"received": sum(len(piece) for piece in _pieces(sock)), "cpu_s": _cpu_s()})


def _pass(options: dict[str, Any]) -> None:
    with _connect(options["port"], options["tls"]) as below, _accepted(options) as above:
        start_s = _cpu_s()
        for piece in _pieces(above):
            below.sendall(piece)
        spent_s = _cpu_s() - start_s
        below.shutdown(socket.SHUT_WR)
        _say({"cpu_s": spent_s})
        _wait_for_end()


def _relay(options: dict[str, Any]) -> None:
    node = RelayNode(_context(options["name"], options["tls"]), Path(options["folder"]), host=_HOST, port=0)
    peer = node.start()
    try:
        _say({"name": peer.name, "port": peer.port})
        for _ in sys.stdin:
            _say({"cpu_s": _cpu_s(), "threads": threading.active_count()})
    finally:
        node.close()


def _wait_for_end() -> None:
    for _ in sys.stdin:
        pass


_ROLES: dict[str, Callable[[dict[str, Any]], None]] = {"sink": _sink, "pass": _pass, "relay": _relay}

if __name__ == "__main__":
    _ROLES[sys.argv[1]](msgspec.json.decode(sys.argv[2]))
