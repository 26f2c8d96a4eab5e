"""What a receiver proves is told in a few bytes; only where that differs is each tensor looked at."""

from __future__ import annotations

import pytest

from deltarefit.canonical import TensorDigest, digest_of_digests
from deltarefit.errors import AttemptFailedError
from deltarefit.runtime import messages
from deltarefit.runtime.messages import Holding, encode_message
from deltarefit.runtime.planning import DigestCheck, check_holding

from .pair import Pair, perturb

EXPECTED = {name: TensorDigest(number, 7) for number, name in enumerate("abc")}


def holding(names, **changes):
    proven = {name: EXPECTED[name] for name in names} | changes
    return Holding(digest_of_digests(proven), tuple(name for name in EXPECTED if name not in proven))


def test_equal_bits_are_seen_from_the_summary():
    known = {}
    for _ in range(2):
        assert check_holding(EXPECTED, holding("abc"), (), known) == DigestCheck((), ())
        assert check_holding(EXPECTED, holding("ac"), (), known) == DigestCheck((), ("b",))
        assert check_holding(EXPECTED, holding("ac"), ("b",), known) == DigestCheck((), ())
        assert check_holding(EXPECTED, holding(""), "abc", known) == DigestCheck((), ())
    assert len(known) == 3


def test_any_other_bit_needs_the_list():
    for known in ({}, {(): digest_of_digests(EXPECTED)}):
        assert check_holding(EXPECTED, holding("abc", b=TensorDigest(1, 8)), (), known) is None
        assert check_holding(EXPECTED, holding("ab", z=TensorDigest()), (), known) is None
        assert check_holding(EXPECTED, Holding(holding("abc").summary, ("b",)), (), known) is None


@pytest.mark.torch
def test_answers_during_a_pause_are_short_and_lists_are_asked_for_when_something_differs(pair):
    publisher = pair.publisher()
    caller = publisher._session.caller
    ask, collect, asked, answers = caller.ask, caller.collect, [], []

    def note_ask(members, body, timeout_s):
        asked.append(body)
        return ask(members, body, timeout_s)

    def note_answers(*arguments, **options):
        found = collect(*arguments, **options)
        answers.extend(found.values())
        return found

    caller.ask, caller.collect = note_ask, note_answers
    perturb(pair.policy, 0)
    publisher.refit()
    completed = [answer for answer in answers if isinstance(answer, messages.Completed)]
    assert len(completed) == 1
    assert len(encode_message(completed[0])) < 400
    assert messages.Survey(lists=True) not in asked
    pair.models[0].fused.data.view(-1)[3] += 1
    perturb(pair.policy, 1)
    report = publisher.refit()
    assert asked.count(messages.Survey(lists=True)) == 1
    assert report.attempts == 1, "the damaged tensor was named before anything was sent, and sent whole"
    pair.assert_equal()


@pytest.mark.torch
def test_all_receivers_that_differ_make_their_lists_at_the_same_time(tmp_path):
    with Pair(tmp_path, num_receivers=3) as pair:
        publisher = pair.publisher()
        perturb(pair.policy, 0)
        publisher.refit()
        caller, asked = publisher._session.caller, []
        ask = caller.ask

        def note(members, body, timeout_s):
            listed = list(members)
            if body == messages.Survey(lists=True):
                asked.append([member.receiver for member in listed])
            return ask(listed, body, timeout_s)

        caller.ask = note
        for model in pair.models[1:]:
            model.fused.data.view(-1)[3] += 1
        perturb(pair.policy, 1)
        assert publisher.refit().attempts == 1
        assert asked == [["rollout-1", "rollout-2"]]
        pair.assert_equal()


@pytest.mark.torch
def test_a_receiver_that_differs_and_cannot_make_its_list_is_asked_again(pair):
    publisher = pair.publisher()
    publisher.refit()
    engine, model = pair.receivers[0]._engine, pair.models[0]
    digests, asked = engine.digests, []

    def fail_the_list():
        asked.append(len(asked))
        if len(asked) == 2:
            raise AttemptFailedError("on purpose")
        return digests()

    engine.digests = fail_the_list
    model.fused.data.view(-1)[3] += 1
    perturb(pair.policy, 0)
    report = publisher.refit()
    assert (report.attempts, report.audited) == (2, True), "the second attempt knew what to send whole"
    pair.assert_equal()


@pytest.mark.torch
def test_a_receiver_that_does_not_hold_the_candidate_is_told_from_it_by_name(pair):
    publisher = pair.publisher()
    engine = pair.receivers[0]._engine
    synchronize, models = engine.synchronize, pair.models

    def damage_once():
        synchronize()
        if engine.synchronize is damage_once:
            engine.synchronize = synchronize
            models[0].fused.data.view(-1)[3] += 1

    publisher.refit()
    perturb(pair.policy, 0)
    close_gate = engine.close_gate

    def close_then_damage(timeout_s):
        close_gate(timeout_s)
        engine.synchronize, engine.close_gate = damage_once, close_gate

    engine.close_gate = close_then_damage
    report = publisher.refit()
    assert report.attempts == 2
    assert "does not hold the candidate" in report.failures[0]
    assert "1 of 3 tensors differ, first " in report.failures[0]
    pair.assert_equal()
