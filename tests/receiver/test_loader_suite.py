"""The suite for engine authors accepts loaders that conform, and says what is wrong with those that do not."""

from __future__ import annotations

import pytest

from deltarefit.errors import RejectedError
from deltarefit.receiver import RankReceiver
from deltarefit.testing.loader_suite import check_loader
from deltarefit.testing.loaders import LOADERS, random_weights

pytestmark = pytest.mark.torch


def load(model, weights):
    return model.load_weights(weights)


@pytest.mark.parametrize(
    "name",
    ["fused qkv", "experts of another rank", "A_log composed", "widened by a temporary", "vocabulary padding", "every dtype"],
)
def test_loaders_that_conform_pass(name):
    case = LOADERS[name]()
    verdict = check_loader(case.build, load, random_weights(case.catalog, 1))
    verdict.require()
    assert set(verdict.report.routes) == set(case.specs)


def test_a_refused_loader_is_refused_with_its_reason():
    case = LOADERS["writes from a thread"]()
    with pytest.raises(RejectedError, match="behind the dispatch hook"):
        check_loader(case.build, load, random_weights(case.catalog, 1, finite=True))


def test_a_wrong_refit_is_a_failure_that_is_named(monkeypatch):
    case = LOADERS["fused qkv"]()
    original = RankReceiver.apply
    monkeypatch.setattr(RankReceiver, "apply", lambda self, payload: original(self, payload) if len(payload.items) < 3 else 0)
    verdict = check_loader(case.build, load, random_weights(case.catalog, 1))
    assert any("refit 1 by DIFFERENCE on the compiled path: 1 tensors differ" in failure for failure in verdict.failures)
    with pytest.raises(AssertionError, match="does not conform"):
        verdict.require()
