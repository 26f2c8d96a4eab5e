"""One simulated run: nodes, faults, a supervisor that restarts what died, and the invariants, checked at every step."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from deltarefit.errors import RefitError
from deltarefit.ids import BaselineId, PayloadId
from deltarefit.protocol import ControlState, Delivery, LeaseSettings
from deltarefit.protocol import commit as rules
from deltarefit.testing.simulation.coordinator_node import CoordinatorNode
from deltarefit.testing.simulation.faults import FaultPlan
from deltarefit.testing.simulation.job import Job
from deltarefit.testing.simulation.network import Network, Node
from deltarefit.testing.simulation.owner_node import OwnerNode
from deltarefit.testing.simulation.receiver_node import ReceiverNode
from deltarefit.testing.simulation.record import RecordClient, StoreNode
from deltarefit.testing.simulation.weights import NUM_OWNERS, Trainee, dense, initial
from deltarefit.testing.simulation.world import Future, World

__all__ = ["Cluster", "ViolationError"]

LEASE = LeaseSettings(lease_s=4.0, renew_s=0.8)
_NUM_RECEIVERS = 2
_LAST_VERSION = 2
"""The run goes on until this version is committed after the last fault is over, on every receiver."""
_LIMIT_S = 5000.0
_LIMIT_EVENTS = 400_000


class ViolationError(AssertionError):
    """An invariant does not hold. Never caught inside the simulation."""


@dataclass
class Tally:
    """What happened in one run, for the report."""

    commits: int = 0
    attempts: int = 0
    jobs: int = 0
    takeovers: int = 0
    restarts: int = 0
    served: int = 0
    ends: list[str] = field(default_factory=list)


class Cluster:
    """Builds the nodes and watches them."""

    def __init__(
        self,
        seed: int,
        faults: FaultPlan,
        *,
        noise: tuple[float, float],
        audits: bool,
        is_async: bool = False,
        mutant: str = "",
    ) -> None:
        self.world = World(seed)
        self.network = Network(self.world, faults)
        self.network.loss, self.network.doubling = noise
        self.tally = Tally()
        self.faults = faults
        self._audits = audits
        self._delivery = Delivery.ASYNCHRONOUS if is_async else Delivery.SYNCHRONOUS
        self._mutant = mutant
        self._random = Random(seed + 1)
        self._candidates: dict[BaselineId, bytes] = {}
        self._committed: dict[int, bytes] = {0: dense(initial())}
        self._written: dict[tuple[str, int, str], PayloadId] = {}
        self._required: dict[str, str] = {}
        """Incarnations of the receivers when the attempt at hand was prepared."""
        self._jobs: list[Job] = []
        self._coordinators: list[CoordinatorNode] = []
        self.store = StoreNode(self.network, self._on_change)
        self.receivers = [self._receiver(f"rollout-{number}") for number in range(_NUM_RECEIVERS)]

    def run(self) -> None:
        """Let it run to its end.

        Raises:
            ViolationError: an invariant does not hold.
            DeadlineError: it does not end.
        """
        self.store.start()
        for receiver in self.receivers:
            receiver.start()
        self._start_job()
        self.world.run(self._has_ended, limit_s=_LIMIT_S, limit_events=_LIMIT_EVENTS)
        expected = self._committed[max(self._committed)]
        for receiver in self.receivers:
            if receiver.rollout.bits() != expected:
                raise ViolationError(f"{receiver.name} does not end with the bits of a dense load")

    # --- the end ----------------------------------------------------------------------------------------------------

    def _has_ended(self) -> bool:
        state = self.store.state
        if state is None or state.attempt is not None or state.transition is not None:
            return False
        version = state.record.policy_version
        if version < _LAST_VERSION or not self._is_calm():
            return False
        return all(receiver.is_serving and receiver.reception.resident.policy_version == version for receiver in self.receivers)

    def _is_calm(self) -> bool:
        """Every planned fault has fired, or cannot any more because the run is longer than it was planned for."""
        state = self.store.state
        is_long = state is not None and state.record.policy_version >= _LAST_VERSION + 3
        return is_long or sum(self.faults.fired.values()) >= len(self.faults.planned)

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _receiver(self, name: str) -> ReceiverNode:
        node = ReceiverNode(self.network, name, LEASE, on_serve=self._on_serve, on_write=self._on_write, mutant=self._mutant)
        node.on_crash = self._restart_receiver
        return node

    def _restart_receiver(self, node: Node) -> None:
        self.tally.restarts += 1
        life = node.life

        def start() -> None:
            if node.life == life:
                node.start()

        self.world.after(self._random.uniform(0.1, 2 * LEASE.lease_s), start)

    def _start_job(self) -> None:
        """A training job from a checkpoint: the initial one, one of a committed version, or one that nobody has seen."""
        self.tally.jobs += 1
        trainee = Trainee()
        version = self.store.state.record.policy_version if self.store.state is not None else 0
        if version and self._random.random() < 0.5:
            _load(trainee, self._committed[version])
        elif version:
            trainee.step(self._random)
        job = Job(f"job{self.tally.jobs}", trainee, self._random)
        job.owners = [
            OwnerNode(
                self.network,
                f"owner-{self.tally.jobs}-{rank}",
                rank,
                trainee,
                on_candidate=self._on_candidate,
                mutant=self._mutant,
            )
            for rank in range(NUM_OWNERS)
        ]
        for owner in job.owners:
            owner.on_crash = lambda _: self._lose(job)
            owner.start()
        self._jobs.append(job)
        self._start_coordinator(job)

    def _start_coordinator(self, job: Job) -> None:
        node = CoordinatorNode(
            self.network,
            f"coordinator-{len(self._coordinators) + 1}",
            job,
            LEASE,
            audits=self._audits,
            delivery=self._delivery,
            on_end=self._on_end,
            on_refit=self._on_refit,
            mutant=self._mutant,
        )
        node.on_crash = self._replace_coordinator
        node.on_freeze = self._stand_in
        self._coordinators.append(node)
        node.start()

    # --- the supervisor ---------------------------------------------------------------------------------------------

    def _lose(self, job: Job) -> None:
        """A rank died: the whole job ends, and is started again."""
        job.crash()
        for coordinator in self._coordinators:
            if coordinator.job is job:
                coordinator.crash()
        self._ensure_job()

    def _replace_coordinator(self, node: Node) -> None:
        job = node.job if isinstance(node, CoordinatorNode) else None
        if job is not None and job.is_alive and self._random.random() < 0.5:
            self.tally.takeovers += 1
            self.world.after(self._random.uniform(0.1, LEASE.lease_s), lambda: self._take_over(job))
        elif job is not None:
            job.crash()
            self._ensure_job()

    def _take_over(self, job: Job) -> None:
        if job.is_alive:
            self._start_coordinator(job)
        else:
            self._ensure_job()

    def _stand_in(self, node: Node, span_s: float) -> None:
        """Somebody thinks that a frozen coordinator is dead: another process of the job, or another job, steps in."""
        job = node.job if isinstance(node, CoordinatorNode) else None
        if job is None or span_s < LEASE.lease_s:
            return
        self.tally.takeovers += 1
        if self._random.random() < 0.5:
            self.world.after(self._random.uniform(0.1, LEASE.lease_s), lambda: self._take_over(job))
        else:
            self.world.after(self._random.uniform(0.1, LEASE.lease_s), self._start_job)

    def _on_end(self, node: Node, why: str) -> None:
        """A coordinator stopped by itself."""
        self.tally.ends.append(why)
        if why.startswith("CommitConflictError") and len(self._coordinators) == 1:
            raise ViolationError(f"a conflict although nobody took over: {why}")
        self._ensure_job()

    def _ensure_job(self) -> None:
        """Some time from now, start a job if none has a coordinator."""

        def look() -> None:
            if not any(node.is_up and not node.has_ended for node in self._coordinators):
                for job in self._jobs:
                    job.crash()
                self._start_job()

        self.world.after(self._random.uniform(0.1, LEASE.lease_s), look)

    def _on_refit(self, node: Node) -> None:
        if self.faults.strikes("abort"):
            operator = Node(self.network, f"operator-{len(self.network.nodes)}")
            operator.start()
            operator.spawn(_abort(operator, self._random.uniform(0.0, 0.5)))
        del node

    # --- invariants -------------------------------------------------------------------------------------------------

    def _on_candidate(self, baseline: BaselineId, bits: bytes) -> None:
        if self._candidates.setdefault(baseline, bits) != bits:
            raise ViolationError(f"baseline {baseline} names two different policies")

    def _on_write(self, receiver: ReceiverNode, name: PayloadId) -> None:
        """Payloads of an attempt are applied in the declared order, each once."""
        key = (receiver.name, receiver.life, str(name.attempt))
        last = self._written.get(key)
        if last is not None and name <= last:
            raise ViolationError(f"{receiver.name} wrote {name} after {last}")
        self._written[key] = name

    def _on_change(self, before: ControlState | None, after: ControlState) -> None:
        """The record changed."""
        if before is None:
            return
        if after.revision != before.revision + 1 or after.epoch < before.epoch:
            raise ViolationError(f"the record went from revision {before.revision} to {after.revision}")
        if after.attempt is not None and (before.attempt is None or before.attempt.attempt != after.attempt.attempt):
            self.tally.attempts += 1
            self._required = {receiver.name: receiver.incarnation for receiver in self.receivers}
        step = after.record.policy_version - before.record.policy_version
        if step not in (0, 1):
            raise ViolationError(f"the record went from {before.record} to {after.record}")
        if step:
            self._on_commit(after)

    def _on_commit(self, state: ControlState) -> None:
        attempt, record = state.attempt, state.record
        self.tally.commits += 1
        if attempt is None or record.policy_version in self._committed:
            raise ViolationError(f"{record} was committed twice, or by nobody")
        candidate = self._candidates[record.baseline]
        self._committed[record.policy_version] = candidate
        for receiver in self.receivers:
            is_same = self._required.get(receiver.name) == receiver.incarnation and receiver.is_up
            if receiver.name in attempt.required and is_same and receiver.rollout.bits() != candidate:
                raise ViolationError(f"{record} was committed while {receiver.name} did not hold its bits")

    def _on_serve(self, receiver: ReceiverNode) -> None:
        """A request gate opened."""
        self.tally.served += 1
        version = receiver.reception.resident.policy_version
        if version is None or receiver.rollout.bits() != self._committed.get(version):
            raise ViolationError(f"{receiver.name} serves as version {version} with other bits than that version's")
        state = self.store.state
        if state is not None and state.committed_attempt is not None:
            self._check_baselines(state)

    def _check_baselines(self, state: ControlState) -> None:
        """No gate opens before every owner took over the baseline that the record names."""
        for job in self._jobs:
            for owner in job.owners:
                held = owner.machine.baseline
                if owner.is_up and job.baseline == state.record.baseline and held != state.record.baseline:
                    raise ViolationError(f"a gate opened while {owner.name} held baseline {held}, not that of {state.record}")


def _abort(operator: Node, pause_s: float) -> Generator[Future, Any, None]:
    """A person asks for the refit to be given up."""
    yield operator.sleep(pause_s)
    try:
        yield from RecordClient(operator).change(lambda state: rules.request_abort(state, reason="a person said so"))
    except RefitError:
        return


def _load(trainee: Trainee, bits: bytes) -> None:
    """Take these bits for the weights in training."""
    start = 0
    for words in trainee.weights.values():
        words.view("u1")[...] = memoryview(bits)[start : start + words.nbytes]
        start += words.nbytes
