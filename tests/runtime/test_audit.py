"""The audit on demand: one flipped bit anywhere in what a receiver holds is found, named, and mended by the next refit."""

from __future__ import annotations

import msgspec
import pytest
import torch

import deltarefit
from deltarefit.runtime.auditing import ReceiverAudit
from deltarefit.testing.collective import run_ranks
from deltarefit.testing.loaders import LOADERS, random_weights

from .pair import RECEIVER_SETTINGS, SETTINGS, Fused, Pair, Policy, perturb, raw

pytestmark = pytest.mark.torch


def flip(tensor, byte, bit=0):
    tensor.detach().view(-1).view(torch.uint8)[byte] ^= 1 << bit


def test_every_tensor_is_proven_and_nothing_is_changed(pair):
    publisher = pair.publisher()
    perturb(pair.policy, 0)
    publisher.refit()
    before = raw(pair.models[0])
    report = publisher.audit()
    assert report.is_clean
    assert report.describe() == ""
    assert (report.policy_version, report.num_tensors) == (1, 3)
    (found,) = report.receivers
    assert (found.receiver, found.engine, found.proven) == ("rollout-0", "torch", 3)
    assert "parameter and buffer" in found.covered
    assert raw(pair.models[0]) == before
    assert msgspec.json.decode(msgspec.json.encode(report), type=deltarefit.AuditReport) == report


@pytest.mark.parametrize("byte", [0, 1, 24 * 16 * 2 - 1, 24 * 16 * 2, (24 * 16 + 8 * 24) * 2 - 1])
@pytest.mark.parametrize("refits", [0, 1])
def test_one_flipped_bit_in_a_byte_that_no_refit_wrote_is_found_and_its_tensor_named(pair, byte, refits):
    publisher = pair.publisher()
    pair.receivers[0].wait_joined(10.0)  # prewarm puts bytes back that change behind it
    for _ in range(refits):  # it changes one element of ``scale`` only
        pair.policy.scale[5] += 1
        publisher.refit()
    flip(pair.models[0].fused, byte, bit=3)
    report = publisher.audit()
    assert not report.is_clean
    name = "first" if byte < 24 * 16 * 2 else "second"
    assert report.receivers[0].differing == (name,)
    assert report.receivers[0].proven == 2
    assert report.describe() == f"receiver rollout-0 differs in {name}"


def test_the_receiver_is_named_and_the_next_refit_mends_it(tmp_path):
    with Pair(tmp_path, num_receivers=2) as pair:
        publisher = pair.publisher(settings=msgspec.structs.replace(SETTINGS, min_receivers=2, audit_every=0))
        perturb(pair.policy, 0)
        publisher.refit()
        flip(pair.models[1].fused, 77)
        report = publisher.audit()
        assert [(one.receiver, one.differing) for one in report.receivers] == [("rollout-0", ()), ("rollout-1", ("first",))]
        pair.policy.scale[0] += 1
        assert publisher.refit().attempts == 1
        pair.assert_equal()
        assert publisher.audit().is_clean


def test_a_wrong_checkpoint_is_named_before_the_first_refit_and_refused_by_it(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        model = Fused(Policy(seed=9))
        pair.attach(model, "rollout")
        publisher = pair.publisher()
        assert publisher.audit().receivers[0].differing == ("first", "second")
        with pytest.raises(deltarefit.RejectedError, match="holds other weights than the trainer"):
            publisher.refit()


class Padded(torch.nn.Module):
    """Rows that no canonical tensor reaches, and a table that only the rollout side has."""

    def __init__(self, policy):
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(32, 16, dtype=torch.bfloat16), requires_grad=False)
        self.second = torch.nn.Parameter(torch.zeros(8, 24, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("scale", torch.zeros(8))
        self.register_buffer("table", torch.ones(5, dtype=torch.float64))
        self.load_weights(policy.state_dict().items())

    def load_weights(self, weights):
        for name, tensor in weights:
            own = getattr(self, name).data
            own[: tensor.shape[0]].copy_(tensor)


@pytest.fixture
def padded(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        model = Padded(pair.policy)
        pair.attach(model, "rollout")
        publisher = pair.publisher()
        perturb(pair.policy, 0)
        publisher.refit()
        yield publisher, model


@pytest.mark.parametrize(("name", "byte"), [("first", 24 * 16 * 2), ("first", 32 * 16 * 2 - 1), ("table", 0), ("table", 39)])
def test_a_flipped_bit_outside_all_tensors_of_the_policy_is_reported_as_drift(padded, name, byte):
    publisher, model = padded
    assert publisher.audit().is_clean
    flip(getattr(model, name), byte)
    report = publisher.audit()
    assert not report.is_clean
    assert report.receivers[0].differing == ()
    assert report.receivers[0].drifted == (f"rank 0: {name}",)
    flip(getattr(model, name), byte)
    assert publisher.audit().is_clean


def test_refits_are_no_drift(padded):
    publisher, _ = padded
    assert publisher.refit().audited
    assert publisher.audit().receivers[0].drifted == ()


@pytest.mark.parametrize("name", ["A_log composed", "A_log computed", "rows normalised"])
def test_computed_tensors_are_unproven_until_a_whole_copy_came_by_and_proven_after_the_first_refit(tmp_path, name):
    case = LOADERS[name]()
    weights = random_weights(case.catalog, 1, finite=True)
    model = case.build()
    model.load_weights(weights.items())
    run = (tmp_path / "run").as_uri()
    trainer = torch.nn.ParameterDict({key: torch.nn.Parameter(tensor.clone()) for key, tensor in weights.items()})
    with (
        deltarefit.Receiver.attach(model, load_weights=model.load_weights, run=run, settings=RECEIVER_SETTINGS),
        deltarefit.Publisher(trainer, run=run, settings=SETTINGS) as publisher,
    ):
        assert publisher.audit().receivers[0].unproven == ("w",)
        publisher.refit()
        report = publisher.audit()
        assert report.is_clean, report.describe()
        flip(model.w, 5)
        assert publisher.audit().receivers[0].differing == ("w",)


def test_ranks_that_disagree_are_named(pair, monkeypatch):
    """Two ranks hold the same elements; one of them has a flipped bit."""
    other = Fused(pair.policy)
    from deltarefit.receiver import RankReceiver

    engine = pair.receivers[0]._engine
    replica = RankReceiver(other, other.load_weights)
    local_prewarm, local_apply, local_digests = engine.prewarm, engine.apply, engine.digests
    monkeypatch.setattr(engine, "prewarm", lambda catalog: (*local_prewarm(catalog), replica.prewarm(catalog)))
    monkeypatch.setattr(engine, "digests", lambda: (*local_digests(), replica.digests()))
    monkeypatch.setattr(engine, "drift", lambda: ((), replica.drift()))
    prepare = engine.prepare
    monkeypatch.setattr(engine, "prepare", lambda plan: (prepare(plan), replica.prepare(plan)))

    def apply(decoded):
        return local_apply(decoded) + replica.apply(decoded)

    monkeypatch.setattr(engine, "apply", apply)
    publisher = pair.publisher()
    perturb(pair.policy, 0)
    publisher.refit()
    assert publisher.audit().is_clean
    flip(other.fused, 3)
    report = publisher.audit()
    assert report.receivers[0].differing == ("first",)
    assert report.receivers[0].disagreeing == {"first": (0, 1)}
    assert "first (ranks 0 and 1 disagree)" in report.describe()
    perturb(pair.policy, 1)
    publisher.refit()
    assert publisher.audit().is_clean


def test_a_flipped_bit_in_the_trainers_committed_copy_is_named(pair):
    publisher = pair.publisher()
    perturb(pair.policy, 0)
    publisher.refit()
    tracker = next(t for t in publisher._source.owner.baseline.trackers if t.task.spec.name == "second")
    tracker.words[0][7] ^= 1
    report = publisher.audit()
    assert report.source_differing == ("second",)
    assert report.receivers[0].is_clean
    assert not report.is_clean


def test_every_rank_of_the_trainer_gets_the_report(tmp_path):
    with Pair(tmp_path) as pair:
        policies = [Policy(), Policy()]

        def rank_main(collective):
            with deltarefit.Publisher(policies[collective.rank], run=pair.run, settings=SETTINGS, collective=collective) as p:
                perturb(policies[collective.rank], 0)
                p.refit()
                if collective.rank == 0:
                    flip(pair.models[0].fused, 0)
                return p.audit()

        reports = run_ranks(2, rank_main)
        assert reports[0] == reports[1]
        assert reports[0].receivers[0].differing == ("first",)


def test_an_audit_without_receivers_proves_nothing(tmp_path):
    with Pair(tmp_path, num_receivers=0) as pair:
        publisher = pair.publisher(settings=msgspec.structs.replace(SETTINGS, min_receivers=0))
        report = publisher.audit()
        assert report.receivers == ()
        assert not report.is_clean
        assert report.describe() == "no receiver answered"


def test_an_audit_after_a_refit_that_failed_is_refused(pair):
    from deltarefit.testing.faults import CorruptingSender

    publisher = pair.publisher(
        settings=msgspec.structs.replace(SETTINGS, max_attempts=1),
        wrap_sender=lambda sender: CorruptingSender(sender, lambda name: name.attempt.startswith("v000001-a1")),
    )
    perturb(pair.policy, 0)
    with pytest.raises(deltarefit.OperatorRequiredError):
        publisher.refit()
    with pytest.raises(deltarefit.RejectedError, match=r"need not hold the committed policy now.*call refit\(\) first"):
        publisher.audit()
    publisher.refit()
    assert publisher.audit().is_clean
    pair.assert_equal()


def test_a_closed_publisher_audits_nothing(pair):
    publisher = pair.publisher()
    publisher.close()
    with pytest.raises(deltarefit.RejectedError, match="audit on a closed Publisher"):
        publisher.audit()


def test_long_lists_are_cut_in_words_and_kept_in_the_report():
    found = ReceiverAudit(receiver="r", engine="e", differing=tuple(f"t{n}" for n in range(8)))
    report = deltarefit.AuditReport(policy_version=1, policy_digest="", num_tensors=9, checked_nbytes=9, receivers=(found,))
    assert report.describe() == "receiver r differs in t0, t1, t2, t3, t4 and 3 more"


def test_a_report_says_what_each_receivers_audit_covered(tmp_path):
    """Two engines that cover different things: neither's words stand for both."""
    with Pair(tmp_path, num_receivers=2) as pair:
        publisher = pair.publisher(settings=msgspec.structs.replace(SETTINGS, min_receivers=2))
        perturb(pair.policy, 0)
        same = publisher.refit().covered
        assert same == "every parameter and buffer that a canonical tensor reaches, on 1 rank"
        pair.receivers[1]._engine.covered = lambda: "the first layer"
        perturb(pair.policy, 1)
        assert publisher.refit().covered == f"rollout-0: {same}; rollout-1: the first layer"
