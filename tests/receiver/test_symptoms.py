"""Failures that people met with weight updates elsewhere, as small receivers. Each test is named after what they saw."""

from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pytest
import torch

from deltarefit import kernels
from deltarefit.bits import logical_words, storage_words, tensor_from_words
from deltarefit.canonical import TensorSpec
from deltarefit.errors import LoaderContractError, RejectedError
from deltarefit.ids import EncodingMode
from deltarefit.receiver import RankReceiver, ReceiverSettings, merge_reports
from deltarefit.records import DeltaRecords, Encoding
from deltarefit.testing.loaders import LOADERS, ToyCase, ToyModel, random_weights
from deltarefit.testing.oracle import assert_same_bits, delta_payload, dense_reload, plan_for, raw_state

pytestmark = pytest.mark.torch

BF16 = "BF16"


def load(model, weights):
    model.load_weights([(name, tensor.clone()) for name, tensor in weights.items()])


def put(parameter, place=lambda p: p):
    return lambda model, w: place(getattr(model, parameter).data).copy_(w)


def ignore(model, w):
    """A tensor that the loader knows and drops."""


class Live:
    """A served model of a case, its receiver, and helpers to refit it by single elements."""

    def __init__(self, case, *, weights=None, **settings):
        self.case = case
        self.weights = weights or random_weights(case.catalog, 1, finite=True)
        self.model = dense_reload(case.build, load, self.weights)
        self.receiver = RankReceiver(self.model, self.model.load_weights, settings=ReceiverSettings(**settings))
        self.report = self.receiver.prewarm(case.catalog)
        self.step = 0

    def refit(self, new, *, mode=EncodingMode.MIXED):
        plan = plan_for([self.report], self.case.catalog)
        self.receiver.prepare(plan)
        self.step += 1
        payload = delta_payload(plan, self.weights, new, mode=mode, attempt=f"v{self.step:06}-a1-test")
        written = self.receiver.apply(payload) if payload is not None else 0
        self.receiver.synchronize()
        self.weights = new
        return written

    def change(self, **elements):
        """New weights: per tensor, flat index to new stored bits."""
        new = dict(self.weights)
        for name, places in elements.items():
            words = logical_words(new[name]).copy()
            for flat_index, bits in places.items():
                words[flat_index] = bits
            new[name] = tensor_from_words(words, self.case.catalog[name])
        return new

    def check(self):
        assert_same_bits(self.model, dense_reload(self.case.build, load, self.weights))


def case_of(specs, parameters, rules, *, buffers=None, ignores_unknown=False):
    return ToyCase(specs, lambda: ToyModel(parameters, rules, buffers=buffers, ignores_unknown=ignores_unknown))


# --- tied heads -----------------------------------------------------------------------------------------------------------


def test_head_stays_at_its_random_init_because_the_checkpoint_has_none():
    """A separate head that only the embedding fills follows the embedding; one that nothing fills is refused."""
    live = Live(LOADERS["head copied from the embedding"]())
    live.refit(live.change(embed={13: 0x4242}))
    assert logical_words(live.model.head.data)[13] == 0x4242
    live.check()
    parameters = {"embed": (BF16, (8, 4)), "head": (BF16, (8, 4))}
    case = case_of({"embed": (BF16, (8, 4))}, parameters, {"embed": put("embed")})
    with pytest.raises(RejectedError, match="head: no canonical tensor reaches"):
        Live(case)


def test_tied_checkpoint_that_carries_a_head_dies_in_the_middle_of_loading():
    specs = {"embed": (BF16, (8, 4)), "lm_head": (BF16, (8, 4))}
    refusing = case_of(specs, {"embed": (BF16, (8, 4))}, {"embed": put("embed")})
    model = refusing.build()
    before = raw_state(model)
    with pytest.raises(RejectedError, match="lm_head: the loader refuses it"):
        RankReceiver(model, model.load_weights).prewarm(refusing.catalog)
    assert raw_state(model) == before
    dropping = case_of(specs, {"embed": (BF16, (8, 4))}, {"embed": put("embed"), "lm_head": ignore})
    live = Live(dropping)
    assert merge_reports([live.report], dropping.catalog).unheld == ("lm_head",)
    live.refit(live.change(embed={3: 1}, lm_head={3: 2, 4: 5}))
    live.check()


@pytest.mark.parametrize("is_tied", [True, False])
def test_tying_is_read_off_the_storages_and_not_off_a_configuration_key(is_tied):
    if is_tied:
        live = Live(LOADERS["tied head ignored"](), weights=None)
        live.refit({**live.change(embed={5: 9}), "head": live.change(embed={5: 9})["embed"]})
        assert logical_words(live.model.head.data)[5] == 9
    else:
        specs = {"embed": (BF16, (8, 4)), "head": (BF16, (8, 4))}
        live = Live(case_of(specs, specs, {"embed": put("embed"), "head": put("head")}))
        live.refit(live.change(embed={5: 9}))
        assert logical_words(live.model.head.data)[5] != 9
    live.check()


# --- names and coverage ---------------------------------------------------------------------------------------------------


def test_adapter_suffix_makes_every_update_load_nothing():
    specs = {"q.base_layer": (BF16, (4, 4))}
    case = case_of(specs, {"q": (BF16, (4, 4))}, {"q": put("q")}, ignores_unknown=True)
    with pytest.raises(RejectedError, match="q: no canonical tensor reaches this parameter"):
        RankReceiver(model := case.build(), model.load_weights).prewarm(case.catalog)


def test_update_succeeds_while_no_module_was_bound():
    specs = {"a": (BF16, (4,)), "b": (BF16, (4,))}
    case = case_of(specs, specs, {"a": ignore, "b": ignore})
    model = case.build()
    with pytest.raises(RejectedError, match="prewarm refuses 2 tensors"):
        RankReceiver(model, model.load_weights).prewarm(case.catalog)


def test_checkpoint_has_one_layer_more_than_the_model():
    specs = {f"layers.{n}.w": (BF16, (4,)) for n in range(3)}
    rules = {f"layers.{n}.w": put(f"w{n}") for n in range(2)}
    case = case_of(specs, {"w0": (BF16, (4,)), "w1": (BF16, (4,))}, rules, ignores_unknown=True)
    live = Live(case)
    assert live.report.routes["layers.2.w"].kind == "skipped"
    assert merge_reports([live.report], case.catalog).unheld == ("layers.2.w",)
    live.refit(live.change(**{"layers.1.w": {0: 1}, "layers.2.w": {0: 2}}))
    live.check()


def test_layer_kinds_are_never_counted_from_a_configuration():
    """Hybrid models without a layer count: everything comes from names that the loader places."""
    specs = {"0.mamba.in": (BF16, (6, 2)), "1.moe.up": (BF16, (2, 4, 3)), "2.attn.q": (BF16, (4, 2))}
    parameters = {"a": specs["0.mamba.in"], "b": specs["1.moe.up"], "c": specs["2.attn.q"]}
    rules = {"0.mamba.in": put("a"), "1.moe.up": put("b"), "2.attn.q": put("c")}
    live = Live(case_of(specs, parameters, rules))
    live.refit(random_weights(live.case.catalog, 5))
    live.check()


# --- fp8 and work after loading -------------------------------------------------------------------------------------------


def test_second_update_fails_because_the_parameter_lost_its_loader():
    def rule(model, w):
        model.w.weight_loader(model.w, w)

    def build():
        model = ToyModel({"w": (BF16, (4, 4))}, {"w": rule})
        model.w.weight_loader = lambda p, w: p.data.copy_(w)
        return model

    model = build()
    model.w = torch.nn.Parameter(model.w.data.clone(), requires_grad=False)  # what a post-load step does
    before = raw_state(model)
    case = ToyCase({"w": (BF16, (4, 4))}, build)
    with pytest.raises(RejectedError, match=r"w: the loader refuses it: AttributeError.*weight_loader"):
        RankReceiver(model, model.load_weights).prewarm(case.catalog)
    assert raw_state(model) == before
    Live(case)


def test_weights_sent_without_their_scales_leave_garbage_in_the_scales():
    specs = {"w": ("F8_E4M3", (4, 4)), "w_scale_inv": ("F32", (1, 1))}
    live = Live(case_of(specs, specs, {"w": put("w"), "w_scale_inv": put("w_scale_inv")}))
    scale = logical_words(live.model.w_scale_inv.data).copy()
    assert live.refit(live.change(w={5: 0x39})) == 1
    np.testing.assert_array_equal(logical_words(live.model.w_scale_inv.data), scale)
    live.check()


def test_minus_zero_and_nan_steps_in_fp8_are_lost():
    specs = {"w": ("F8_E4M3", (2, 4))}
    start = {"w": tensor_from_words(np.array([0, 0x7F, 0x38, 0, 0, 0, 0, 0], np.uint8), TensorSpec("w", "F8_E4M3", (2, 4)))}
    live = Live(case_of(specs, specs, {"w": put("w")}), weights=start)
    assert live.refit(live.change(w={0: 0x80, 1: 0xFF, 2: 0x39})) == 3
    assert logical_words(live.model.w.data)[:3].tolist() == [0x80, 0xFF, 0x39]


@pytest.mark.parametrize("together", [True, False])
def test_small_buckets_garble_a_fused_parameter_whose_halves_come_apart(together):
    live = Live(LOADERS["two names in one call"]())
    new = live.change(a={3: 1}, b={5: 2})
    if together:
        live.refit(new)
    else:
        live.refit({**live.weights, "a": new["a"]})
        live.refit(new)
    live.check()


def test_one_leaf_name_has_three_formats_in_three_layers():
    specs = {
        "0.down": ("U8", (4, 2)), "0.down_scale": ("F8_E4M3", (4, 1)), "1.down": ("F8_E4M3", (4, 4)),
        "1.down_scale": ("F32", ()), "2.down": (BF16, (4, 4)),
    }  # fmt: skip
    parameters = {name.replace(".", "_"): spec for name, spec in specs.items()}
    live = Live(case_of(specs, parameters, {name: put(name.replace(".", "_")) for name in specs}))
    live.refit(random_weights(live.case.catalog, 8))
    live.check()


def test_weights_in_a_packed_layout_fail_in_the_first_or_the_second_update():
    specs = {"w13": (BF16, (2, 4, 6))}
    case = case_of(specs, specs, {"w13": put("w13")})
    model = case.build()
    model.w13.data = model.w13.data.reshape(2, 3, 4, 2)  # block layout that a kernel wanted
    with pytest.raises(RejectedError, match="w13: the loader refuses it: RuntimeError"):
        RankReceiver(model, model.load_weights).prewarm(case.catalog)


# --- storage and buffers --------------------------------------------------------------------------------------------------


def test_captured_graphs_read_the_old_address():
    live = Live(LOADERS["gate and up of one rank, row-parallel down"]())
    views = {name: (tensor.data_ptr(), tensor.data[1:]) for name, tensor in live.model.named_parameters()}
    live.refit(random_weights(live.case.catalog, 3))
    live.check()
    for name, tensor in live.model.named_parameters():
        assert tensor.data_ptr() == views[name][0]
        assert torch.equal(tensor.data[1:].view(torch.int16), views[name][1].view(torch.int16))


def test_runtime_constant_in_a_buffer_turns_into_one():
    live = Live(LOADERS["buffers"]())
    root = logical_words(live.model.root).copy()
    live.refit(random_weights(live.case.catalog, 3))
    np.testing.assert_array_equal(logical_words(live.model.root), root)
    live.check()


def test_buffers_are_lost_over_deep_sleep_and_nobody_notices():
    """Checkpoint-borne statistics are versioned; a receiver-only table shows in the residue when it is zeroed."""
    specs = {"w": (BF16, (4,)), "running_mean": ("F32", (4,)), "running_var": ("F32", (4,))}
    buffers = {"running_mean": ("F32", (4,)), "running_var": ("F32", (4,)), "inv_freq": ("F32", (3,))}
    live = Live(case_of(specs, {"w": (BF16, (4,))}, {name: put(name) for name in specs}, buffers=buffers))
    live.model.inv_freq.fill_(0.5)
    committed = live.receiver.residue()
    live.refit(live.change(running_mean={0: 0x3F800000}, running_var={3: 0x40000000}))
    assert live.model.running_mean[0] == 1
    assert live.receiver.residue() == committed
    live.model.inv_freq.zero_()
    assert [name for name, digest in live.receiver.residue().items() if digest != committed[name]] == ["inv_freq"]


def test_state_outside_the_module_is_claimed_to_be_verified():
    live = Live(LOADERS["buffers"]())
    assert live.report.num_storages == 3
    assert live.report.resident_nbytes == sum(
        t.numel() * t.element_size() for t in (live.model.w, live.model.bias, live.model.root)
    )


def test_a_second_write_path_leaves_parameters_uninitialised():
    def through_storage(model, w):
        storage_words(model.b.data)[:] = 7

    specs = {"a": (BF16, (4,)), "b": (BF16, (4,)), "c": (BF16, (4,))}
    case = case_of(specs, specs, {"a": put("a"), "b": through_storage, "c": put("c")})
    model = case.build()
    model.b.data.fill_(3)
    before = raw_state(model)
    with pytest.raises(RejectedError, match=r"\bb: "):
        RankReceiver(model, model.load_weights).prewarm(case.catalog)
    assert raw_state(model) == before


# --- layouts --------------------------------------------------------------------------------------------------------------


def test_absorbed_mla_matrices_are_derived_once_and_go_stale():
    def rule(model, w):
        heads = w.view(2, 4, 3)
        model.kv_b.data.copy_(w)
        model.w_kc.data.copy_(heads[:, :2].transpose(1, 2))
        model.w_vc.data.copy_(heads[:, 2:].contiguous())

    parameters = {"kv_b": (BF16, (8, 3)), "w_kc": (BF16, (2, 3, 2)), "w_vc": (BF16, (2, 2, 3))}
    live = Live(case_of({"kv_b": (BF16, (8, 3))}, parameters, {"kv_b": rule}))
    places = [p.data_ptr() for p in live.model.parameters()]
    assert live.report.routes["kv_b"].encodings[0] == int(Encoding.DIFFERENCE)
    assert live.refit(live.change(kv_b={1: 7, 7: 9})) == 4
    live.check()
    assert [p.data_ptr() for p in live.model.parameters()] == places


def test_experts_moved_between_slots_but_updates_go_to_the_first_placement():
    placement = {"map": [2, 0, 3, 1, 2, 0]}

    def rule(expert):
        def place(model, w):
            for slot, held in enumerate(placement["map"]):
                if held == expert:
                    model.w.data[slot].copy_(w)

        return place

    specs = {f"{e}.w": (BF16, (2, 2)) for e in range(4)}
    case = case_of(specs, {"w": (BF16, (6, 2, 2))}, {f"{e}.w": rule(e) for e in range(4)})
    live = Live(case, layout_tag=lambda: str(placement["map"]))
    assert live.refit(live.change(**{"2.w": {0: 1}})) == 2
    assert logical_words(live.model.w.data).reshape(6, 4)[[0, 4], 0].tolist() == [1, 1]
    live.check()
    new = live.change(**{"2.w": {0: 3}})
    plan = plan_for([live.report], case.catalog)
    live.receiver.prepare(plan)
    payload = delta_payload(plan, live.weights, new)
    placement["map"] = [0, 1, 2, 3, 0, 1]
    load(live.model, live.weights)
    before = raw_state(live.model)
    with pytest.raises(LoaderContractError, match="run prewarm again"):  # they moved between prepare and the first payload
        live.receiver.apply(payload)
    with pytest.raises(LoaderContractError, match="run prewarm again"):
        live.receiver.digests()
    assert raw_state(live.model) == before
    with pytest.raises(RejectedError, match="run prewarm again"):
        live.refit(live.change(**{"2.w": {0: 3}}))
    live.report = live.receiver.prewarm(case.catalog)
    assert live.refit(live.change(**{"2.w": {0: 3}})) == 1
    live.check()


def test_fused_qkv_of_grouped_heads_is_scrambled():
    """Rows of the engine's parameter: q0 q1 k0 v0, q2 q3 k1 v1, two rows a head."""

    def rule(first, count):
        def place(model, w):
            model.qkv.data.view(2, 8, 3)[:, first : first + 2 * count].copy_(w.view(2, 2 * count, 3))

        return place

    specs = {"q": (BF16, (8, 3)), "k": (BF16, (4, 3)), "v": (BF16, (4, 3))}
    live = Live(case_of(specs, {"qkv": (BF16, (16, 3))}, {"q": rule(0, 2), "k": rule(4, 1), "v": rule(6, 1)}))
    before = logical_words(live.model.qkv.data).copy()
    live.refit(live.change(k={2 * 3: int(before[0]) ^ 1}))
    changed = np.flatnonzero(logical_words(live.model.qkv.data) != before)
    assert all(place // 3 == 8 + 4 for place in changed)
    live.check()


@pytest.mark.parametrize("rank", range(4))
def test_kv_heads_are_fewer_than_ranks(rank):
    case = case_of(
        {"k": (BF16, (4, 3))}, {"k": (BF16, (2, 3))}, {"k": lambda m, w: m.k.data.copy_(w.narrow(0, rank // 2 * 2, 2))}
    )
    live = Live(case)
    written = live.refit(live.change(k={2 * 3: 0x1111}))
    assert written == (1 if rank in (2, 3) else 0)
    live.check()


def test_every_rank_loads_the_first_shard():
    case = case_of({"w": (BF16, (8, 4))}, {"w": (BF16, (4, 4))}, {"w": lambda m, w: m.w.data.copy_(w.narrow(0, 4, 4))})
    live = Live(case)
    live.refit(live.change(w={5 * 4: 1, 6 * 4: 2}))
    assert logical_words(live.model.w.data)[[4, 8]].tolist() == [1, 2]
    live.check()


def test_vocabulary_padding_leaks():
    live = Live(LOADERS["vocabulary padding"]())
    live.refit(random_weights(live.case.catalog, 4))
    assert not logical_words(live.model.embed.data)[40:].any()
    live.check()


def test_result_depends_on_the_order_in_which_tensors_arrive():
    first, second = Live(LOADERS["fused qkv"]()), Live(LOADERS["fused qkv"]())
    new = random_weights(first.case.catalog, 9)
    plan = plan_for([first.report], first.case.catalog)
    first.receiver.prepare(plan)
    second.receiver.prepare(plan)
    payload = delta_payload(plan, first.weights, new)
    first.receiver.apply(payload)
    second.receiver.apply(dataclasses.replace(payload, items=payload.items[::-1]))
    assert_same_bits(first.model, second.model)


# --- values and dtypes ----------------------------------------------------------------------------------------------------


def test_reloading_the_same_weights_changes_a_hybrid_model():
    live = Live(LOADERS["A_log composed"]())
    before = raw_state(live.model)
    for _ in range(2):
        live.refit(dict(live.weights), mode=EncodingMode.OVERWRITE)
        assert raw_state(live.model) == before
    bits = int(logical_words(live.weights["w"])[2])
    live.refit(live.change(w={2: bits + 1}))
    live.check()
    assert live.report.routes["w"].encodings == (int(Encoding.OVERWRITE),)


def test_correction_bias_without_a_gradient_is_left_out_and_rounded():
    bias = torch.linspace(6.817, 7.063, 238)
    specs = {"bias": ("F32", (238,)), "gate": (BF16, (4, 4))}
    case = case_of(
        specs, {"gate": ("F32", (4, 4))}, {"bias": put("bias"), "gate": put("gate")}, buffers={"bias": ("F32", (238,))}
    )
    live = Live(case, weights={"bias": bias, "gate": torch.randn(4, 4).bfloat16()})
    assert live.refit(live.change(bias={17: int(logical_words(bias)[17]) + 1})) == 1
    assert len(set(live.model.bias.tolist())) == 238
    live.check()


def test_widened_router_weights_take_differences_and_keep_their_low_bits_zero():
    live = Live(LOADERS["widened by a temporary"]())
    assert live.report.routes["w"].encodings[0] == int(Encoding.DIFFERENCE)
    for seed in range(3):
        live.refit(random_weights(live.case.catalog, seed))
        live.check()
    assert not (logical_words(live.model.w.data) & 0xFFFF).any()


@pytest.mark.parametrize("name", ["fused qkv", "widened", "every dtype", "stacked experts with halves swapped"])
def test_sign_of_zero_and_nan_payloads_are_lost(name):
    live = Live(LOADERS[name](), weights=random_weights(LOADERS[name]().catalog, 1))
    live.refit(random_weights(live.case.catalog, 2))
    live.check()


def test_unchanged_nan_looks_changed_every_step():
    live = Live(LOADERS["clone"]())
    live.refit(live.change(w={3: 0x7FC0}))
    for _ in range(3):
        assert live.refit(dict(live.weights)) == 0


# --- loaders that keep things ---------------------------------------------------------------------------------------------


def test_a_loader_that_defers_copies_meets_a_reused_buffer():
    """Copies wait until all tensors of a layer came; the compiled path never hands a reused buffer to the loader."""

    class Deferring(ToyModel):
        def load_weights(self, weights):
            waiting = list(weights)
            if len(waiting) == 3:
                super().load_weights(waiting)

    specs = {"a": (BF16, (4,)), "b": (BF16, (4,)), "c": (BF16, (4,))}
    case = ToyCase(specs, lambda: Deferring(specs, {name: put(name) for name in specs}))
    live = Live(case, cross_check=0)
    for seed in range(2):
        live.refit(random_weights(case.catalog, seed))
        live.check()
    with pytest.raises(RejectedError, match="cross-check"):
        Live(case)


def test_target_and_draft_models_share_an_embedding_that_is_changed_once():
    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.target = ToyModel({"embed": (BF16, (4, 2)), "w": (BF16, (3,))}, {})
            self.draft = ToyModel({"w": (BF16, (3,))}, {})
            self.draft.embed = self.target.embed

        def load_weights(self, weights):
            for name, w in weights:
                side, leaf = name.split(".")
                getattr(getattr(self, side), leaf).data.copy_(w)

    specs = {"target.embed": (BF16, (4, 2)), "target.w": (BF16, (3,)), "draft.w": (BF16, (3,))}
    live = Live(ToyCase(specs, Pair))
    before = int(logical_words(live.weights["target.embed"])[1])
    live.refit(live.change(**{"target.embed": {1: before + 1}, "draft.w": {0: 1}}))
    assert logical_words(live.model.draft.embed.data)[1] == before + 1
    live.check()


def test_one_change_in_a_large_tensor_costs_a_full_copy():
    shape = (2048, 2048)
    case = case_of({"w": (BF16, shape)}, {"w": (BF16, shape)}, {"w": put("w")})
    live = Live(case, weights={"w": torch.zeros(shape, dtype=torch.bfloat16)})
    plan = plan_for([live.report], case.catalog)
    live.receiver.prepare(plan)
    spec = case.catalog["w"]
    item = kernels.code_records(
        DeltaRecords(spec, np.array([2**21 + 5]), np.array([7], np.uint16), np.array([0], np.uint16)), plan.encodings["w"]
    )
    payload = dataclasses.replace(delta_payload(plan, live.weights, live.change(w={0: 1})), items=(item,))
    live.receiver.apply(payload)
    tracemalloc.start()
    live.receiver.apply(payload)
    peak_nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_nbytes < 64 * 1024 < spec.nbytes


def test_host_memory_grows_with_every_update():
    live = Live(LOADERS["gate and up of one rank, row-parallel down"]())
    first, second = live.weights, random_weights(live.case.catalog, 7)
    for _ in range(3):
        live.refit(second)
        live.refit(first)
    tracemalloc.start()
    start = tracemalloc.get_traced_memory()[0]
    for _ in range(10):
        live.refit(second)
        live.refit(first)
    grown_nbytes = tracemalloc.get_traced_memory()[0] - start
    tracemalloc.stop()
    assert grown_nbytes < 64 * 1024


def test_empty_tensors_are_taken_for_shared_memory():
    live = Live(LOADERS["no elements"]())
    assert live.report.routes["empty"].num_elements == 0
    live.refit(live.change(scalar={0: 5}))
    live.check()
