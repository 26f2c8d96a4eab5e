"""Networks in a box: namespaces of this machine, joined by links of a chosen rate, delay and loss. Needs root and iproute2.

Nothing leaves the machine: namespaces know only each other, by the links that were laid. Used by benchmarks and tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from deltarefit.errors import RejectedError
from deltarefit.testing.netns_delay import DEVICE

__all__ = ["LinkShape", "Network", "Traffic", "why_no_namespaces"]

_PREFIX = "dr"
_BUFFER_NBYTES = 256 << 20
"""Most that TCP may buffer per connection: enough for 10 Gbit/s at 200 ms."""


@dataclass(frozen=True, slots=True)
class LinkShape:
    """One link; the same in both directions."""

    mbit: float = 0.0
    """Mbit/s; 0 for no limit."""
    delay_ms: float = 0.0
    """One way."""
    loss: float = 0.0
    """Probability per 1460 bytes."""

    @property
    def is_far(self) -> bool:
        return self.delay_ms > 0 or self.loss > 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one end of a link sent and received, headers included."""

    sent_nbytes: int
    received_nbytes: int

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent_nbytes - earlier.sent_nbytes, self.received_nbytes - earlier.received_nbytes)


def why_no_namespaces() -> str:
    """Why they cannot be used here, or nothing if they can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    missing = [program for program in ("ip", "tc", "sysctl") if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} is not installed: apt-get install iproute2 procps"
    try:
        with Network() as network:
            network.add("probe")
    except RejectedError as error:
        return str(error)
    return ""


class Network:
    """Namespaces and links, made one by one and removed together. A context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._names: dict[str, str] = {}
        self._devices: dict[tuple[str, str], str] = {}
        self._addresses: dict[tuple[str, str], str] = {}
        self.congestion_control = ""
        """Of TCP in the namespaces: ``cubic`` where the machine allows it there, else ``reno``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.close()

    def add(self, name: str) -> None:
        """Make a namespace with nothing but a loopback device.

        Raises:
            RejectedError: it cannot be made.
        """
        full = f"{_PREFIX}{os.getpid()}-{name}"
        _ip("netns", "add", full)
        self._stack.callback(_ip_quietly, "netns", "del", full)
        self._names[name] = full
        _ip("-n", full, "link", "set", "lo", "up")
        for setting in (
            f"net.ipv4.tcp_rmem=4096 131072 {_BUFFER_NBYTES}",
            f"net.ipv4.tcp_wmem=4096 131072 {_BUFFER_NBYTES}",
            "net.ipv4.tcp_slow_start_after_idle=0",  # as hosts on long links are set: idle connections keep their window
        ):
            _run(self.inside(name, ["sysctl", "-q", "-w", setting]))
        self.congestion_control = self._set_congestion_control(name)

    def connect(self, first: str, second: str, shape: LinkShape | None = None) -> None:
        """Lay a link; each end gets an address of its own. A namespace routes nothing between its links."""
        shape = shape or LinkShape()
        net = len(self._devices) // 2
        addresses = f"10.213.{net}.1", f"10.213.{net}.2"
        if shape.is_far:
            self._lay_far(first, second, addresses, shape)
            devices = DEVICE, DEVICE
        else:
            devices = f"v{net}a", f"v{net}b"
            ends = [self._names[first], self._names[second]]
            _ip("link", "add", devices[0], "netns", ends[0], "type", "veth", "peer", "name", devices[1], "netns", ends[1])
            for end, device, address in zip(ends, devices, addresses, strict=True):
                _ip("-n", end, "addr", "add", f"{address}/30", "dev", device)
                _ip("-n", end, "link", "set", device, "up")
        for one, other, device, address in (
            (first, second, *_at(0, devices, addresses)),
            (second, first, *_at(1, devices, addresses)),
        ):
            self._devices[one, other] = device
            self._addresses[one, other] = address
            if shape.mbit:
                _shape(self._names[one], device, shape)

    def address(self, name: str, towards: str) -> str:
        """The address by which ``towards`` reaches ``name``."""
        return self._addresses[name, towards]

    def inside(self, name: str, command: Sequence[str]) -> list[str]:
        """The command, as it is to be run within that namespace."""
        return ["ip", "netns", "exec", self._names[name], *command]

    def traffic(self, name: str, towards: str) -> Traffic:
        """What ``name`` has exchanged with ``towards`` so far."""
        shown = _run(["ip", "-n", self._names[name], "-s", "-j", "link", "show", "dev", self._devices[name, towards]])
        statistics = json.loads(shown)[0]["stats64"]
        return Traffic(statistics["tx"]["bytes"], statistics["rx"]["bytes"])

    def cut(self, name: str, towards: str) -> None:
        """Take the link down: packets vanish until ``mend``."""
        _ip("-n", self._names[name], "link", "set", self._devices[name, towards], "down")

    def mend(self, name: str, towards: str) -> None:
        """Bring the link up again."""
        _ip("-n", self._names[name], "link", "set", self._devices[name, towards], "up")

    def reshape(self, name: str, towards: str, mbit: float) -> None:
        """Change the rate at which ``name`` sends."""
        _shape(self._names[name], self._devices[name, towards], LinkShape(mbit=mbit))

    def _set_congestion_control(self, name: str) -> str:
        """Choose one that slows down at losses, as the internet's do; some machines default to one that hides them."""
        for kind in ("cubic", "reno"):
            with contextlib.suppress(RejectedError):
                _run(self.inside(name, ["sysctl", "-q", "-w", f"net.ipv4.tcp_congestion_control={kind}"]))
                return kind
        raise RejectedError("neither cubic nor reno can be set as the congestion control of a namespace")

    def _lay_far(self, first: str, second: str, addresses: tuple[str, str], shape: LinkShape) -> None:
        words = [
            self._names[first],
            addresses[0],
            self._names[second],
            addresses[1],
            str(shape.delay_ms),
            str(shape.loss),
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "deltarefit.testing.netns_delay", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._stack.enter_context(_ending(process))
        if process.stdout is None or process.stdout.readline() != b"up\n":
            raise RejectedError(f"the long link between {first} and {second} did not come up (exit {process.poll()})")


def _at(end: int, devices: tuple[str, str], addresses: tuple[str, str]) -> tuple[str, str]:
    return devices[end], addresses[end]


@contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _shape(namespace: str, device: str, shape: LinkShape) -> None:
    """Limit what leaves the device. The queue before it holds one round trip's worth, as routers' are sized, at least 50 ms."""
    burst_nbytes = max(128 << 10, int(shape.mbit * 1e6 / 8 / 250))  # 64 KiB packets must fit, and the kernel's tick
    words = ["qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{shape.mbit}mbit", "burst", str(burst_nbytes)]
    _run(["tc", "-n", namespace, *words, "latency", f"{max(50.0, 2 * shape.delay_ms):.0f}ms"])


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _ip_quietly(*words: str) -> None:
    with contextlib.suppress(RejectedError):
        _ip(*words)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RejectedError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise RejectedError(f"{' '.join(command)}: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout
