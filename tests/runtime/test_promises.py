"""What a refit promises besides the bits: the order of effects, quiet after a stop, no thread left, the past unheard."""

from __future__ import annotations

import threading

import msgspec
import pytest

import deltarefit
from deltarefit.control import MemoryRecordStore, SwapUncertainError
from deltarefit.errors import DeadlineError, TransportError
from deltarefit.runtime import messages, session
from deltarefit.runtime.clock import RandomIds, SystemClock
from deltarefit.runtime.engine import LocalEngine
from deltarefit.runtime.gate import LocalGate
from deltarefit.runtime.messages import Call, decode_message, encode_message
from deltarefit.testing.faults import CorruptingSender, FailingSender, FaultPlan
from deltarefit.transport import Mailbox, RunStore

from .pair import RECEIVER_SETTINGS, SETTINGS, Fused, Pair, Policy, perturb, raw, wait_until

pytestmark = pytest.mark.torch

CLOCK = SystemClock()
EFFECTS = ("close_gate", "apply", "synchronize", "drop_caches", "publish", "reopen_gate")


class Watched(LocalEngine):
    """An engine that notes what is asked of it, and can be slow."""

    def __init__(self, model, gate):
        super().__init__(model, model.load_weights, request_gate=gate)
        self.done = []
        self.apply_s = 0.0
        self.applied_s = []
        for name in EFFECTS:
            setattr(self, name, self._watched(name, getattr(self, name)))

    def _watched(self, name, inner):
        def call(*arguments):
            if name == "apply" and self.apply_s:
                CLOCK.sleep(self.apply_s)
            result = inner(*arguments)
            self.done.append(name)
            if name == "apply":
                self.applied_s.append(CLOCK.monotonic_s())
            return result

        return call


@pytest.fixture
def watched(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        model, gate = Fused(pair.policy), LocalGate()
        engine = Watched(model, gate)
        settings = msgspec.structs.replace(RECEIVER_SETTINGS, lease_s=2.0)
        receiver = deltarefit.Receiver(engine, run=pair.run, name="rollout", request_gate=gate, settings=settings)
        pair.models.append(model)
        pair.stack.enter_context(receiver.start())
        pair.engine, pair.receiver, pair.gate = engine, receiver, gate
        yield pair


def effects_of(engine):
    done, engine.done[:] = [name for name in engine.done if name != "synchronize"], []
    return done


def test_caches_are_dropped_and_the_gate_opens_once_whatever_happened_before(watched):
    plan = FaultPlan(lambda name: name.attempt.startswith("v000002-a1"))
    publisher = watched.publisher(
        settings=msgspec.structs.replace(SETTINGS, bucket_nbytes=64, chunk_nbytes=64),
        wrap_sender=lambda sender: CorruptingSender(sender, plan),
    )
    for step in range(3):
        perturb(watched.policy, step)
        report = publisher.refit()
        done = effects_of(watched.engine)
        assert report.attempts == (2 if step == 1 else 1)
        assert done[-3:] == ["drop_caches", "publish", "reopen_gate"]
        assert (done.count("drop_caches"), done.count("reopen_gate")) == (1, 1)
        assert done[0] == "close_gate"
        assert 1 <= done.count("close_gate") <= report.attempts, "an attempt may fail before the gate was asked to close"
        watched.assert_equal()


def test_a_stop_waits_for_the_write_that_is_under_way(watched):
    """The attempt fails while the engine is in the middle of a slow write; the retry begins only after it."""
    watched.engine.apply_s = 1.5
    plan = FaultPlan(lambda name: name.sequence == 1 and "-a1-" in name.attempt, times=None)
    publisher = watched.publisher(
        settings=msgspec.structs.replace(SETTINGS, bucket_nbytes=64, chunk_nbytes=64),
        wrap_sender=lambda sender: FailingSender(sender, plan),
    )
    events = []
    publisher.subscribe(events.append)
    perturb(watched.policy, 0)
    report = publisher.refit()
    assert report.attempts == 2
    assert plan.fired > 1, "each send is tried several times"
    (stop,) = [event for event in events if event.stage == "stop"]
    first_attempt = [moment for moment in watched.engine.applied_s if moment < stop.t1_s]
    assert len(first_attempt) == 1
    assert stop.t0_s < first_attempt[0] < stop.t1_s
    watched.assert_equal()


def test_no_thread_is_left_after_failures(tmp_path):
    before = set(threading.enumerate())
    with Pair(tmp_path) as pair:
        plan = FaultPlan(times=2)
        publisher = pair.publisher(wrap_sender=lambda sender: CorruptingSender(sender, plan))
        perturb(pair.policy, 0)
        assert publisher.refit().attempts == 3
        pair.assert_equal()
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]
    assert [name for name in left if name.startswith("deltarefit")] == []


def test_a_second_call_while_one_runs_is_refused(watched):
    watched.engine.apply_s = 0.5
    publisher = watched.publisher()
    perturb(watched.policy, 0)
    results = []
    thread = threading.Thread(target=lambda: results.append(publisher.refit()))
    thread.start()
    while not watched.engine.done:
        CLOCK.sleep(0.005)
    with pytest.raises(deltarefit.RejectedError, match="one at a time"):
        publisher.refit()
    thread.join()
    assert results[0].policy_version == 1


def test_calls_of_attempts_that_are_over_change_nothing(watched, monkeypatch):
    """Everything that the coordinator ever posted arrives a second time, long after."""
    posted = []
    original = Mailbox.post

    def post(self, to, data):
        if to == "rollout":
            posted.append((self, data))
        original(self, to, data)

    monkeypatch.setattr(Mailbox, "post", post)
    plan = FaultPlan(lambda name: "-a1-" in name.attempt)
    publisher = watched.publisher(wrap_sender=lambda sender: CorruptingSender(sender, plan))
    for step in range(2):
        perturb(watched.policy, step)
        publisher.refit()
    monkeypatch.setattr(Mailbox, "post", original)
    held = raw(watched.models[0])
    kinds = {type(decode_message(data, Call, sender="test").body) for _, data in posted}
    assert {messages.Prepare, messages.OpenApply, messages.Flush, messages.Stop, messages.DropCaches} <= kinds
    effects_of(watched.engine)
    for mailbox, data in posted:
        original(mailbox, "rollout", data)
    perturb(watched.policy, 2)
    report = publisher.refit()  # messages of one sender come in order, so all of the past is through when this one begins
    assert report.attempts == 1
    assert held != raw(watched.models[0])
    watched.assert_equal()
    assert effects_of(watched.engine).count("apply") == report.payloads
    with watched.receiver.serving(5.0):
        assert watched.receiver.policy_version == 3


def test_calls_of_a_replaced_coordinator_and_to_an_earlier_self_are_dropped(watched):
    publisher = watched.publisher()
    perturb(watched.policy, 0)
    publisher.refit()
    effects_of(watched.engine)
    mailbox = Mailbox(publisher._store, "coordinator-1", clock=CLOCK, nonce=RandomIds().nonce())
    incarnation = watched.receiver._presence.shown.incarnation
    for epoch, meant in ((0, incarnation), (9, "another")):
        mailbox.post(
            "rollout", encode_message(Call("x-1", epoch, meant, messages.DropCaches("v000001-a1-0", _record(publisher))))
        )
    perturb(watched.policy, 1)
    publisher.refit()
    assert effects_of(watched.engine).count("drop_caches") == 1


def _record(publisher):
    return publisher._session.control.read().record


# --- a control plane that is out of reach, or loses its replies -----------------------------------------------------------


class Flaky(MemoryRecordStore):
    """A record store that misbehaves at chosen swaps."""

    def __init__(self):
        super().__init__("flaky")
        self.lose = ()
        """Numbers of swaps whose reply is lost although they took effect."""
        self.drop = ()
        """Numbers of swaps that never arrive."""
        self.number = 0
        self.struck = 0
        self.is_down = False

    def read(self):
        if self.is_down:
            raise TransportError("flaky: no route to the store")
        return super().read()

    def swap(self, tag, new):
        self.number += 1
        if self.is_down:
            raise SwapUncertainError("flaky: no route to the store")
        if self.number in self.drop:
            self.struck += 1
            raise SwapUncertainError("dropped")
        done = super().swap(tag, new)
        if self.number in self.lose:
            self.struck += 1
            raise SwapUncertainError("its reply was lost")
        return done


@pytest.fixture
def flaky(monkeypatch):
    store = Flaky()
    monkeypatch.setattr(session, "record_store", lambda _: store)
    return store


@pytest.mark.parametrize("fault", ["lose", "drop"])
@pytest.mark.parametrize("number", range(1, 8))
def test_a_reply_of_the_control_plane_that_is_lost_decides_nothing(tmp_path, flaky, fault, number):
    """Every swap of the first refit in turn: create, acquire, prepare, commit, close, and those of the next refit."""
    setattr(flaky, fault, (number,))
    with Pair(tmp_path) as pair:
        pair.refit_at_once(pair.publisher(), 2)
        assert flaky.struck == 1


class Hasty(SystemClock):
    """Sleeps a hundredth of what it is asked to, so that a minute of patience passes quickly."""

    def sleep(self, seconds):
        super().sleep(seconds / 100)


def test_a_control_plane_that_is_gone_for_long_asks_for_a_person_and_the_refit_goes_on_when_it_is_back(tmp_path, flaky):
    with Pair(tmp_path) as pair:

        class Cutting(FailingSender):
            def send(self, payload_id, data):
                flaky.is_down = self.plan.strikes(payload_id) or flaky.is_down
                self.inner.send(payload_id, data)

        plan = FaultPlan(lambda name: name.attempt.startswith("v000002"))
        publisher = pair.publisher(clock=Hasty(), wrap_sender=lambda sender: Cutting(sender, plan))
        perturb(pair.policy, 0)
        publisher.refit()
        perturb(pair.policy, 1)
        with pytest.raises(deltarefit.OperatorRequiredError, match="out of reach"):
            publisher.refit()
        flaky.is_down = False
        assert publisher.refit().policy_version == 2
        pair.assert_equal()
        with pair.receivers[0].serving(5.0):
            assert pair.receivers[0].policy_version == 2


def test_a_receiver_that_cannot_reach_the_store_shuts_its_gate_and_opens_it_when_the_store_is_back(watched, monkeypatch):
    publisher = watched.publisher(settings=msgspec.structs.replace(SETTINGS, lease_s=5.0))
    perturb(watched.policy, 0)
    publisher.refit()
    receiver = watched.receiver
    first = receiver._presence.shown.incarnation
    put = RunStore.put

    def unreachable(store, key, data):
        if key.startswith("members/"):
            raise TransportError(f"{key}: no route to the store")
        put(store, key, data)

    monkeypatch.setattr(RunStore, "put", unreachable)
    wait_until(lambda: not watched.gate.is_open)
    with pytest.raises(DeadlineError):
        receiver.serving(0.1).__enter__()
    monkeypatch.setattr(RunStore, "put", put)
    with receiver.serving(10.0):
        assert receiver.policy_version == 1
    assert receiver._presence.shown.incarnation != first
    perturb(watched.policy, 1)
    assert publisher.refit().receivers == ("rollout",)
    watched.assert_equal()


def test_without_receivers_versions_are_committed_and_a_late_one_is_restored(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        publisher = pair.publisher(settings=msgspec.structs.replace(SETTINGS, min_receivers=0))
        perturb(pair.policy, 0)
        assert publisher.refit().receivers == ()
        model = Fused(Policy())
        pair.models.append(model)
        receiver = pair.attach(model, "late")
        receiver.wait_joined(10.0)
        perturb(pair.policy, 1)
        report = publisher.refit()
        assert (report.policy_version, report.receivers) == (2, ("late",))
        pair.assert_equal()


def test_a_trainer_that_comes_back_with_the_committed_weights_goes_on_with_deltas(pair):
    first = pair.publisher()
    perturb(pair.policy, 0)
    first.refit()
    first.close()
    second = pair.publisher()
    pair.policy.first.data[0, 0] += 1
    report = second.refit()
    assert (report.policy_version, report.changed_elements) == (2, 1)
    assert report.payload_nbytes < 600, "expected one element, not every one"
    pair.assert_equal()


def test_a_trainer_that_comes_back_with_other_weights_sends_every_element(pair):
    first = pair.publisher()
    perturb(pair.policy, 0)
    first.refit()
    first.close()
    perturb(pair.policy, 5)  # a checkpoint that no receiver ever saw
    second = pair.publisher()
    report = second.refit()
    assert report.policy_version == 2
    assert report.payload_nbytes > 24 * 16 * 2
    pair.assert_equal()
