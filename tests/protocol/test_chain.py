"""The retained chain: whatever is committed, in whatever way, it has no gap and ends at the committed version."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deltarefit.ids import AttemptId, BaselineId, EncodingMode, PolicyVersion, ReceiverId
from deltarefit.protocol import (
    ChainLink,
    CommitOutcome,
    CommitRecord,
    CommitRequest,
    ControlState,
    PrepareRequest,
    Retention,
    decode_control,
    encode_control,
)
from deltarefit.protocol import commit as rules

ONE = ReceiverId("r")


def begun() -> ControlState:
    state = rules.create_run("run", "setup", CommitRecord(PolicyVersion(0), BaselineId("b0"), "d0"))
    return rules.acquire(state, holder="x", setup_digest="setup")


def refit(state: ControlState, retention: Retention | None, *, is_dense: bool = False, fails: bool = False) -> ControlState:
    """One transition; ``fails``: its first attempt does."""
    version = state.record.policy_version + 1
    for ordinal in (1, 2) if fails else (1,):
        mode = EncodingMode.OVERWRITE if is_dense or ordinal == 2 else EncodingMode.MIXED
        attempt = AttemptId(f"v{version}-a{ordinal}")
        state = rules.prepare(
            state,
            PrepareRequest(
                epoch=1,
                attempt=attempt,
                baseline=BaselineId(f"b{version}-{ordinal}"),
                base=state.record,
                mode=mode,
                is_dense=is_dense,
                candidate="w",
                plan_digest=f"p{version}",
                required=frozenset({ONE}),
            ),
        )
        if fails and ordinal == 1:
            state = rules.mark_obsolete(state, attempt=attempt)
            state = rules.close_attempt(state, epoch=1, attempt=attempt)
    outcome, state = rules.commit(
        state,
        CommitRequest(
            epoch=1,
            attempt=attempt,
            baseline=BaselineId(f"b{version}-{ordinal}"),
            acknowledged=frozenset({ONE}),
            policy_digest=f"d{version}",
            retention=retention,
        ),
    )
    assert outcome is CommitOutcome.SUCCESS
    return rules.close_attempt(state, epoch=1, attempt=attempt)


_retentions = st.none() | st.builds(
    Retention, nbytes=st.integers(0, 9), max_links=st.integers(0, 4), max_nbytes=st.integers(0, 20)
)


@given(st.lists(st.tuples(_retentions, st.booleans(), st.booleans()), max_size=12))
def test_every_chain_leads_to_the_committed_version(refits: list[tuple[Retention | None, bool, bool]]) -> None:
    state = begun()
    for retention, is_dense, fails in refits:
        before = state.links
        state = refit(state, retention, is_dense=is_dense, fails=fails)
        assert decode_control(encode_control(state)) == state, "a reader refuses gaps"
        links = state.links
        if retention is None or is_dense:
            assert links == ()
            continue
        assert len(links) <= retention.max_links
        assert sum(link.nbytes for link in links) <= retention.max_nbytes
        assert links == () or links[:-1] == before[len(before) - len(links) + 1 :], "only the oldest may go"
        if links:
            assert links[-1].attempt == f"v{state.record.policy_version}-a{2 if fails else 1}", "the committed attempt"
            assert links[-1].target_digest == state.record.policy_digest


def test_an_unknown_digest_ends_the_chain() -> None:
    keep = Retention(nbytes=1, max_links=9, max_nbytes=99)
    state = replace(begun(), record=CommitRecord(PolicyVersion(0), BaselineId("b0"), ""))
    state = refit(state, keep)
    assert state.links == ()
    state = refit(state, keep)
    assert state.links == (ChainLink(AttemptId("v2-a1"), PolicyVersion(2), "d1", "d2", "p2", 1),)
    assert state.links[0].base_version == 1


def test_a_repeated_commit_adds_no_second_link() -> None:
    keep = Retention(nbytes=1, max_links=9, max_nbytes=99)
    state = refit(begun(), keep)
    again = CommitRequest(
        epoch=1, attempt=AttemptId("v1-a1"), baseline=BaselineId("b1-1"), acknowledged=frozenset({ONE}), retention=keep
    )
    assert rules.commit(state, again) == (CommitOutcome.SUCCESS, state)
