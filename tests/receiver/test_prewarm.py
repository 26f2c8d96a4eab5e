"""Prewarm: what it finds out, what it refuses, and that it changes nothing."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from deltarefit.bits import storage_words
from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.errors import RejectedError
from deltarefit.plan import RefitPlan
from deltarefit.receiver import ApplyPath, PrewarmReport, RankReceiver, ReceiverSettings, merge_reports
from deltarefit.records import Encoding
from deltarefit.testing.loaders import LOADERS, ToyModel, random_weights
from deltarefit.testing.oracle import dense_reload, plan_for, raw_state

pytestmark = pytest.mark.torch

BF16 = "BF16"


def catalog_of(**specs):
    return Catalog(TensorSpec(name, dtype, shape) for name, (dtype, shape) in specs.items())


def copying(*names):
    return {name: lambda m, w, n=name: getattr(m, n).data.copy_(w) for name in names}


def prewarmed(name, **settings):
    case = LOADERS[name]()
    model = case.build()
    receiver = RankReceiver(model, model.load_weights, settings=ReceiverSettings(**settings))
    return case, model, receiver, receiver.prewarm(case.catalog)


class ManyExperts(torch.nn.Module):
    """Fused experts; each expert's tensors are placed with one slice, as engines do."""

    def __init__(self, count):
        super().__init__()
        self.w13 = torch.nn.Parameter(torch.zeros(count, 4, 2, dtype=torch.bfloat16), requires_grad=False)
        self.w2 = torch.nn.Parameter(torch.zeros(count, 2, 2, dtype=torch.bfloat16), requires_grad=False)
        self.loads = 0

    def load_weights(self, weights):
        self.loads += 1
        for name, w in weights:
            expert, matrix = name.split(".")
            if matrix == "down":
                self.w2.data[int(expert)].copy_(w)
            else:
                self.w13.data[int(expert)].narrow(0, 2 * (matrix == "up"), 2).copy_(w)


def test_twenty_thousand_names_need_a_constant_number_of_loader_calls():
    def loads(count):
        model = ManyExperts(count)
        catalog = Catalog(TensorSpec(f"{e}.{m}", BF16, (2, 2)) for e in range(count) for m in ("gate", "up", "down"))
        report = RankReceiver(model, model.load_weights).prewarm(catalog)
        assert {route.kind for route in report.routes.values()} == {"pieces"}
        assert len(report.routes) == 3 * count
        return model.loads

    assert loads(6667) == loads(100)


def test_the_report_travels_as_msgspec():
    _, _, _, report = prewarmed("A_log composed")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=PrewarmReport) == report


def test_a_second_prewarm_is_remembered_until_something_changes():
    case, model, receiver, report = prewarmed("fused qkv")
    calls = len(model.calls)
    assert receiver.prewarm(case.catalog) is report
    assert len(model.calls) == calls
    model.qkv.data = model.qkv.data.clone()
    again = receiver.prewarm(case.catalog)
    assert len(model.calls) > calls
    assert again.fingerprint != report.fingerprint


def test_a_changed_engine_option_asks_for_a_new_prewarm():
    options = {"tp": 1}
    case = LOADERS["fused qkv"]()
    model = case.build()
    receiver = RankReceiver(model, model.load_weights, settings=ReceiverSettings(layout_tag=lambda: str(options)))
    plan = plan_for([receiver.prewarm(case.catalog)], case.catalog)
    receiver.prepare(plan)
    options["tp"] = 2
    with pytest.raises(RejectedError, match="settings changed since prewarm"):
        receiver.prepare(plan)
    receiver.prewarm(case.catalog)
    receiver.prepare(plan)


def test_storage_that_moved_after_prewarm_is_refused_by_name():
    case, model, receiver, report = prewarmed("gate and up of one rank, row-parallel down")
    plan = plan_for([report], case.catalog)
    model.down.data = model.down.data.clone()
    with pytest.raises(RejectedError, match="storage of down changed"):
        receiver.prepare(plan)


def test_prepare_needs_a_prewarm_for_that_very_catalog():
    case = LOADERS["fused qkv"]()
    model = case.build()
    receiver = RankReceiver(model, model.load_weights)
    other = catalog_of(q=(BF16, (8, 6)))
    with pytest.raises(RejectedError, match="run prewarm first"):
        receiver.prepare(RefitPlan(other, {"q": Encoding.OVERWRITE}, 1))
    receiver.prewarm(case.catalog)
    with pytest.raises(RejectedError, match="not the one of the last prewarm"):
        receiver.prepare(RefitPlan(other, {"q": Encoding.OVERWRITE}, 1))


def test_an_encoding_that_the_rank_cannot_take_is_refused_at_prepare():
    case, _, receiver, _ = prewarmed("cast to half")
    with pytest.raises(RejectedError, match="w cannot take DIFFERENCE"):
        receiver.prepare(RefitPlan(case.catalog, {"w": Encoding.DIFFERENCE}, 1))


def test_a_tensor_that_must_be_sent_whole_is_refused_as_a_sparse_one():
    case, _, receiver, report = prewarmed("nan_to_num")
    assert report.routes["w"].is_dense
    with pytest.raises(RejectedError, match="every element of tensor w"):
        receiver.prepare(RefitPlan(case.catalog, {"w": Encoding.OVERWRITE}, 1))
    receiver.prepare(plan_for([report], case.catalog))


@pytest.mark.parametrize(
    ("name", "is_dense"),
    [
        ("A_log composed", False),
        ("A_log computed", False),
        ("cast to half", False),
        ("narrowed", False),
        ("nan_to_num", True),
        ("clamped", False),
        ("rows normalised", True),
    ],
)
def test_the_trial_tells_which_computing_loaders_can_be_masked(name, is_dense):
    _, _, _, report = prewarmed(name)
    route = report.routes["w"]
    assert (route.kind, route.cast, route.encodings, route.is_dense) == ("scratch", "opaque", (0,), is_dense)
    assert "computes" in route.reason


def test_scratch_is_reserved_for_tensors_that_need_it_only():
    assert prewarmed("fused qkv")[3].scratch_nbytes == 0
    assert prewarmed("fused qkv", path=ApplyPath.SCRATCH)[3].scratch_nbytes == 8 * 6 * 2
    assert prewarmed("A_log composed")[3].scratch_nbytes == 12 * 4


def test_experts_of_other_ranks_are_skipped_and_misreports_are_listed():
    for name, misreported in (("experts of another rank", 0), ("experts of another rank, reported as loaded", 6)):
        _, _, _, report = prewarmed(name)
        skipped = {n for n, route in report.routes.items() if route.kind == "skipped"}
        assert skipped == {f"{e}.{m}" for e in (0, 1) for m in ("gate", "up", "down")}
        assert len(report.misreported) == misreported


def test_padding_and_runtime_constants_are_listed_as_unreached():
    assert prewarmed("vocabulary padding")[3].unreached == {}
    assert prewarmed("buffers")[3].unreached == {"root": 1}
    assert prewarmed("zeroed before a partial copy")[3].routes["embed"].num_elements == 16


def test_tied_heads_are_aliases_that_take_overwrites_only():
    _, _, _, report = prewarmed("tied head loaded twice")
    assert report.aliases == (("embed", "head"),)
    assert {route.encodings for route in report.routes.values()} == {(0,)}


def test_a_widened_value_with_low_bits_takes_overwrites_only():
    case = LOADERS["widened"]()
    model = case.build()
    model.w.data[0, 0] = 0.1
    report = RankReceiver(model, model.load_weights).prewarm(case.catalog)
    assert report.routes["w"].encodings == (0,)
    assert "more bits" in report.routes["w"].reason


def test_a_loader_that_behaves_otherwise_alone_fails_the_cross_check():
    def load(model, weights):
        weights = list(weights)
        for name, w in weights:
            target = getattr(model, name).data
            target.copy_(w if len(weights) > 1 else w.flip(0))

    class Moody(ToyModel):
        def load_weights(self, weights):
            load(self, weights)

    model = Moody({"a": (BF16, (4, 2)), "b": (BF16, (4, 2))}, {})
    with pytest.raises(RejectedError, match=r"a: start-up cross-check: .* elsewhere"):
        RankReceiver(model, model.load_weights).prewarm(catalog_of(a=(BF16, (4, 2)), b=(BF16, (4, 2))))
    RankReceiver(model, model.load_weights, settings=ReceiverSettings(cross_check=0)).prewarm(
        catalog_of(a=(BF16, (4, 2)), b=(BF16, (4, 2)))
    )


def test_many_refusals_are_cut_short_in_the_text():
    names = [f"w{k:03}" for k in range(60)]
    model = ToyModel({"w": (BF16, (2,))}, {})
    with pytest.raises(RejectedError) as caught:
        RankReceiver(model, model.load_weights).prewarm(Catalog(TensorSpec(name, BF16, (2,)) for name in names))
    assert "w000: the loader refuses it: KeyError: 'w000'" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 25


def test_a_model_on_the_meta_device_is_refused():
    model = ToyModel({"a": (BF16, (2,))}, copying("a"))
    model.a = torch.nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)
    with pytest.raises(RejectedError, match="meta device"):
        RankReceiver(model, model.load_weights).prewarm(catalog_of(a=(BF16, (2,))))


def test_without_room_for_a_snapshot_the_refusal_says_that_bytes_are_spoilt():
    case = LOADERS["writes from a thread"]()
    model = case.build()
    with pytest.raises(RejectedError, match="spoilt: load the model again"):
        RankReceiver(model, model.load_weights, settings=ReceiverSettings(snapshot_nbytes=0)).prewarm(case.catalog)


def test_the_culprit_behind_the_hook_is_named_among_many():
    def bypass(model, w):
        storage_words(model.c.data)[:] = 7

    rules = {**copying("a", "b", "d"), "c": bypass}
    model = ToyModel(dict.fromkeys("abcd", (BF16, (4,))), rules)
    before = raw_state(model)
    with pytest.raises(RejectedError, match="c: its loader writes behind the dispatch hook to c"):
        RankReceiver(model, model.load_weights).prewarm(catalog_of(**dict.fromkeys("abcd", (BF16, (4,)))))
    assert raw_state(model) == before


def zero_input(model, w):
    w.zero_()
    model.a.data.copy_(w)


@pytest.mark.parametrize("rule", [lambda m, w: m.a.data.zero_(), zero_input])
def test_a_bias_that_only_another_rank_adds_is_a_constant_here(rule):
    """Engines zero a bias on all ranks but one, some by zeroing what they were given."""
    model = ToyModel({"a": (BF16, (4,))}, {"a": rule})
    report = RankReceiver(model, model.load_weights).prewarm(catalog_of(a=(BF16, (4,))))
    assert (report.routes["a"].kind, report.unreached) == ("skipped", {})
    assert "constant" in report.routes["a"].reason


def test_parameters_that_may_lack_a_tensor_are_allowed_by_pattern():
    case = LOADERS["parameter that the checkpoint lacks"]()
    model = case.build()
    receiver = RankReceiver(model, model.load_weights, settings=ReceiverSettings(may_lack=("b*",)))
    assert receiver.prewarm(case.catalog).unreached == {"b": 4}


def test_an_empty_shard_is_not_taken_for_a_packed_weight_where_that_is_allowed():
    model = ToyModel({"a": (BF16, (0,)), "b": (BF16, (2,))}, {"a": lambda m, w: m.a.data.copy_(w[:0]), **copying("b")})
    catalog = catalog_of(a=(BF16, (4,)), b=(BF16, (2,)))
    with pytest.raises(RejectedError, match="a: has shape"):
        RankReceiver(model, model.load_weights).prewarm(catalog)
    settings = ReceiverSettings(may_be_empty=("a",))
    assert RankReceiver(model, model.load_weights, settings=settings).prewarm(catalog).routes["a"].kind == "skipped"


def test_a_loader_that_collects_everything_first_is_learned_too():
    class Collecting(ToyModel):
        def load_weights(self, weights):
            super().load_weights(sorted(weights, key=lambda pair: pair[0], reverse=True))

    rules = {
        "a": lambda m, w: m.a.data.copy_(w.t().contiguous()),
        "b": lambda m, w: m.b.data.copy_(-torch.exp(w.float())),
        **copying("c"),
    }
    specs = {"a": (BF16, (3, 2)), "b": (BF16, (4,)), "c": (BF16, (5,))}
    model = Collecting({"a": (BF16, (2, 3)), "b": ("F32", (4,)), "c": (BF16, (5,))}, rules)
    report = RankReceiver(model, model.load_weights).prewarm(catalog_of(**specs))
    assert [report.routes[name].kind for name in "abc"] == ["pieces", "scratch", "pieces"]


def test_padding_is_told_apart_in_a_loader_that_collects_everything_first():
    def padded(model, w):
        model.a.data.zero_()
        model.a.data[:3].copy_(w)

    class Collecting(ToyModel):
        def load_weights(self, weights):
            super().load_weights(list(weights))

    specs = {"a": (BF16, (3, 2)), "b": (BF16, (5,))}
    model = Collecting({"a": (BF16, (4, 2)), "b": (BF16, (5,))}, {"a": padded, **copying("b")})
    report = RankReceiver(model, model.load_weights).prewarm(catalog_of(**specs))
    assert [report.routes[name].kind for name in "ab"] == ["pieces", "pieces"]


def test_prewarm_works_for_a_model_made_in_inference_mode():
    case = LOADERS["widened by a temporary"]()
    with torch.inference_mode():
        model = case.build()
        weights = random_weights(case.catalog, 3)
        model.load_weights(list(weights.items()))
        receiver = RankReceiver(model, model.load_weights)
        receiver.prewarm(case.catalog)
    report = receiver.prewarm(case.catalog)
    assert report.routes["w"].cast == "widen"


def test_reports_of_several_ranks_add_up():
    lower = LOADERS["experts of another rank"]()
    reports = []
    for held in ("all experts", "experts of another rank"):
        case = LOADERS[held]()
        model = case.build()
        reports.append(RankReceiver(model, model.load_weights).prewarm(case.catalog))
    merged = merge_reports(reports, lower.catalog)
    assert merged.unheld == ()
    assert set(merged.encodings.values()) == {int(Encoding.DIFFERENCE)}
    assert merge_reports(reports[1:], lower.catalog).unheld == tuple(f"{e}.{m}" for e in (0, 1) for m in ("down", "gate", "up"))


def test_one_rank_that_can_only_overwrite_decides_for_all():
    plain = LOADERS["clone"]()
    half = LOADERS["cast to half"]()
    reports = []
    for case in (plain, half):
        model = dense_reload(case.build, lambda m, w: m.load_weights(w.items()), random_weights(case.catalog, 0))
        reports.append(RankReceiver(model, model.load_weights).prewarm(case.catalog))
    assert merge_reports(reports, plain.catalog).encodings == {"w": int(Encoding.OVERWRITE)}


def test_the_settings_refuse_negative_sizes():
    with pytest.raises(RejectedError, match="expected a whole number from 0"):
        ReceiverSettings(cross_check=-1)


def test_prewarm_reads_no_weight_of_the_model_through_the_loader():
    """The survey's tensors occupy no memory: they are untouched zero pages."""
    from deltarefit.placement.inputs import Inputs

    inputs = Inputs([TensorSpec("w", BF16, (2**30,))])
    ((_, tensor),) = list(inputs)
    assert tensor.shape == (2**30,)
    assert inputs.find(tensor[5:].view(-1, 1)).name == "w"
    assert int(np.count_nonzero(tensor[:10].view(torch.int16).numpy())) == 0
