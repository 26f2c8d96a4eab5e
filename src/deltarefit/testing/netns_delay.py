"""A long link between two network namespaces, in user space: each packet arrives so much later, and some never.

Kernels without netem cannot delay packets, but all have TUN devices: one in each namespace, and this program between them. It
carries packets of up to 64 KiB as the kernel's segmentation offload hands them over, which makes several Gbit/s in Python.
Losses are drawn per 1460 bytes and lose the whole packet. Started as ``python -m deltarefit.testing.netns_delay`` with the two
namespaces, their addresses, the delay in each direction in milliseconds, and the probability of a loss; prints ``up`` when it
works, and ends when its standard input does.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys

from deltarefit.runtime.clock import Clock, SystemClock

__all__ = ["main"]

DEVICE = "far"
"""The name of the device in each namespace."""
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02 | 0x04  # checksums and segmentation of both IP versions: packets cross as large as they are made
_CLONE_NEWNET = 0x40000000
_PACKET_NBYTES = 70_000
_SEGMENT_NBYTES = 1460
_BATCH = 64


def _open(namespace: str, address: str) -> int:
    """Make the device in that namespace; returns its file descriptor, which stays usable outside."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        _enter(there)
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
        fcntl.ioctl(descriptor, _TUNSETIFF, request)
        fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _OFFLOADS)
        _enter(here)
    finally:
        os.close(here)
        os.close(there)
    for words in (
        ["addr", "add", f"{address}/30", "dev", DEVICE],
        ["link", "set", DEVICE, "mtu", "1500", "txqueuelen", "20000", "up"],
    ):
        subprocess.run(["ip", "-n", namespace, *words], check=True)
    return descriptor


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class _Direction:
    """Packets on their way to one end."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.packets: collections.deque[tuple[float, bytes]] = collections.deque()

    def deliver(self, now_s: float) -> float:
        """Hand over what is due; returns the seconds until the next one is."""
        while self.packets and self.packets[0][0] <= now_s:
            try:
                os.write(self.target, self.packets[0][1])
            except BlockingIOError:
                return 0.001
            self.packets.popleft()
        return max(0.0, self.packets[0][0] - now_s) if self.packets else 1.0


def carry(ends: tuple[int, int], *, delay_s: float, loss: float, clock: Clock, rng: random.Random) -> None:
    """Carry packets both ways until standard input ends."""
    directions = {ends[0]: _Direction(ends[1]), ends[1]: _Direction(ends[0])}
    poll = select.epoll()
    for end in ends:
        poll.register(end, select.EPOLLIN)
    poll.register(sys.stdin.fileno(), select.EPOLLIN | select.EPOLLHUP)
    while True:
        wait_s = min(direction.deliver(clock.monotonic_s()) for direction in directions.values())
        for descriptor, _ in poll.poll(wait_s):
            if descriptor == sys.stdin.fileno():
                if not os.read(descriptor, 4096):
                    return
                continue
            _read(descriptor, directions[descriptor], clock.monotonic_s() + delay_s, loss, rng)


def _read(source: int, direction: _Direction, due_s: float, loss: float, rng: random.Random) -> None:
    for _ in range(_BATCH):
        try:
            packet = os.read(source, _PACKET_NBYTES)
        except BlockingIOError:
            return
        if loss:
            segments = max(1, len(packet) // _SEGMENT_NBYTES)
            if rng.random() < 1 - (1 - loss) ** segments:
                continue
        direction.packets.append((due_s, packet))


def main(arguments: list[str]) -> int:
    """See the module."""
    first, first_address, second, second_address, delay_ms, loss = arguments
    ends = _open(first, first_address), _open(second, second_address)
    sys.stdout.write("up\n")
    sys.stdout.flush()
    carry(ends, delay_s=float(delay_ms) / 1e3, loss=float(loss), clock=SystemClock(), rng=random.Random(0))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
