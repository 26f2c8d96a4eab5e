"""The rules under every interleaving: writes that are decided now and arrive later, or never, by coordinators that replaced
each other. Checked against a plain history of what was committed. Then the same with planted bugs, which must be found."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deltarefit.errors import RefitError
from deltarefit.ids import AttemptId, BaselineId, EncodingMode, PolicyVersion, ReceiverId
from deltarefit.protocol import CommitOutcome, CommitRecord, CommitRequest, ControlState, PrepareRequest, encode_control
from deltarefit.protocol import commit as real_rules

RECEIVERS = tuple(ReceiverId(name) for name in ("r1", "r2"))
HOLDERS = ("x", "y", "z")
Rule = Callable[[ControlState], ControlState]


@dataclass(frozen=True)
class Write:
    """A swap that was decided and is under way."""

    seen_revision: int
    new: ControlState
    what: str
    attempt: AttemptId | None = None


class ControlWorld:
    """One record, three coordinators, writes under way; every change is checked as it happens.

    ``rules`` is the module under test, or a broken copy of it.
    """

    def __init__(self, rules: Any = real_rules) -> None:
        self.rules = rules
        self.state = rules.stamp(rules.create_run("run", "setup", CommitRecord(PolicyVersion(0), BaselineId("b0"))), "n0")
        self.under_way: list[Write] = []
        self.epochs: dict[str, int] = {}
        self.prepared: dict[AttemptId, PrepareRequest] = {}
        self.answered: set[AttemptId] = set()
        """Attempts of which read_commit said that they did not commit."""
        self.written: set[AttemptId] = set()
        """Attempts that were bound: receivers may hold bits of their candidates."""
        self.needs_dense = False
        """A transition was aborted after writes: only an attempt that sends everything repairs that."""
        self.committed: dict[int, BaselineId] = {0: BaselineId("b0")}
        self.blobs = {encode_control(self.state)}
        self.counter = 0

    # ---------------------------------------------------------------- the store

    def arrive(self, write: Write) -> bool:
        """The compare-and-set."""
        if write.seen_revision != self.state.revision:
            return False
        before, self.state = self.state, write.new
        blob = encode_control(self.state)
        assert blob not in self.blobs, "two records of a run have equal bytes"
        self.blobs.add(blob)
        self._check_step(before, self.state)
        self.check()
        return True

    def send(self, what: str, change: Rule, *, late: bool = False, attempt: AttemptId | None = None) -> bool:
        """Ask the rule now; let the write arrive now, or later. True if it took effect now."""
        try:
            new = change(self.state)
        except RefitError:
            return False
        if new is self.state:
            return False
        self.counter += 1
        write = Write(self.state.revision, self.rules.stamp(new, f"n{self.counter}"), what, attempt)
        if late:
            self.under_way.append(write)
            return False
        return self.arrive(write)

    def _check_step(self, before: ControlState, after: ControlState) -> None:
        assert after.epoch in (before.epoch, before.epoch + 1)
        version = after.record.policy_version
        assert version in (before.record.policy_version, before.record.policy_version + 1)
        attempt = before.attempt
        if version > before.record.policy_version:
            assert version not in self.committed, f"version {version} was committed twice"
            assert attempt is not None
            assert after.record.baseline == attempt.baseline
            assert attempt.attempt not in self.answered, "a commit took effect after read_commit had answered"
            assert attempt.epoch == before.epoch == after.epoch, "a replaced coordinator's attempt was committed"
            self.committed[version] = after.record.baseline
            self.needs_dense = self.needs_dense and not attempt.is_dense
        if after.attempt is not None and (attempt is None or attempt.attempt != after.attempt.attempt):
            self._check_bound(self.prepared[after.attempt.attempt])

    def _check_bound(self, request: PrepareRequest) -> None:
        """What receivers would suffer from this attempt, given what may have been written before it."""
        base_version = request.base.policy_version
        earlier = [self.prepared[name] for name in self.written if self.prepared[name].base.policy_version == base_version]
        if earlier and not request.is_dense:
            assert request.mode is EncodingMode.OVERWRITE, "a mixed attempt on weights that are in doubt"
            assert {other.candidate for other in earlier} == {request.candidate}, "another candidate on weights in doubt"
            assert not any(other.is_dense for other in earlier), "a sparse attempt where a dense one was needed"
        assert request.is_dense or not self.needs_dense, "a sparse attempt after an abort that left weights in doubt"
        self.written.add(request.attempt)

    def check(self) -> None:
        """What holds after every step."""
        state = self.state
        assert self.committed[state.record.policy_version] == state.record.baseline
        for name in self.answered:
            assert state.record.baseline != self.prepared[name].baseline
        if state.repair and state.open_attempt is not None:
            assert state.open_attempt.is_dense

    # ---------------------------------------------------------------- what coordinators and operators do

    def acquire(self, holder: str, *, expired: bool, late: bool) -> None:
        proof = self.state.epoch if expired else None
        if self.send(
            "acquire",
            lambda state: self.rules.acquire(state, holder=holder, setup_digest="setup", expired_epoch=proof),
            late=late,
        ):
            self.epochs[holder] = self.state.epoch

    def release(self, holder: str) -> None:
        epoch = self.epochs.get(holder, 0)
        self.send("release", lambda state: self.rules.release(state, epoch=epoch, holder=holder))

    def prepare(self, holder: str, mode: EncodingMode, *, is_dense: bool, candidate: str, late: bool) -> None:
        self.counter += 1
        attempt = AttemptId(f"a{self.counter:04d}")
        request = PrepareRequest(
            epoch=self.epochs.get(holder, 0), attempt=attempt, baseline=BaselineId(f"b-{attempt}"), base=self.state.record,
            mode=mode, is_dense=is_dense, candidate=candidate, plan_digest="p", required=frozenset(RECEIVERS),
        )  # fmt: skip
        self.prepared[attempt] = request
        self.send("prepare", lambda state: self.rules.prepare(state, request), late=late, attempt=attempt)

    def commit(self, name: AttemptId, acknowledged: frozenset[ReceiverId], *, late: bool) -> None:
        request = self.prepared[name]
        commit = CommitRequest(
            epoch=request.epoch, attempt=name, baseline=request.baseline, acknowledged=acknowledged, policy_digest="d"
        )

        def change(state: ControlState) -> ControlState:
            outcome, new = self.rules.commit(state, commit)
            assert isinstance(outcome, CommitOutcome)
            if outcome is CommitOutcome.SUCCESS and new is state:
                assert self.committed[request.base.policy_version + 1] == request.baseline
            assert new is state or acknowledged == set(RECEIVERS), "a commit without every acknowledgement"
            return new

        self.send("commit", change, late=late, attempt=name)

    def read_commit(self, name: AttemptId) -> None:
        """Fence, then answer. Asked only about attempts whose prepare was answered: a later one may still bind."""
        self.send("fence", lambda state: self.rules.mark_obsolete(state, attempt=name), attempt=name)
        if any(write.attempt == name and write.what == "prepare" for write in self.under_way):
            return
        if self.state.record.baseline != self.prepared[name].baseline:
            self.answered.add(name)

    def close(self, holder: str) -> None:
        attempt = self.state.attempt
        epoch = self.epochs.get(holder, 0)
        if attempt is not None:
            name = attempt.attempt
            self.send("close", lambda state: self.rules.close_attempt(state, epoch=epoch, attempt=name))

    def request_abort(self, *, late: bool) -> None:
        self.send("abort", lambda state: self.rules.request_abort(state, reason="x"), late=late)

    def record_abort(self, holder: str) -> None:
        epoch = self.epochs.get(holder, 0)
        if self.send("abort", lambda state: self.rules.record_abort(state, epoch=epoch, repair="in doubt")):
            self.written.clear()
            self.needs_dense = True

    def land(self, which: int, *, lost: bool) -> None:
        """One of the writes under way arrives, or is lost."""
        if self.under_way:
            write = self.under_way.pop(which % len(self.under_way))
            if not lost:
                self.arrive(write)

    def recent(self, which: int) -> AttemptId | None:
        names = sorted(self.prepared)[-3:]
        return names[which % len(names)] if names else None


# ---------------------------------------------------------------------------------------------- Hypothesis drives it

_holders = st.sampled_from(HOLDERS)
_which = st.integers(0, 2)


class ControlModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = ControlWorld()

    @rule(holder=_holders, expired=st.booleans(), late=st.booleans())
    def acquire(self, holder: str, expired: bool, late: bool) -> None:
        self.world.acquire(holder, expired=expired, late=late)

    @rule(holder=_holders)
    def release(self, holder: str) -> None:
        self.world.release(holder)

    @rule(holder=_holders, mode=st.sampled_from(EncodingMode), dense=st.booleans(), other=st.booleans(), late=st.booleans())
    def prepare(self, holder: str, mode: EncodingMode, dense: bool, other: bool, late: bool) -> None:
        self.world.prepare(holder, mode, is_dense=dense, candidate="w'" if other else "w", late=late)

    @rule(which=_which, acknowledged=st.frozensets(st.sampled_from(RECEIVERS)), late=st.booleans())
    def commit(self, which: int, acknowledged: frozenset[ReceiverId], late: bool) -> None:
        if name := self.world.recent(which):
            self.world.commit(name, acknowledged, late=late)

    @rule(which=_which)
    def read_commit(self, which: int) -> None:
        if name := self.world.recent(which):
            self.world.read_commit(name)

    @rule(holder=_holders)
    def close(self, holder: str) -> None:
        self.world.close(holder)

    @rule(late=st.booleans())
    def request_abort(self, late: bool) -> None:
        self.world.request_abort(late=late)

    @rule(holder=_holders)
    def record_abort(self, holder: str) -> None:
        self.world.record_abort(holder)

    @rule(which=_which, lost=st.booleans())
    def land(self, which: int, lost: bool) -> None:
        self.world.land(which, lost=lost)

    @invariant()
    def holds(self) -> None:
        self.world.check()


TestControlModel = ControlModel.TestCase
TestControlModel.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# ---------------------------------------------------------------------------------------------- a fast walk, and planted bugs


def walk(rules: Any, seed: int, num_steps: int = 25) -> ControlWorld:
    """A seeded walk that mostly does sensible things, so that it gets far."""
    dice = random.Random(seed)
    world = ControlWorld(rules)
    for _ in range(num_steps):
        active = [holder for holder, epoch in world.epochs.items() if epoch == world.state.epoch]
        holder = dice.choice(active or HOLDERS) if dice.random() < 0.8 else dice.choice(HOLDERS)
        late = dice.random() < 0.3
        name = world.recent(dice.randrange(3))
        choice = dice.random()
        if not world.epochs or choice < 0.08:
            world.acquire(holder, expired=dice.random() < 0.8, late=late and bool(world.epochs))
        elif choice < 0.35:
            is_dense = dice.random() < 0.2
            mode = EncodingMode.OVERWRITE if is_dense or dice.random() < 0.5 else EncodingMode.MIXED
            world.prepare(holder, mode, is_dense=is_dense, candidate=dice.choice(("w", "w", "w'")), late=late)
        elif choice < 0.55 and name is not None:
            world.commit(name, frozenset(RECEIVERS if dice.random() < 0.8 else RECEIVERS[:1]), late=late)
        elif choice < 0.7 and name is not None:
            world.read_commit(name)
        elif choice < 0.8:
            world.close(holder)
        elif choice < 0.84:
            world.request_abort(late=late)
        elif choice < 0.88:
            world.record_abort(holder)
        else:
            world.land(dice.randrange(4), lost=dice.random() < 0.2)
    return world


def test_a_thousand_seeded_walks_hold_and_get_far() -> None:
    versions = [walk(real_rules, seed).state.record.policy_version for seed in range(1000)]
    assert sum(version >= 1 for version in versions) > 250
    assert max(versions) >= 3


def _skip_the_fence(state: ControlState, *, attempt: AttemptId) -> ControlState:
    return state


def _commit_that_ignores_the_fence(state: ControlState, request: CommitRequest) -> tuple[CommitOutcome, ControlState]:
    attempt = state.attempt
    if attempt is not None and attempt.is_obsolete:
        state = msgspec.structs.replace(state, attempt=msgspec.structs.replace(attempt, is_obsolete=False))
    return real_rules.commit(state, request)


def _commit_before_the_last_acknowledgement(state: ControlState, request: CommitRequest) -> tuple[CommitOutcome, ControlState]:
    return real_rules.commit(state, replace(request, acknowledged=frozenset(RECEIVERS)))


def _commit_of_a_replaced_coordinator(state: ControlState, request: CommitRequest) -> tuple[CommitOutcome, ControlState]:
    return real_rules.commit(state, replace(request, epoch=state.epoch))


def _forget_admission(state: ControlState, request: PrepareRequest) -> ControlState:
    return real_rules.prepare(msgspec.structs.replace(state, transition=None), request)


def _let_the_candidate_change(state: ControlState, request: PrepareRequest) -> ControlState:
    before = state.transition
    if before is not None:
        state = msgspec.structs.replace(state, transition=msgspec.structs.replace(before, candidate=request.candidate))
    return real_rules.prepare(state, request)


def _let_density_go(state: ControlState, request: PrepareRequest) -> ControlState:
    before = state.transition
    if before is not None:
        state = msgspec.structs.replace(state, transition=msgspec.structs.replace(before, is_dense=False))
    return real_rules.prepare(state, request)


def _stamp_without_revision(state: ControlState, nonce: str) -> ControlState:
    del nonce
    return msgspec.structs.replace(state, nonces=())


def _forget_the_repair(state: ControlState, *, epoch: int, repair: str) -> ControlState:
    del repair
    return msgspec.structs.replace(real_rules.record_abort(state, epoch=epoch, repair=""), repair="")


@pytest.mark.parametrize(
    "mutant",
    [
        {"mark_obsolete": _skip_the_fence},
        {"commit": _commit_that_ignores_the_fence},
        {"commit": _commit_before_the_last_acknowledgement},
        {"commit": _commit_of_a_replaced_coordinator},
        {"prepare": _forget_admission},
        {"prepare": _let_the_candidate_change},
        {"prepare": _let_density_go},
        {"record_abort": _forget_the_repair},
        {"stamp": _stamp_without_revision},
    ],
    ids=lambda mutant: next(iter(mutant.values())).__name__,
)
def test_a_planted_bug_is_found(mutant: dict[str, Callable[..., Any]]) -> None:
    broken = SimpleNamespace(**{name: getattr(real_rules, name) for name in real_rules.__all__})
    broken.__dict__.update(mutant)
    with pytest.raises(AssertionError):
        _walk_until_it_fails(broken)


def _walk_until_it_fails(rules: Any) -> None:
    for seed in range(3000):
        walk(rules, seed)
