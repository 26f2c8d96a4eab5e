"""Failures of serving engines that people met with weight updates elsewhere, at a whole receiver. Named after what they saw."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch

import deltarefit
from deltarefit.errors import AttemptFailedError, DeadlineError, OperatorRequiredError
from deltarefit.runtime.clock import RandomIds, SystemClock
from deltarefit.runtime.engine import LocalEngine
from deltarefit.runtime.gate import LocalGate
from deltarefit.runtime.session import control_plane
from deltarefit.testing.faults import CorruptingSender, FailingSender, FaultPlan
from deltarefit.transport import open_run

from .pair import RECEIVER_SETTINGS, SETTINGS, Fused, Pair, Policy, perturb, raw

pytestmark = pytest.mark.torch


class CachedEngine(LocalEngine):
    """Answers from a cache of prompts, counts requests that a label aborts, and misbehaves on order."""

    def __init__(self, model, gate):
        super().__init__(model, model.load_weights, request_gate=gate)
        self.model = model
        self.cache = {}
        self.log = []
        self.troubles = []
        """What the next applications raise or wait for."""
        self.refuses_reset = 0
        self.reset_answer = None
        """What the hook answers while it does nothing; raises if that is None."""
        self.opening_troubles = {}
        """What labelling the engine and opening its gate raise next, by call."""

    def answer(self, prompt):
        """A request: what a prompt gives under the weights of the first time it was asked."""
        return self.cache.setdefault(prompt, self.fresh(prompt))

    def fresh(self, prompt):
        """The same, computed anew: every weight counts."""
        return prompt + int(self.model.fused.view(torch.int16).long().sum())

    def close_gate(self, timeout_s):
        self.log.append("close")
        super().close_gate(timeout_s)

    def apply(self, data):
        self.log.append("apply")
        if self.troubles:
            trouble = self.troubles.pop(0)
            if isinstance(trouble, Exception):
                raise trouble
            trouble.wait(30.0)
        return super().apply(data)

    def drop_caches(self):
        self.log.append("drop")
        if self.refuses_reset:
            self.refuses_reset -= 1
            if self.reset_answer is None:
                raise OperatorRequiredError("the prefix cache was not dropped: {'todo': 'not supported'}")
            return self.reset_answer
        self.cache.clear()
        return True

    def publish(self, policy_version):
        self.log.append("publish")
        if "publish" in self.opening_troubles:
            raise self.opening_troubles.pop("publish")
        super().publish(policy_version)

    def reopen_gate(self):
        self.log.append("reopen")
        if "reopen" in self.opening_troubles:
            raise self.opening_troubles.pop("reopen")
        super().reopen_gate()


class Served:
    """A trainer and one receiver around a CachedEngine."""

    def __init__(self, pair, **settings):
        self.pair = pair
        self.engines, self.receivers = [], []
        for number in range(settings.pop("num_receivers", 1)):
            gate = LocalGate()
            model = Fused(pair.policy)
            pair.models.append(model)
            self.engines.append(CachedEngine(model, gate))
            receiver = deltarefit.Receiver(
                self.engines[-1], run=pair.run, name=f"rollout-{number}", request_gate=gate, settings=RECEIVER_SETTINGS
            )
            self.receivers.append(pair.stack.enter_context(receiver.start()))
        options = {name: settings.pop(name) for name in ("wrap_sender", "clock") if name in settings}
        self.publisher = pair.publisher(settings=msgspec.structs.replace(SETTINGS, **settings), **options)

    def wait_joined(self):
        for receiver in self.receivers:
            receiver.wait_joined(20.0)

    def refit(self, seed):
        perturb(self.pair.policy, seed)
        return self.publisher.refit()


@pytest.fixture
def make(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        yield lambda **settings: Served(pair, **settings)


def test_answers_come_from_a_cache_of_older_weights(make):
    """Three refits, the second with a failed attempt: caches go after the last write and before any request."""
    damage = FaultPlan(lambda name: name.attempt.startswith("v000002-a1"))
    served = make(wrap_sender=lambda sender: CorruptingSender(sender, damage))
    engine = served.engines[0]
    for seed in range(3):
        with served.receivers[0].serving(5.0):
            engine.answer(3)
        engine.log.clear()
        served.refit(seed)
        with served.receivers[0].serving(5.0):
            assert engine.answer(3) == engine.fresh(3)
        last_write = max(place for place, call in enumerate(engine.log) if call == "apply")
        assert last_write < engine.log.index("drop") < engine.log.index("reopen")
        assert engine.log.count("reopen") == 1, "no request between a failed attempt and its retry"
    assert damage.fired == 1


def test_an_attempt_that_was_given_up_after_writing_leaves_the_gate_closed_and_the_cache_goes_before_the_next_request(make):
    served = make(max_attempts=1)
    engine = served.engines[0]
    served.refit(0)
    with served.receivers[0].serving(5.0):
        engine.answer(3)
    engine.troubles = [AttemptFailedError("half of it was written")]
    with pytest.raises(OperatorRequiredError):
        served.refit(1)
    with pytest.raises(DeadlineError):
        served.receivers[0].serving(0.2).__enter__()
    engine.log.clear()
    served.publisher.refit()
    assert engine.log.index("drop") < engine.log.index("reopen")
    with served.receivers[0].serving(5.0):
        assert engine.answer(3) == engine.fresh(3)
    served.pair.assert_equal()


@pytest.mark.parametrize(
    "answer", [None, False, {"todo": "not supported"}, "unsupported"], ids=["raises", "false", "todo", "text"]
)
def test_a_cache_reset_that_did_nothing_is_ignored(make, answer):
    """The version is committed, but this engine may not serve it: it is shut, and named, until its cache is gone."""
    served = make(num_receivers=2, min_receivers=2)
    engine, receiver = served.engines[0], served.receivers[0]
    engine.reset_answer = answer
    served.refit(0)
    with receiver.serving(5.0):
        engine.answer(3)
    engine.refuses_reset = 10**6
    report = served.refit(1)
    assert report.policy_version == 2
    with pytest.raises(DeadlineError):
        receiver.serving(0.5).__enter__()
    with served.receivers[1].serving(5.0):
        pass
    assert engine.cache
    engine.refuses_reset = 0
    with receiver.serving(10.0):  # it tried again by itself
        assert engine.answer(3) == engine.fresh(3)
    served.refit(2)
    served.pair.assert_equal()


def test_the_hook_of_a_plain_module_says_that_its_cache_stays(tmp_path):
    """A module has no engine around it: whoever serves it drops caches in ``on_refit``, and that may fail too."""
    with Pair(tmp_path, num_receivers=0) as pair:
        pair.models.append(Fused(pair.policy))
        answers = [None, False, {"todo": "not supported"}, RuntimeError("the cache is held")]
        asked = []

        def on_refit(policy_version):
            asked.append(policy_version)
            answer = answers[0] if len(answers) == 1 else answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        receiver = pair.attach(pair.models[0], "rollout", on_refit=on_refit)
        publisher = pair.publisher()
        perturb(pair.policy, 0)
        publisher.refit()
        with receiver.serving(5.0):
            assert asked == [1]
        perturb(pair.policy, 1)
        assert publisher.refit().policy_version == 2
        with pytest.raises(DeadlineError):
            receiver.serving(0.5).__enter__()
        answers[:] = [True]
        with receiver.serving(10.0):  # it asked again by itself
            pair.assert_equal()
        assert set(asked[1:]) == {2}


@pytest.mark.parametrize("call", ["publish", "reopen"])
@pytest.mark.parametrize("when", ["at the end of a refit", "between refits"])
def test_an_engine_that_could_not_be_opened_once_stays_shut_until_the_next_refit(make, call, when):
    served = make()
    engine, receiver = served.engines[0], served.receivers[0]
    served.refit(0)
    trouble = {call: AttemptFailedError("the server did not answer")}
    if when == "at the end of a refit":
        engine.opening_troubles = trouble
        served.refit(1)
    else:
        engine.refuses_reset = 10**6
        served.refit(1)
        engine.opening_troubles = trouble
        engine.refuses_reset = 0
    with receiver.serving(10.0):  # it tried again by itself
        assert engine.policy_version == 2
    assert not engine.opening_troubles
    served.pair.assert_equal()


def test_a_receiver_that_fails_is_heard_in_its_own_words(make):
    served = make(max_attempts=1)
    served.engines[0].troubles = [AttemptFailedError("device 3 fell off the bus")]
    with pytest.raises(OperatorRequiredError, match="receiver rollout-0: device 3 fell off the bus"):
        served.refit(0)


def test_a_receiver_that_stops_answering_does_not_hang_the_trainer(make):
    released = threading.Event()
    served = make(max_attempts=1, reply_timeout_s=0.5, request_timeout_s=0.5)
    served.engines[0].troubles = [released]
    try:
        with pytest.raises(OperatorRequiredError, match=r"receiver rollout-0: .*no answer within \d+ s although it is alive"):
            served.refit(0)
    finally:
        released.set()


def test_publishing_the_version_label_aborts_running_requests(make):
    """The label comes while the gate is closed, after the last running request ended; it opens and closes nothing itself."""
    served = make()
    engine = served.engines[0]
    served.refit(0)
    engine.log.clear()
    served.refit(1)
    assert engine.log == ["close", "apply", "drop", "publish", "reopen"]
    assert engine.policy_version == 2


def test_a_reload_returned_weights_of_an_older_version_under_the_newest_label(make):
    """Its storage holds version 1 while everybody takes it for version 3: found before a difference is applied to it."""
    served = make()
    engine = served.engines[0]
    served.refit(0)
    older = {name: tensor.clone() for name, tensor in served.pair.policy.state_dict().items()}
    served.refit(1)
    served.refit(2)
    engine.model.load_weights(older.items())
    assert not served.publisher.audit().is_clean
    report = served.refit(3)
    assert report.attempts == 1
    served.pair.assert_equal()


def test_state_outside_the_module_is_claimed_to_be_verified(make):
    """A table in a Python global is out of reach, and the report does not say otherwise."""
    served = make()
    report = served.refit(0)
    assert report.covered == "every parameter and buffer that a canonical tensor reaches, on 1 rank"
    audit = served.publisher.audit()
    assert audit.receivers[0].covered == report.covered
    assert (audit.num_tensors, audit.receivers[0].proven) == (3, 3)


def test_a_wrong_number_of_elements_is_taken_for_success(make):
    """An engine that applies nothing and says so in good faith: the version is not published."""
    served = make(max_attempts=1)
    served.engines[0].apply = lambda data: 0
    with pytest.raises(OperatorRequiredError, match=r"does not hold the candidate after applying .* 3 of 3 tensors differ"):
        served.refit(0)
    assert served.publisher.policy_version == 0
    assert served.engines[0].policy_version is None


def test_a_recovered_engine_gets_requests_while_it_holds_the_start_weights(make):
    served = make()
    for seed in range(2):
        served.refit(seed)
    gate = LocalGate()
    model = Fused(Policy())
    engine = CachedEngine(model, gate)
    receiver = deltarefit.Receiver(engine, run=served.pair.run, name="back", request_gate=gate, settings=RECEIVER_SETTINGS)
    with pytest.raises(DeadlineError):
        receiver.serving(0.05).__enter__()
    served.pair.stack.enter_context(receiver.start())
    receiver.wait_joined(10.0)
    with pytest.raises(DeadlineError):
        receiver.serving(0.2).__enter__()
    served.pair.models.append(model)
    served.refit(2)
    with receiver.serving(5.0):
        served.pair.assert_equal()


def test_an_engine_outlives_its_receiver_and_keeps_the_cache_that_was_to_be_dropped(make):
    """A server goes on while the process beside it dies, right after the new weights were in place."""
    served = make(num_receivers=2, min_receivers=1)
    engine = served.engines[0]
    served.wait_joined()  # one is enough for a refit
    served.refit(0)
    with served.receivers[0].serving(5.0):
        engine.answer(3)
    engine.refuses_reset = 10**6
    served.refit(1)
    served.receivers[0].close()
    engine.refuses_reset = 0
    successor = deltarefit.Receiver(
        engine, run=served.pair.run, name="rollout-0", request_gate=engine.request_gate, settings=RECEIVER_SETTINGS
    )
    with successor.start(), successor.serving(10.0):
        assert engine.answer(3) == engine.fresh(3)


def test_an_engine_whose_caches_stay_joins_once_and_serves_when_they_are_gone(make):
    """Learning where an engine keeps its weights takes long, and has nothing to do with its caches."""
    served = make(num_receivers=2, min_receivers=1)
    engine = served.engines[0]
    served.wait_joined()  # one is enough for a refit
    served.refit(0)
    served.receivers[0].close()
    engine.refuses_reset = 10**6
    prewarm, prewarmed = engine.prewarm, []
    engine.prewarm = lambda catalog: prewarmed.append(catalog) or prewarm(catalog)
    successor = deltarefit.Receiver(
        engine, run=served.pair.run, name="rollout-0", request_gate=engine.request_gate, settings=RECEIVER_SETTINGS
    )
    with successor.start():
        successor.wait_joined(10.0)
        with pytest.raises(DeadlineError):
            successor.serving(0.5).__enter__()
        engine.refuses_reset = 0
        with successor.serving(10.0):
            served.pair.assert_equal()
    assert len(prewarmed) == 1


def test_a_gate_that_opened_late_is_not_counted_with_the_next_pause(make):
    served = make()
    engine, receiver = served.engines[0], served.receivers[0]
    served.refit(0)
    engine.refuses_reset = 1
    served.refit(1)
    with receiver.serving(10.0):
        clock = SystemClock()
        opened_s = clock.monotonic_s()
        clock.sleep(0.5)
    report = served.refit(2)
    assert report.receivers == ("rollout-0",)
    assert 0 < report.pause_s < clock.monotonic_s() - opened_s - 0.5


def test_what_one_receiver_failed_to_apply_is_never_sent_again(make):
    """The baseline moves with the commit, not with the sending: changes of a refit that failed are in the next one."""
    served = make(num_receivers=2, min_receivers=2, max_attempts=1, bucket_nbytes=64, chunk_nbytes=64)
    done = threading.Event()
    done.set()
    served.engines[1].troubles = [done, AttemptFailedError("bucket 1 was not applied")]
    with pytest.raises(OperatorRequiredError, match="receiver rollout-1: bucket 1 was not applied"):
        served.refit(0)
    assert served.publisher.policy_version == 0
    assert [engine.policy_version for engine in served.engines] == [None, None]
    assert [receiver.policy_version for receiver in served.receivers] == [0, 0]
    report = served.refit(1)
    assert report.policy_version == 1
    served.pair.assert_equal()


def test_the_version_goes_up_although_every_receiver_failed(make):
    """Nothing that others read says that there is a new version: no label, no record, no report."""
    served = make(num_receivers=2, min_receivers=2, max_attempts=2)
    served.refit(0)
    for engine in served.engines:
        engine.troubles = [AttemptFailedError("no memory on the device")] * 2
    with pytest.raises(OperatorRequiredError, match="no memory on the device"):
        served.refit(1)
    assert served.publisher.policy_version == 1
    assert [engine.policy_version for engine in served.engines] == [1, 1]
    state = control_plane(open_run(served.pair.run, clock=SystemClock()), SystemClock(), RandomIds()).read()
    assert (state.record.policy_version, state.attempt) == (1, None)


class Interrupting(SystemClock):
    """Ctrl-C while something waits."""

    def __init__(self):
        self.after = None

    def sleep(self, seconds):
        if self.after is not None:
            self.after -= 1
            if self.after < 0:
                self.after = None
                raise KeyboardInterrupt
        super().sleep(seconds)


@pytest.mark.parametrize(
    "error", [RuntimeError("a library failed"), MemoryError(), KeyboardInterrupt()], ids=["error", "memory", "interrupt"]
)
@pytest.mark.parametrize("sequence", [0, 2])
def test_an_error_between_begin_and_end_leaves_receivers_waiting_for_ever(make, error, sequence):
    """The next refit begins anew, whatever the last one was doing when it broke off."""
    plan = FaultPlan(lambda name: name.sequence == sequence and name.attempt.startswith("v000002-a1"))

    class Raising(FailingSender):
        def send(self, payload_id, data):
            if self.plan.strikes(payload_id):
                raise error
            self.inner.send(payload_id, data)

    served = make(wrap_sender=lambda sender: Raising(sender, plan), bucket_nbytes=64, chunk_nbytes=64)
    served.refit(0)
    try:
        report = served.refit(1)
    except (KeyboardInterrupt, RuntimeError, MemoryError, deltarefit.RefitError):
        report = served.publisher.refit()
    assert (plan.fired, report.policy_version) == (1, 2)
    served.pair.assert_equal()
    with served.receivers[0].serving(5.0):
        assert served.engines[0].policy_version == 2


@pytest.mark.parametrize("after", [0, 2, 5])
def test_a_trainer_interrupted_while_it_waits_can_refit_again(make, after):
    clock = Interrupting()
    served = make(clock=clock)
    served.refit(0)
    clock.after = after
    slow = threading.Event()
    served.engines[0].troubles = [slow]
    threading.Timer(1.0, slow.set).start()
    with pytest.raises(KeyboardInterrupt):
        served.refit(1)
    report = served.refit(2)
    served.pair.assert_equal()
    assert report.policy_version >= 2
    with served.receivers[0].serving(5.0):
        assert served.engines[0].policy_version == report.policy_version


@pytest.mark.parametrize("answer", [False, "busy", {"todo": "not supported"}])
def test_a_gate_that_could_not_be_closed_is_taken_for_closed(tmp_path, answer):
    """Locks and conditions answer False when time is up, so a gate made of them may; requests would see half a refit."""

    class Gate(LocalGate):
        answer = None

        def close(self, timeout_s):
            super().close(timeout_s)
            return self.answer

    gate = Gate()
    with Pair(tmp_path, num_receivers=0) as pair:
        pair.models.append(Fused(pair.policy))
        pair.attach(pair.models[0], "rollout", request_gate=gate)
        publisher = pair.publisher(settings=msgspec.structs.replace(SETTINGS, max_attempts=1))
        before = raw(pair.models[0])
        gate.answer = answer
        perturb(pair.policy, 0)
        with pytest.raises(OperatorRequiredError, match="closing the request gate: it answered "):
            publisher.refit()
        assert raw(pair.models[0]) == before
        gate.answer = True
        assert publisher.refit().policy_version == 1
        pair.assert_equal()
