"""Leases without clocks in the record: what a watcher concludes, and that a holder always gives up first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltarefit.errors import RejectedError
from deltarefit.protocol import LeaseSettings, LeaseVerdict, LeaseWatch, SelfFence

LEASE = LeaseSettings(lease_s=10.0, renew_s=2.0)


def test_a_beat_that_moves_is_alive_and_one_that_stands_still_expires() -> None:
    watch = LeaseWatch(LEASE)
    assert watch.observe("b1", asked_s=100.0, now_s=100.5) is LeaseVerdict.UNDECIDED
    assert watch.observe("b1", asked_s=109.0, now_s=109.1) is LeaseVerdict.UNDECIDED
    assert watch.wait_s(109.1) == pytest.approx(1.4)
    assert watch.observe("b2", asked_s=110.0, now_s=110.1) is LeaseVerdict.ALIVE
    assert watch.observe("b2", asked_s=120.0, now_s=120.05) is LeaseVerdict.ALIVE
    assert watch.observe("b2", asked_s=120.1, now_s=120.2) is LeaseVerdict.EXPIRED


def test_a_holder_that_never_wrote_a_beat_expires_too() -> None:
    watch = LeaseWatch(LEASE)
    assert watch.wait_s(0.0) == 10.0
    assert watch.observe(None, asked_s=0.0, now_s=0.0) is LeaseVerdict.UNDECIDED
    assert watch.observe(None, asked_s=10.0, now_s=10.0) is LeaseVerdict.EXPIRED


def test_a_beat_that_moved_during_the_read_counts_from_its_end() -> None:
    watch = LeaseWatch(LEASE)
    watch.observe("b1", asked_s=0.0, now_s=5.0)
    assert watch.observe("b1", asked_s=14.9, now_s=30.0) is LeaseVerdict.UNDECIDED
    assert watch.observe("b1", asked_s=15.0, now_s=30.0) is LeaseVerdict.EXPIRED


def test_a_holder_fences_itself_and_stays_fenced_until_restored() -> None:
    fence = SelfFence(LEASE, now_s=0.0)
    assert fence.may_act(8.9)
    fence.renewed(sent_s=8.0, now_s=8.5)
    assert fence.may_act(16.9)
    assert not fence.may_act(17.0)
    fence.renewed(sent_s=17.1, now_s=17.2)
    assert not fence.may_act(17.3)
    fence.restore(18.0)
    assert fence.may_act(19.0)


def test_a_reply_that_comes_after_the_lease_ran_out_renews_nothing() -> None:
    fence = SelfFence(LEASE, now_s=0.0)
    fence.renewed(sent_s=8.9, now_s=9.1)
    assert not fence.may_act(9.1)


def test_a_holder_that_slept_finds_itself_fenced() -> None:
    fence = SelfFence(LEASE, now_s=0.0)
    assert not fence.may_act(1000.0)


@given(
    sent=st.floats(0, 5),
    landed=st.floats(0, 5),
    seen=st.floats(0, 30),
    skew=st.floats(-1000, 1000),
    rate=st.floats(0.95, 1.05),
)
def test_the_holder_has_always_stopped_before_a_watcher_calls_it_expired(
    sent: float, landed: float, seen: float, skew: float, rate: float
) -> None:
    """One renewal, sent at ``sent`` and in place at ``sent + landed``; the watcher's clock is off and runs at another rate."""
    fence = SelfFence(LEASE, now_s=sent)
    fence.renewed(sent_s=sent, now_s=sent + landed)
    first_seen = sent + landed + seen
    watch = LeaseWatch(LEASE)
    watch.observe("b1", asked_s=skew + rate * first_seen, now_s=skew + rate * first_seen)
    expired_at = first_seen + LEASE.lease_s / rate
    clock = skew + rate * expired_at + 1e-6
    assert watch.observe("b1", asked_s=clock, now_s=clock) is LeaseVerdict.EXPIRED
    assert not fence.may_act(expired_at)


@pytest.mark.parametrize(("lease_s", "renew_s"), [(10.0, 6.0), (10.0, 0.0), (0.0, 0.0)])
def test_a_lease_that_one_lost_renewal_would_end_is_refused(lease_s: float, renew_s: float) -> None:
    with pytest.raises(RejectedError, match="so that one lost renewal does not end the lease"):
        LeaseSettings(lease_s=lease_s, renew_s=renew_s)
