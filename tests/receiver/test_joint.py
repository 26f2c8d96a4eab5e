"""Several modules refitted as one: names reach the right loader, shared storage changes once, bits are those of a reload."""

from __future__ import annotations

import pytest
import torch

from deltarefit.bits import spec_of
from deltarefit.canonical import Catalog
from deltarefit.errors import RejectedError
from deltarefit.ids import EncodingMode
from deltarefit.receiver import JointModel, RankReceiver, Target
from deltarefit.testing.loaders import random_weights
from deltarefit.testing.oracle import delta_payload, plan_for, raw_state

pytestmark = pytest.mark.torch


class Part(torch.nn.Module):
    """A model that takes the names it knows and reports them, as engines' loaders do."""

    def __init__(self, embed, **shapes):
        super().__init__()
        if embed is not None:
            self.embed = embed
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False))

    def load_weights(self, weights):
        own = dict(self.named_parameters())
        known = [(name, tensor) for name, tensor in weights if name in own]
        for name, tensor in known:
            own[name].data.copy_(tensor)
        return {name for name, _ in known}


def embedding():
    return torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16), requires_grad=False)


def policy_and_draft():
    policy, draft = Part(embedding(), head=(5, 4)), Part(embedding(), head=(3, 4))
    return JointModel({"policy": Target(policy, policy.load_weights), "draft": Target(draft, draft.load_weights, "draft.")})


def policy_and_next_token_head():
    """One checkpoint: the head reads its own layer from it, and shares the policy's embedding."""
    policy = Part(embedding(), head=(5, 4))
    mtp = Part(policy.embed, layer=(7, 2))
    return JointModel({"policy": Target(policy, policy.load_weights), "mtp": Target(mtp, mtp.load_weights)})


NAMES = {
    policy_and_draft: {"embed": (6, 4), "head": (5, 4), "draft.embed": (6, 4), "draft.head": (3, 4)},
    policy_and_next_token_head: {"embed": (6, 4), "head": (5, 4), "layer": (7, 2)},
}


@pytest.mark.parametrize("build", NAMES)
def test_a_refit_leaves_the_bits_of_a_reload_of_every_target(build):
    catalog = Catalog(spec_of(name, torch.zeros(shape, dtype=torch.bfloat16)) for name, shape in NAMES[build].items())
    versions = [random_weights(catalog, seed, finite=True) for seed in range(3)]
    model = build()
    assert model.load_weights(versions[0].items()) == set(NAMES[build])
    receiver = RankReceiver(model, model.load_weights)
    plan = plan_for([receiver.prewarm(catalog)], catalog)
    for step, mode in ((1, EncodingMode.MIXED), (2, EncodingMode.OVERWRITE)):
        receiver.prepare(plan)
        receiver.apply(delta_payload(plan, versions[step - 1], versions[step], mode=mode, attempt=f"v{step:06}-a1-test"))
        receiver.synchronize()
        fresh = build()
        fresh.load_weights(versions[step].items())
        assert raw_state(model) == raw_state(fresh)


def test_a_target_whose_names_are_missing_is_refused():
    model = policy_and_draft()
    catalog = Catalog(
        spec_of(name, torch.zeros(shape, dtype=torch.bfloat16)) for name, shape in (("embed", (6, 4)), ("head", (5, 4)))
    )
    with pytest.raises(RejectedError, match=r"draft\.embed: no canonical tensor reaches this parameter"):
        RankReceiver(model, model.load_weights).prewarm(catalog)


def test_prefixes_that_overlap_and_nameless_targets_are_refused():
    part = Part(embedding())
    with pytest.raises(RejectedError, match=r"prefix .draft\.b. begins with prefix .draft\.."):
        JointModel({"a": Target(part, part.load_weights, "draft."), "b": Target(part, part.load_weights, "draft.b")})
    for targets in ({}, {"a.b": Target(part, part.load_weights)}):
        with pytest.raises(RejectedError, match="expected one or more, named like variables"):
            JointModel(targets)
