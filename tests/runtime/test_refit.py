"""Whole refits in one process: real threads, a real run directory, the dense reload as the oracle."""

from __future__ import annotations

import msgspec
import pytest
import torch

import deltarefit
from deltarefit.runtime.clock import SystemClock
from deltarefit.runtime.report import RefitReport
from deltarefit.testing.faults import CorruptingSender, FaultPlan
from deltarefit.transport import open_run

from .pair import SETTINGS, Fused, Pair, Policy, dense_reload, perturb, raw, refit_on_ranks

pytestmark = pytest.mark.torch


def test_receivers_hold_the_bits_of_a_dense_reload_after_each_refit(tmp_path):
    with Pair(tmp_path, num_receivers=2) as pair:
        publisher = pair.publisher(settings=deltarefit.PublisherSettings(min_receivers=2, lease_s=5.0))
        for step in range(5):
            perturb(pair.policy, step)
            report = publisher.refit()
            pair.assert_equal()
            assert (report.policy_version, report.attempts, report.audited) == (step + 1, 1, True)
            assert report.receivers == ("rollout-0", "rollout-1")
        assert [receiver.policy_version for receiver in pair.receivers] == [5, 5]


def test_only_changed_elements_travel_and_the_report_counts_them(pair):
    publisher = pair.publisher()
    with torch.no_grad():
        pair.policy.first[3, 5] += 1
        pair.policy.scale[2] = -0.0
    report = publisher.refit()
    pair.assert_equal()
    assert (report.changed_elements, report.total_elements) == (2, 24 * 16 + 8 * 24 + 8)
    assert report.checkpoint_nbytes == (24 * 16 + 8 * 24) * 2 + 8 * 4
    assert report.stage_s["scan"] > 0
    assert msgspec.json.decode(msgspec.json.encode(report), type=RefitReport) == report


def test_every_bit_pattern_arrives(pair):
    publisher = pair.publisher()
    patterns = torch.tensor([0x8000, 0x7FC1, 0xFFFF, 0x7F80, 0x0001, 0x8001, 0x7FC0], dtype=torch.int32).to(torch.int16)
    pair.policy.first.data.view(-1)[: len(patterns)] = patterns.view(torch.bfloat16)
    publisher.refit()
    pair.assert_equal()
    pair.policy.first.data.view(-1)[: len(patterns)] = patterns.flip(0).view(torch.bfloat16)
    publisher.refit()
    pair.assert_equal()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nan_that_stays_is_no_change_and_is_counted_at_each_refit(pair, caplog, asynchronous):
    publisher = pair.publisher()

    def refit():
        return publisher.publish().wait(30) if asynchronous else publisher.refit()

    assert refit().nan_elements == 0
    assert "NaN" not in caplog.text
    pair.policy.first.data[1, 2] = float("nan")
    pair.policy.scale.data[3] = float("nan")
    found = refit()
    assert (found.changed_elements, found.nan_elements) == (2, 2)
    assert "holds 2 elements that are NaN, in tensors such as first, scale" in caplog.text
    for _ in range(3):
        found = refit()
        assert (found.changed_elements, found.payloads, found.nan_elements) == (0, 0, 2)
    pair.policy.first.data[1, 2] = 1.0
    assert refit().nan_elements == 1
    pair.assert_equal()


def test_a_refit_without_changes_commits_a_version_and_sends_nothing(pair):
    publisher = pair.publisher()
    before = raw(pair.models[0])
    report = publisher.refit()
    assert (report.policy_version, report.payloads, report.payload_nbytes, report.changed_elements) == (1, 0, 0, 0)
    assert raw(pair.models[0]) == before


def test_a_payload_damaged_in_transit_is_repaired_by_overwrites(pair):
    plan = FaultPlan()
    publisher = pair.publisher(wrap_sender=lambda sender: CorruptingSender(sender, plan))
    perturb(pair.policy, 1)
    report = publisher.refit()
    assert plan.fired == 1
    assert report.attempts == 2
    assert "digest" in report.failures[0]
    pair.assert_equal()
    perturb(pair.policy, 2)
    assert publisher.refit().attempts == 1
    pair.assert_equal()


@pytest.mark.parametrize("world_size", [2, 3])
def test_owners_share_the_work_and_a_fault_in_the_middle_is_repaired(tmp_path, world_size):
    """The damaged payload is the last owner's: by then receivers have applied the other owners' differences."""
    with Pair(tmp_path) as pair:
        policies = [Policy() for _ in range(world_size)]
        plan = FaultPlan(lambda name: name.owner == world_size - 1 and name.attempt.startswith("v000002"))

        def wrap(rank, sender):
            return CorruptingSender(sender, plan) if rank == world_size - 1 else sender

        reports = refit_on_ranks(world_size, pair.run, policies, 3, wrap)
        assert plan.fired == 1
        assert [report.attempts for report in reports[0]] == [1, 2, 1]
        assert all(reports[rank] == reports[0] for rank in range(world_size))
        assert raw(pair.models[0]) == dense_reload(policies[0])


def test_nothing_of_an_attempt_is_left_behind(pair):
    publisher = pair.publisher(wrap_sender=lambda sender: CorruptingSender(sender, lambda name: name.sequence == 0))
    perturb(pair.policy, 3)
    publisher.refit()
    assert open_run(pair.run, clock=SystemClock()).listing("attempts") == []


def test_keyed_payloads_need_the_same_key(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        pair.models.append(Fused(pair.policy))
        pair.attach(pair.models[0], "rollout", key=b"k" * 32)
        publisher = pair.publisher(key=b"k" * 32)
        perturb(pair.policy, 0)
        publisher.refit()
        pair.assert_equal()


def test_a_receiver_whose_ranks_have_another_key_refuses_every_payload(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        model = Fused(pair.policy)
        before = raw(model)
        receiver = pair.attach(model, "rollout", key=b"k" * 32)
        receiver._engine._key = b"x" * 32
        settings = msgspec.structs.replace(SETTINGS, max_attempts=2)
        publisher = pair.publisher(key=b"k" * 32, settings=settings)
        perturb(pair.policy, 0)
        with pytest.raises(deltarefit.OperatorRequiredError, match="key"):
            publisher.refit()
        assert raw(model) == before


def test_a_changed_resident_byte_is_noticed_before_differences_are_applied(pair):
    publisher = pair.publisher()
    perturb(pair.policy, 0)
    publisher.refit()
    pair.models[0].fused.data.view(torch.int16)[100] ^= 1
    perturb(pair.policy, 1)
    report = publisher.refit()
    assert report.attempts == 1
    pair.assert_equal()


def test_requests_wait_while_a_refit_is_under_way(pair):
    publisher = pair.publisher()
    perturb(pair.policy, 0)
    publisher.refit()
    with pair.receivers[0].serving(timeout_s=5.0):
        assert pair.receivers[0].policy_version == 1


def test_the_trainers_default_device_does_not_matter(pair):
    """Trainers set it to their accelerator; what is only ever read on the host is still made there."""
    torch.set_default_device("meta")  # fails sooner than an accelerator
    try:
        publisher = pair.publisher()
        perturb_on_the_host(pair.policy)
        assert publisher.refit().attempts == 1
    finally:
        torch.set_default_device(None)  # any other would stay between torch and the tests after this one
    pair.assert_equal()


def perturb_on_the_host(policy):
    with torch.device("cpu"):
        perturb(policy, 0)


def test_a_policy_of_inference_tensors_is_refitted(tmp_path):
    """torch counts no writes to them, so the candidate is proved once more at the commit."""
    with torch.inference_mode():
        policy = Policy()
    with Pair(tmp_path, num_receivers=0) as pair:
        pair.policy = policy
        pair.models = [Fused(policy)]
        pair.attach(pair.models[0], "rollout")
        publisher = pair.publisher()
        with torch.inference_mode():
            perturb(policy, 0)
        assert publisher.refit().attempts == 1
        pair.assert_equal()
