"""The encoded control record: strict, versioned, bounded."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltarefit.errors import RejectedError
from deltarefit.ids import AttemptId, BaselineId, EncodingMode, PolicyVersion, ReceiverId
from deltarefit.protocol import (
    AdmittedTransition,
    AttemptState,
    CommitRecord,
    ControlState,
    decode_control,
    encode_control,
)

_text = st.text(max_size=20)
_count = st.integers(0, 2**53)
_records = st.builds(CommitRecord, _count.map(PolicyVersion), _text.map(BaselineId), _text)
_states = st.builds(
    ControlState,
    run=_text,
    setup_digest=_text,
    record=_records,
    epoch=st.just(7),
    coordinator=_text,
    transition=st.none() | st.builds(AdmittedTransition, _count.map(PolicyVersion), _text, st.booleans(), _count),
    attempt=st.none()
    | st.builds(
        AttemptState,
        attempt=_text.map(AttemptId),
        epoch=st.integers(0, 7),
        ordinal=_count,
        mode=st.sampled_from(EncodingMode),
        is_dense=st.booleans(),
        base=_records,
        baseline=_text.map(BaselineId),
        plan_digest=_text,
        required=st.sets(_text, max_size=4).map(lambda names: tuple(ReceiverId(name) for name in sorted(names))),
        is_obsolete=st.booleans(),
    ),
    repair=_text,
    abort=_text,
    revision=_count,
    nonces=st.lists(_text, max_size=3).map(tuple),
)


@given(_states)
def test_decode_undoes_encode(state: ControlState) -> None:
    assert decode_control(encode_control(state)) == state


def _document() -> dict[str, object]:
    state = ControlState(run="run", setup_digest="s", record=CommitRecord(PolicyVersion(0), BaselineId("b0")))
    document: dict[str, object] = msgspec.json.decode(encode_control(state))
    return document


def test_the_encoded_form_is_pinned() -> None:
    state = ControlState(run="run", setup_digest="s", record=CommitRecord(PolicyVersion(0), BaselineId("b0"), "d"))
    assert encode_control(state) == (
        b'{"format":2,"state":{"run":"run","setup_digest":"s","record":{"policy_version":0,"baseline":"b0","policy_digest":"d"},'
        b'"epoch":0,"coordinator":"","transition":null,"attempt":null,"repair":"","abort":"","revision":0,"nonces":[],"links":[]}}'
    )


def _changed(**changes: object) -> bytes:
    document = _document()
    state = document["state"]
    assert isinstance(state, dict)
    state.update(changes)
    return msgspec.json.encode(document)


def _link(version: int) -> dict[str, object]:
    return {
        "attempt": f"v{version}",
        "target_version": version,
        "base_digest": f"d{version - 1}",
        "target_digest": f"d{version}",
        "plan_digest": "p",
        "nbytes": 1,
    }


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not a control record"),
        (b"{}", "not a control record"),
        (b"\xff\xfe", "not a control record"),
        (b'{"format":1,"state":{}}', "format version 1, this deltarefit reads 2"),
        (b'{"format":2}', "not a control record"),
        (_changed(colour="red"), "unknown field"),
        (_changed(epoch="1"), "not a control record"),
        (_changed(record={"policy_version": -1, "baseline": "b"}), "negative counter"),
        (_changed(revision=-1), "negative counter"),
        (_changed(links=[_link(1)]), "retained v1 does not end at committed version 0"),
        (_changed(links=[_link(-2), _link(0)]), "retained v0 does not start where v-2 before it ends"),
        (_changed(links=[_link(-1) | {"target_digest": "other"}, _link(0)]), "retained v0 does not start where v-1"),
        (b" " * (1 << 20) + b"{}", "expected at most 1048576"),
    ],
)
def test_anything_else_is_refused_with_the_place_named(data: bytes, text: str) -> None:
    with pytest.raises(RejectedError, match=text) as caught:
        decode_control(data, where="s3://b/run/control")
    assert "s3://b/run/control" in str(caught.value)


def test_an_attempt_of_a_later_epoch_or_with_doubled_receivers_is_refused() -> None:
    attempt = {
        "attempt": "a", "epoch": 1, "ordinal": 1, "mode": "mixed", "is_dense": False,
        "base": {"policy_version": 0, "baseline": "b0"}, "baseline": "b1", "plan_digest": "p", "required": ["r1", "r1"],
    }  # fmt: skip
    with pytest.raises(RejectedError, match="of epoch 1, but the run is in 0"):
        decode_control(_changed(attempt=attempt))
    with pytest.raises(RejectedError, match="not in order or named twice"):
        decode_control(_changed(attempt=attempt, epoch=1))
