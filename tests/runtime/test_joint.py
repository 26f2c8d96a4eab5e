"""A policy and its draft, published by one Publisher and committed together."""

from __future__ import annotations

import pytest

import deltarefit
from deltarefit.errors import RejectedError
from deltarefit.integrations.torch import torch_adapter
from deltarefit.receiver import JointModel, Target
from deltarefit.source import JointAdapter
from deltarefit.testing.collective import run_ranks

from .pair import RECEIVER_SETTINGS, SETTINGS, Fused, Policy, dense_reload, perturb, raw

pytestmark = pytest.mark.torch


def doubled(tensors):
    """An export that computes one tensor and passes the others on."""
    return {name: tensor * 2 + 1 if name == "second" else tensor for name, tensor in tensors.items()}


def exported(policy):
    changed = Policy()
    changed.load_state_dict(doubled(policy.state_dict()))
    return changed


@pytest.fixture
def rollout(tmp_path):
    """A run with one receiver that holds the policy and the draft; closes by itself."""
    run = (tmp_path / "run").as_uri()
    attached = []

    def attach(policy, draft):
        models = Fused(policy), Fused(draft)
        joint = JointModel(
            {"policy": Target(models[0], models[0].load_weights), "draft": Target(models[1], models[1].load_weights, "draft.")}
        )
        attached.append(deltarefit.Receiver.attach(joint, load_weights=joint.load_weights, run=run, settings=RECEIVER_SETTINGS))
        return models

    yield run, attach
    for receiver in attached:
        receiver.close()


def test_one_commit_carries_the_policy_and_its_draft(rollout):
    run, attach = rollout
    policy, draft = Policy(0), Policy(1)
    models = attach(policy, draft)
    with deltarefit.Publisher({"": policy, "draft.": draft}, run=run, settings=SETTINGS) as publisher:
        for step in range(3):
            for source in (draft,) if step == 1 else (policy, draft):
                perturb(source, step)
            assert publisher.refit().policy_version == step + 1
            assert [raw(model) for model in models] == [dense_reload(policy), dense_reload(draft)]


def test_what_a_part_computes_is_converted_on_several_ranks(rollout):
    run, attach = rollout
    policy, draft = Policy(0), Policy(1)
    models = attach(policy, exported(draft))

    def rank_main(collective):
        policies = Policy(0), Policy(1)
        adapter = JointAdapter(
            {
                "": torch_adapter(policies[0], collective=collective),
                "draft.": torch_adapter(policies[1], collective=collective, export=doubled),
            }
        )
        with deltarefit.Publisher(policies[0], run=run, settings=SETTINGS, collective=collective, adapter=adapter) as publisher:
            for step in range(2):
                for source in policies:
                    perturb(source, step)
                publisher.refit()
        return policies

    policy, draft = run_ranks(2, rank_main)[0]
    assert [raw(model) for model in models] == [dense_reload(policy), dense_reload(exported(draft))]


def test_options_for_one_model_are_refused_for_several(tmp_path):
    with pytest.raises(RejectedError, match=r"export for several models.*JointAdapter"):
        deltarefit.Publisher({"": Policy(), "draft.": Policy()}, run=(tmp_path / "run").as_uri(), export=doubled)


def test_two_models_of_the_same_names_are_refused():
    inner = JointAdapter({"draft.": torch_adapter(Policy())})
    with pytest.raises(RejectedError, match=r"lists draft\.first, draft\.scale, draft\.second more than once"):
        JointAdapter({"": inner, "draft.": torch_adapter(Policy())}).catalog()
    with pytest.raises(RejectedError, match="at least one model"):
        JointAdapter({})
