"""One row per canonical tensor: what becomes of it, and why."""

from __future__ import annotations

import pytest

from deltarefit.receiver import ReceiverSettings, tensor_outcomes
from deltarefit.testing.loaders import LOADERS

pytestmark = pytest.mark.torch


def outcomes(name, **settings):
    case = LOADERS[name]()
    model = case.build()
    return tensor_outcomes(model, model.load_weights, case.catalog, settings=ReceiverSettings(**settings))


def test_copied_tensors_are_exact_without_a_reason():
    rows = outcomes("fused qkv")
    assert {row.outcome for row in rows} == {"exact"}
    assert {row.reason for row in rows} == {""}
    assert all(row.nbytes > 0 for row in rows)


def test_computed_tensors_are_rerun_or_sent_whole():
    assert [row.outcome for row in outcomes("A_log computed")] == ["rerun"]
    (row,) = outcomes("rows normalised")
    assert row.outcome == "dense"
    assert "sent whole" in row.reason


def test_a_refusal_is_an_answer_that_names_the_tensor():
    rows = {row.name: row for row in outcomes("packed away after loading")}
    refused = [row for row in rows.values() if row.outcome == "refused"]
    assert refused
    assert all("packed" in row.reason for row in refused)
    assert {row.outcome for row in rows.values()} <= {"refused", "blocked"}
