"""A simulated training rank: the real ``Owner`` and ``OwnerMachine`` over small real shards, pushing payloads to receivers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from deltarefit import payload
from deltarefit.errors import AttemptFailedError, DeadlineError, TransportError
from deltarefit.ids import AttemptId, BaselineId, OwnerId
from deltarefit.protocol import BindOwner, OwnerMachine
from deltarefit.records import EncodingMode
from deltarefit.testing.simulation import calls
from deltarefit.testing.simulation.network import Network, Node
from deltarefit.testing.simulation.weights import Trainee, dense
from deltarefit.testing.simulation.world import Future, each
from deltarefit.transport import payload_digest

__all__ = ["OwnerNode"]

_AGAIN_S = 0.2
_PUSH_S = 20.0


class OwnerNode(Node):
    """One rank of a training job. The job's own calls reach it exactly once, as a process group's collectives do."""

    remembers_replies = True

    def __init__(
        self,
        network: Network,
        name: str,
        rank: int,
        trainee: Trainee,
        *,
        on_candidate: Callable[[BaselineId, bytes], None],
        mutant: str = "",
    ) -> None:
        super().__init__(network, name)
        self.rank = rank
        self._trainee = trainee
        self._on_candidate = on_candidate
        self._mutant = mutant

    def boot(self) -> None:
        self.owner = self._trainee.owner(self.rank)
        self.machine = OwnerMachine(OwnerId(self.rank), None)

    def handle(self, source: str, body: Any) -> Any:
        match body:
            case calls.Build():
                return self._build(body)
            case calls.StopSending(attempt=attempt):
                self.machine.mark_obsolete(attempt)
                return True
            case calls.CommitBaseline(record=record):
                if self.machine.must_update(record):
                    self.effect("baseline")
                    if self.network.faults.strikes("update fails"):
                        raise TransportError(f"owner {self.rank}: the update of its baseline broke off")
                    self.owner.commit()
                self.machine.updated(record)
                return self.owner.digests()
            case calls.Digests():
                return self.owner.digests()
            case calls.Rebase(baseline=baseline):
                self.machine.reinitialised(baseline)
                return self.owner.digests()
            case _:
                return True

    def _build(self, order: calls.Build) -> Generator[Future, Any, calls.Ended]:
        if order.starts_transition:
            self.machine.abandoned()
            self.owner.forget_candidate()
        self.machine.prepare(
            BindOwner(
                attempt=order.attempt,
                revision=order.revision,
                base=order.base,
                target=order.target,
                candidate=order.candidate,
                starts_transition=order.starts_transition,
            )
        )
        self._on_candidate(order.target.baseline, dense(self._trainee.weights))
        pushes: list[Future] = []
        for data in self._payloads(order):
            pushes += [self.spawn(self._push(order.attempt, receiver, data)) for receiver in order.receivers]
            yield self.sleep(self.world.random.uniform(0.0, 0.02))
            self.effect("sent")
        marker = self.machine.end(order.attempt)
        yield from each(pushes)
        yield from each([self.call(receiver, calls.OwnerEnded(marker), _PUSH_S) for receiver in order.receivers])
        if self._mutant == "advance the baseline early":
            self.owner.commit()
        return calls.Ended(marker, self.owner.candidate_digests())

    def _payloads(self, order: calls.Build) -> Generator[bytes, None, None]:
        skip = self._mutant == "overwrite retry over a subset" and order.mode is EncodingMode.OVERWRITE
        sequence = 0
        for bucket in self.owner.build(order.plan, order.mode):
            if skip:
                skip = False
                continue
            if not self.machine.is_active(order.attempt):
                raise AttemptFailedError(f"owner {self.rank}: {order.attempt} is over")
            data = payload.encode(
                bucket.items,
                attempt=order.attempt,
                owner=OwnerId(self.rank),
                sequence=sequence,
                base_version=order.base.policy_version,
                target_version=order.target.policy_version,
                plan_digest=order.plan.digest,
            )
            self.machine.sent(order.attempt, payload_digest(data))
            sequence += 1
            yield data

    def _push(self, attempt: AttemptId, receiver: str, data: bytes) -> Generator[Future, Any, None]:
        """Send one payload to one receiver until it is taken, or nobody wants it any more."""
        if self.network.faults.strikes("corrupt"):
            damaged = bytearray(data)
            damaged[self.world.random.randrange(len(damaged))] ^= 1 << self.world.random.randrange(8)
            data = bytes(damaged)
        end_s = self.world.now_s + _PUSH_S
        while self.machine.is_active(attempt):
            if self.world.now_s > end_s:
                raise DeadlineError(f"owner {self.rank}: {receiver} takes no payload of {attempt}")
            answer = yield self.call(receiver, calls.Deliver(attempt, data), _PUSH_S)
            if answer != "wait":
                return
            yield self.sleep(_AGAIN_S)
        raise AttemptFailedError(f"owner {self.rank}: {attempt} is over")
