"""Every toy loader: refit equals dense reload in raw bytes, or prewarm refuses it and leaves the model as it was."""

from __future__ import annotations

import numpy as np
import pytest

from deltarefit.bits import logical_words, tensor_from_words
from deltarefit.errors import RejectedError
from deltarefit.receiver import ApplyPath, RankReceiver, ReceiverSettings
from deltarefit.records import Encoding
from deltarefit.testing.loaders import LOADERS, random_weights
from deltarefit.testing.oracle import assert_same_bits, delta_payload, dense_reload, plan_for, raw_state

pytestmark = pytest.mark.torch

ACCEPTED = [name for name, make in LOADERS.items() if make().refused is None]
REFUSED = [name for name, make in LOADERS.items() if make().refused is not None]


def load(model, weights):
    model.load_weights([(name, tensor.clone()) for name, tensor in weights.items()])


def tied(case, weights):
    for first, second in case.equal_pairs:
        weights[second] = weights[first].clone()
    return weights


def changed(case, old, seed, share=0.2):
    generator = np.random.default_rng(seed)
    other = random_weights(case.catalog, seed + 1000)
    new = {}
    for name, spec in case.catalog.items():
        words = logical_words(old[name]).copy()
        places = np.flatnonzero(generator.random(words.size) < share)
        if not places.size and words.size:
            places = generator.integers(0, words.size, 1)
        words[places] = logical_words(other[name])[places]
        new[name] = tensor_from_words(words, spec)
    return tied(case, new)


def same_dense_twice(case, weights):
    """Whether a dense reload of these bits has one meaning (casts of NaN may not)."""
    return raw_state(dense_reload(case.build, load, weights)) == raw_state(dense_reload(case.build, load, weights))


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("prefer", [Encoding.DIFFERENCE, Encoding.XOR, Encoding.OVERWRITE])
@pytest.mark.parametrize("path", list(ApplyPath))
def test_refit_leaves_the_bits_of_a_dense_reload(name, prefer, path):
    case = LOADERS[name]()
    if path is ApplyPath.SCRATCH and name in ("tied head only with its embedding", "two names in one call"):
        pytest.skip("needs two names in one call, which only the compiled path can take apart")
    weights = tied(case, random_weights(case.catalog, 1))
    model = dense_reload(case.build, load, weights)
    before = raw_state(model)
    receiver = RankReceiver(model, model.load_weights, settings=ReceiverSettings(path=path, verify_writes=True))
    report = receiver.prewarm(case.catalog)
    assert raw_state(model) == before
    if path is ApplyPath.COMPILED:
        assert {n: r.kind for n, r in report.routes.items() if r.kind != "pieces"} == dict(case.routes)
    for step in range(3):
        plan = plan_for([report], case.catalog, prefer=prefer)
        receiver.prepare(plan)
        new = changed(case, weights, step)
        payload = delta_payload(plan, weights, new)
        if payload is not None:
            receiver.apply(payload)
        receiver.synchronize()
        assert_same_bits(model, dense_reload(case.build, load, new))
        weights = new


@pytest.mark.parametrize("name", REFUSED)
def test_prewarm_refuses_and_changes_nothing(name):
    case = LOADERS[name]()
    model = case.build()
    before = raw_state(model)
    addresses = {n: t.data_ptr() for n, t in model.state_dict().items()}
    with pytest.raises(RejectedError, match=case.refused):
        RankReceiver(model, model.load_weights).prewarm(case.catalog)
    assert raw_state(model) == before
    assert {n: t.data_ptr() for n, t in model.state_dict().items()} == addresses
