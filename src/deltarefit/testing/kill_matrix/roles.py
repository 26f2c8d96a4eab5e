"""What the processes of one case do: trainer ranks that refit when told, rollout processes that serve and are refitted."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from deltarefit.canonical import Catalog
from deltarefit.errors import DeadlineError, RefitError
from deltarefit.plan import RefitPlan
from deltarefit.receiver import PrewarmReport, RankDigest, ReadyPayload
from deltarefit.runtime.clock import SystemClock
from deltarefit.runtime.engine import LocalEngine
from deltarefit.runtime.events import StageEvent
from deltarefit.runtime.gate import LocalGate
from deltarefit.runtime.publisher import Publisher
from deltarefit.runtime.receiver_agent import Receiver
from deltarefit.runtime.relay_service import RelayService
from deltarefit.runtime.settings import PublisherSettings, ReceiverAgentSettings, RelayServiceSettings
from deltarefit.testing.kill_matrix.policy import Policy, Rollout, perturb, state_hash
from deltarefit.testing.kill_matrix.signs import Breakpoint, Signs

__all__ = ["ReceiverTask", "RelayTask", "Task", "TrainerTask", "serve_role"]

_ORDER_S = 120.0
_SERVE_PAUSE_S = 0.005
_SETTLE_S = 20.0


class _Task(msgspec.Struct, frozen=True, kw_only=True):
    directory: str
    run: str
    lease_s: float
    point: str = ""
    count: int = 1


class TrainerTask(_Task, frozen=True, kw_only=True, tag=True):
    """One trainer rank."""

    rank: int
    world_size: int
    life: int
    """Counts the starts of the training job; each life trains differently."""
    publishes: bool
    """Refit with ``publish`` instead of ``refit``."""
    first_step: int


class ReceiverTask(_Task, frozen=True, kw_only=True, tag=True):
    """One rollout process."""

    name: str
    life: int
    shared_directory: str
    """Of its node; empty: it shares nothing."""


class RelayTask(_Task, frozen=True, kw_only=True, tag=True):
    """The relay of one node."""

    name: str
    life: int
    shared_directory: str


Task = TrainerTask | ReceiverTask | RelayTask


def serve_role(task: Task) -> None:
    """Do what the task says until the director says stop."""
    torch.set_num_threads(1)
    signs = Signs(Path(task.directory))
    match task:
        case TrainerTask():
            _Trainer(task, signs).work()
        case ReceiverTask():
            _serve_receiver(task, signs)
        case RelayTask():
            settings = RelayServiceSettings(shared_directory=task.shared_directory, lease_s=task.lease_s)
            with RelayService(task.run, settings=settings):
                signs.put(f"up-{task.name}-{task.life}")
                signs.wait("stop relays", 10 * _ORDER_S)


# --- trainer ------------------------------------------------------------------------------------------------------------


class _Trainer:
    def __init__(self, task: TrainerTask, signs: Signs) -> None:
        self._task = task
        self._signs = signs
        self._breakpoint = Breakpoint(signs, task.point, task.count)
        self._policy = Policy()
        for step in range(1, task.first_step):
            perturb(self._policy, step)  # the checkpoint that the job starts from

    def work(self) -> None:
        task = self._task
        rendezvous = Path(task.directory) / f"rendezvous-{task.life}"
        dist.init_process_group("gloo", init_method=rendezvous.as_uri(), rank=task.rank, world_size=task.world_size)
        try:
            with Publisher(self._policy, run=task.run, settings=self._settings()) as publisher:
                publisher.subscribe(self._hear)
                self._put(f"opened-{task.life}", {"version": publisher.policy_version})
                self._train(publisher)
        except RefitError as error:
            self._signs.put(f"error-{task.life}-{task.rank}", {"kind": type(error).__name__, "text": str(error)})

    def _train(self, publisher: Publisher) -> None:
        task = self._task
        step = task.first_step
        while self._signs.wait(f"order-{task.life}-{step}", _ORDER_S) == "refit":
            perturb(self._policy, step + 1000 * (task.life - 1))
            shown: dict[str, Any] = {"hash": state_hash(Rollout(self._policy))}
            self._put(f"candidate-{task.life}-{step}", shown)
            report = publisher.publish().wait(_ORDER_S) if task.publishes else publisher.refit()
            shown |= {
                "version": report.policy_version,
                "attempts": report.attempts,
                "failures": report.failures,
                "receivers": report.receivers,
                "audited": report.audited,
                "transport": report.transport,
            }
            self._put(f"done-{task.life}-{step}", shown)
            step += 1

    def _settings(self) -> PublisherSettings:
        return PublisherSettings(
            lease_s=self._task.lease_s,
            join_timeout_s=60.0,
            reply_timeout_s=60.0,
            group_timeout_s=120.0,
            retry_pause_s=0.05,
            bucket_nbytes=512,
            chunk_nbytes=512,
            scan_threads=1,
            retained_versions=4,
            retained_nbytes=1 << 20,
        )

    def _hear(self, event: StageEvent) -> None:
        self._breakpoint.reach(f"{event.where}: after {event.stage}")

    def _put(self, name: str, value: Mapping[str, Any]) -> None:
        if self._task.rank == 0:
            self._signs.put(name, value)


# --- rollout ------------------------------------------------------------------------------------------------------------


class _HeldEngine(LocalEngine):
    """An engine that can be held before or after each operation."""

    def __init__(self, name: str, model: Rollout, gate: LocalGate, breakpoint_: Breakpoint) -> None:
        super().__init__(model, model.load_weights, request_gate=gate)
        self._receiver = name
        self._breakpoint = breakpoint_

    def _pass(self, where: str) -> None:
        self._breakpoint.reach(f"{self._receiver}: {where}")

    def prewarm(self, catalog: Catalog) -> Sequence[PrewarmReport]:
        self._pass("before prewarm")
        return super().prewarm(catalog)

    def prepare(self, plan: RefitPlan) -> None:
        self._pass("before prepare")
        super().prepare(plan)

    def close_gate(self, timeout_s: float) -> None:
        super().close_gate(timeout_s)
        self._pass("after close_gate")

    def apply(self, data: bytes | ReadyPayload) -> int:
        self._pass("before apply")
        written = super().apply(data)
        self._pass("after apply")
        return written

    def digests(self) -> Sequence[Mapping[str, RankDigest]]:
        self._pass("before digests")
        return super().digests()

    def drop_caches(self) -> None:
        self._pass("before drop_caches")
        super().drop_caches()

    def reopen_gate(self) -> None:
        self._pass("before reopen_gate")
        super().reopen_gate()
        self._pass("after reopen_gate")


def _serve_receiver(task: ReceiverTask, signs: Signs) -> None:
    model = Rollout(Policy())
    gate = LocalGate()
    engine = _HeldEngine(task.name, model, gate, Breakpoint(signs, task.point, task.count))
    settings = ReceiverAgentSettings(
        lease_s=task.lease_s, poll_s=0.02, request_timeout_s=10.0, shared_directory=task.shared_directory
    )
    receiver = Receiver(engine, run=task.run, name=task.name, request_gate=gate, settings=settings)
    stopping = threading.Event()
    log = Path(task.directory) / f"served-{task.name}-{task.life}.txt"
    server = threading.Thread(target=_serve, args=(receiver, model, log, stopping), daemon=True)
    server.start()
    with receiver.start():
        receiver.wait_joined(_ORDER_S)
        signs.put(f"joined-{task.name}-{task.life}")
        signs.wait("stop receivers", 10 * _ORDER_S)
        with contextlib.suppress(DeadlineError), receiver.serving(_SETTLE_S):
            pass  # on a busy machine a lease may just have run out; it opens its gate again by itself
        stopping.set()
        server.join(10.0)
        signs.put(
            f"final-{task.name}",
            {"hash": state_hash(model), "version": receiver.policy_version, "is_open": gate.is_open, "pid": os.getpid()},
        )


def _serve(receiver: Receiver, model: Rollout, log: Path, stopping: threading.Event) -> None:
    """Answer requests as long as the gate lets them in: note the version and a hash of all weights, whenever either changes."""
    clock = SystemClock()
    last = ""
    with log.open("a", encoding="utf-8") as out:
        while not stopping.is_set():
            try:
                with receiver.serving(0.1):
                    line = f"{receiver.policy_version} {state_hash(model)}"
            except DeadlineError:
                last = ""
                continue
            if line != last:
                out.write(f"{line}\n")
                out.flush()
                last = line
            clock.sleep(_SERVE_PAUSE_S)
