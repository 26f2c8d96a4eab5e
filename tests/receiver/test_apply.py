"""Apply: what is refused before the first write, retries, whole loads, storage that stays where it is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from deltarefit import kernels
from deltarefit.bits import logical_words, tensor_from_words
from deltarefit.canonical import TensorSpec
from deltarefit.errors import LoaderContractError, PayloadInvalidError, PayloadMissingError, RejectedError
from deltarefit.ids import EncodingMode
from deltarefit.receiver import ApplyPath, RankReceiver, ReceiverSettings
from deltarefit.records import CodedItem, DeltaRecords, Encoding
from deltarefit.testing.loaders import LOADERS, random_weights
from deltarefit.testing.oracle import assert_same_bits, delta_payload, dense_reload, plan_for, raw_state

pytestmark = pytest.mark.torch


def load(model, weights):
    model.load_weights([(name, tensor.clone()) for name, tensor in weights.items()])


class Refit:
    """A receiver of one toy case at version 0, and the weights of version 1."""

    def __init__(self, name, *, prefer=Encoding.DIFFERENCE, share=0.3, **settings):
        self.case = LOADERS[name]()
        self.old = random_weights(self.case.catalog, 1)
        self.new = {}
        generator = np.random.default_rng(2)
        for tensor_name, tensor in random_weights(self.case.catalog, 2).items():
            words = logical_words(self.old[tensor_name]).copy()
            places = np.flatnonzero(generator.random(words.size) < share)
            words[places] = logical_words(tensor)[places]
            self.new[tensor_name] = tensor_from_words(words, self.case.catalog[tensor_name])
        self.model = dense_reload(self.case.build, load, self.old)
        self.receiver = RankReceiver(self.model, self.model.load_weights, settings=ReceiverSettings(**settings))
        self.report = self.receiver.prewarm(self.case.catalog)
        self.plan = plan_for([self.report], self.case.catalog, prefer=prefer)
        self.receiver.prepare(self.plan)

    def payload(self, **changes):
        return delta_payload(self.plan, self.old, self.new, **changes)

    def items(self):
        return list(self.payload().items)

    def with_items(self, items):
        return dataclasses.replace(self.payload(), items=tuple(items))

    def check(self):
        self.receiver.synchronize()
        assert_same_bits(self.model, dense_reload(self.case.build, load, self.new))


def test_storage_stays_where_it_is_and_old_views_show_the_new_bits():
    refit = Refit("fused qkv")
    view = refit.model.qkv.data[3:9]
    places = {n: (t.data_ptr(), t.stride()) for n, t in refit.model.named_parameters()}
    for _ in range(3):
        refit.receiver.prepare(refit.plan)
        refit.receiver.apply(refit.payload(mode=EncodingMode.OVERWRITE))
    refit.check()
    assert {n: (t.data_ptr(), t.stride()) for n, t in refit.model.named_parameters()} == places
    np.testing.assert_array_equal(logical_words(view), logical_words(refit.model.qkv.data[3:9]))


def other_spec(item, spec):
    return dataclasses.replace(item, spec=spec)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda i: other_spec(i, TensorSpec("nobody", "BF16", i.spec.shape)), "nobody .* expected a name of the catalog"),
        (lambda i: other_spec(i, TensorSpec(i.spec.name, "F16", i.spec.shape)), r"F16.* expected v BF16"),
        (lambda i: other_spec(i, TensorSpec(i.spec.name, "BF16", (6, 4))), r"\[6, 4\], expected v BF16\[4, 6\]"),
        (lambda i: dataclasses.replace(i, encoding=Encoding.XOR), "v is XOR, the plan says DIFFERENCE"),
    ],
)
def test_a_payload_with_one_wrong_item_is_refused_before_the_first_is_written(change, match):
    refit = Refit("fused qkv")
    before = raw_state(refit.model)
    items = refit.items()
    assert items[-1].spec.name == "v"
    with pytest.raises(PayloadInvalidError, match=match):
        refit.receiver.apply(refit.with_items([*items[:-1], change(items[-1])]))
    assert raw_state(refit.model) == before


def test_a_payload_for_another_plan_is_refused():
    refit = Refit("fused qkv")
    other = plan_for([refit.report], refit.case.catalog, prefer=Encoding.XOR)
    with pytest.raises(PayloadInvalidError, match="made for plan"):
        refit.receiver.apply(delta_payload(other, refit.old, refit.new))


def test_nothing_is_applied_without_a_plan():
    refit = Refit("fused qkv")
    fresh = RankReceiver(refit.model, refit.model.load_weights)
    with pytest.raises(RejectedError, match="run prewarm first"):
        fresh.apply(refit.payload())
    fresh.prewarm(refit.case.catalog)
    with pytest.raises(RejectedError, match="no plan was prepared"):
        fresh.apply(refit.payload())


def test_masks_for_a_tensor_whose_base_is_doubtful_are_refused():
    refit = Refit("fused qkv")
    refit.receiver.prepare(dataclasses.replace(refit.plan, dense=frozenset({"k"})))
    item = next(item for item in refit.items() if item.spec.name == "k")
    payload = dataclasses.replace(
        refit.with_items([item]),
        header=dataclasses.replace(
            refit.payload().header, plan_digest=dataclasses.replace(refit.plan, dense=frozenset({"k"})).digest
        ),
    )
    with pytest.raises(PayloadInvalidError, match="k is DIFFERENCE, the plan says OVERWRITE"):
        refit.receiver.apply(payload)


@pytest.mark.parametrize("path", list(ApplyPath))
@pytest.mark.parametrize("seed", range(8))
def test_an_overwrite_retry_repairs_whatever_a_failed_attempt_left(path, seed):
    refit = Refit("every dtype", path=path)
    generator = np.random.default_rng(seed)
    for _ in range(2):
        chosen = [item for item in refit.items() if generator.random() < 0.5]
        refit.receiver.apply(refit.with_items(chosen))
    refit.receiver.prepare(refit.plan)
    refit.receiver.apply(refit.payload(mode=EncodingMode.OVERWRITE, attempt="v000001-a2-test"))
    refit.check()


def test_applying_a_mask_twice_is_wrong_which_is_why_retries_overwrite():
    refit = Refit("fused qkv")
    refit.receiver.apply(refit.payload())
    refit.check()
    refit.receiver.apply(refit.payload())
    with pytest.raises(AssertionError, match="differ from the dense reload"):
        refit.check()


def test_a_tensor_that_must_be_loaded_whole_waits_for_all_owners():
    refit = Refit("rows normalised")
    (item,) = refit.items()
    spec, values = item.spec, kernels.decode_values(item)
    assert item.count == spec.num_elements

    def part(places):
        records = DeltaRecords(spec, np.array(places, np.int64), values[places], None)
        return kernels.code_records(records, Encoding.OVERWRITE)

    before = raw_state(refit.model)
    assert refit.receiver.apply(refit.with_items([part(range(0, 24, 2))])) == 0
    assert raw_state(refit.model) == before
    with pytest.raises(PayloadMissingError, match="w: must be loaded whole, 12 of 24"):
        refit.receiver.synchronize()
    assert refit.receiver.apply(refit.with_items([part(range(1, 24, 2))])) == 24
    refit.check()


def test_parts_of_a_failed_attempt_do_not_complete_the_next_one():
    refit = Refit("rows normalised")
    (item,) = refit.items()
    values = kernels.decode_values(item)
    half = kernels.code_records(DeltaRecords(item.spec, np.arange(12), values[:12], None), Encoding.OVERWRITE)
    rest = kernels.code_records(DeltaRecords(item.spec, np.arange(12, 24), values[12:], None), Encoding.OVERWRITE)
    refit.receiver.apply(refit.with_items([half]))
    refit.receiver.prepare(refit.plan)
    retry = refit.payload(attempt="v000001-a2-test")
    assert refit.receiver.apply(dataclasses.replace(retry, items=(rest,))) == 0
    assert refit.receiver.apply(dataclasses.replace(retry, items=(half,))) == 24
    refit.check()


def test_parts_of_a_failed_attempt_do_not_hold_up_an_attempt_without_changes():
    refit = Refit("rows normalised")
    (item,) = refit.items()
    values = kernels.decode_values(item)
    half = kernels.code_records(DeltaRecords(item.spec, np.arange(12), values[:12], None), Encoding.OVERWRITE)
    refit.receiver.apply(refit.with_items([half]))
    refit.receiver.prepare(refit.plan)
    refit.receiver.synchronize()


def test_a_copy_that_is_complete_carries_later_changes_through_whole_loads():
    refit = Refit("A_log composed")
    dense = dataclasses.replace(refit.plan, dense=frozenset({"w"}))
    refit.receiver.prepare(dense)
    refit.receiver.apply(delta_payload(dense, refit.old, refit.old))
    calls = len(refit.model.calls)
    refit.receiver.prepare(refit.plan)
    refit.receiver.apply(refit.payload())
    assert len(refit.model.calls) == calls + 1
    refit.check()


def test_items_for_skipped_tensors_write_nothing_and_do_not_fail():
    refit = Refit("experts of another rank")
    before = raw_state(refit.model)
    skipped = [item for item in refit.items() if item.spec.name.startswith(("0.", "1."))]
    assert skipped
    assert refit.receiver.apply(refit.with_items(skipped)) == 0
    assert raw_state(refit.model) == before


def test_every_home_of_a_redundant_expert_is_written():
    refit = Refit("redundant experts")
    item = next(item for item in refit.items() if item.spec.name == "2.gate")
    assert refit.receiver.apply(refit.with_items([item])) == 2 * item.count
    other = logical_words(refit.model.w13.data[0, :4])
    np.testing.assert_array_equal(other, logical_words(refit.model.w13.data[4, :4]))


def test_only_ranges_of_emitted_elements_differ_after_a_refit():
    refit = Refit("fused qkv", share=0.05)
    before = logical_words(refit.model.qkv.data).copy()
    refit.receiver.apply(refit.payload())
    changed = np.flatnonzero(logical_words(refit.model.qkv.data) != before)
    assert changed.size == sum(item.count for item in refit.items())


def test_a_loader_that_turns_bad_after_prewarm_fails_the_attempt():
    refit = Refit("A_log computed")
    refit.model._rules["w"] = lambda m, w: m.w.data.add_(w.float())
    with pytest.raises(LoaderContractError, match="prewarm did not see it"):
        refit.receiver.apply(refit.payload())


@pytest.mark.parametrize("rebind", [False, True])
def test_storage_replaced_during_an_attempt_fails_the_next_payload_and_the_end(rebind):
    refit = Refit("fused qkv")
    refit.receiver.apply(refit.payload())
    if rebind:
        refit.model.qkv = torch.nn.Parameter(refit.model.qkv.data.clone(), requires_grad=False)
    else:
        refit.model.qkv.data = refit.model.qkv.data.clone()
    before = raw_state(refit.model)
    with pytest.raises(LoaderContractError, match="storage of qkv was moved or replaced"):
        refit.receiver.apply(refit.payload(mode=EncodingMode.OVERWRITE))
    assert raw_state(refit.model) == before
    with pytest.raises(LoaderContractError, match="storage of qkv was moved or replaced"):
        refit.receiver.synchronize()


@pytest.mark.parametrize("encoding", list(Encoding))
def test_the_check_after_a_write_straight_to_storage_notices_a_flipped_bit(monkeypatch, encoding):
    refit = Refit("widened", prefer=encoding, verify_writes=True)
    refit.receiver.apply(refit.with_items([]))
    original = kernels.BoundPieces.apply_item

    def faulty(self, item):
        count = original(self, item)
        refit.model.w.data.view(torch.int32).view(-1)[int(kernels.decode_positions(item)[1])] ^= 1 << 20
        return count

    monkeypatch.setattr(kernels.BoundPieces, "apply_item", faulty)
    with pytest.raises(LoaderContractError, match=r"tensor w: post-apply check fails at flat index \d+ in w"):
        refit.receiver.apply(refit.payload())


def test_residue_is_what_no_tensor_reaches_and_shows_when_it_changes():
    refit = Refit("buffers")
    before = refit.receiver.residue()
    assert set(before) == {"root"}
    refit.receiver.apply(refit.payload())
    assert refit.receiver.residue() == before
    refit.model.root.fill_(1.0)
    assert refit.receiver.residue() != before


def test_apply_reports_the_elements_it_wrote():
    refit = Refit("fused qkv")
    payload = refit.payload()
    assert refit.receiver.apply(payload) == sum(item.count for item in payload.items)


def test_the_smallest_item_changes_one_element():
    refit = Refit("stacked experts with halves swapped")
    spec = refit.case.catalog["w"]
    one = kernels.code_records(DeltaRecords(spec, np.array([31]), np.array([0x1234], np.uint16), None), Encoding.OVERWRITE)
    assert isinstance(one, CodedItem)
    assert refit.receiver.apply(refit.with_items([one])) == 1
    assert logical_words(refit.model.w13.data)[31 + 15] == 0x1234  # expert 1, gate row 0: behind the up half


def test_torch_writes_are_the_same_as_words():
    for name in ("fused qkv", "widened", "redundant experts", "every dtype"):
        for prefer in Encoding:
            refit = Refit(name, prefer=prefer, torch_writes=True, verify_writes=True)
            refit.receiver.apply(refit.payload())
            refit.check()


def test_a_loader_called_from_a_fork_of_inference_mode_applies_too():
    refit = Refit("cast to half")
    with torch.inference_mode():
        refit.receiver.apply(refit.payload())
    refit.check()


def test_what_was_made_ready_is_checked_again_when_plan_or_prewarm_changed_meanwhile():
    refit = Refit("fused qkv")
    early = refit.receiver.ready(refit.payload())
    refit.receiver.apply(early)
    refit.check()
    again = refit.receiver.ready(refit.payload(mode=EncodingMode.OVERWRITE))
    refit.receiver.prepare(plan_for([refit.report], refit.case.catalog, prefer=Encoding.XOR))
    with pytest.raises(PayloadInvalidError, match="this receiver prepared"):
        refit.receiver.apply(again)
    refit.receiver.prepare(refit.plan)
    assert refit.receiver.apply(again) > 0
    refit.check()


def test_nothing_is_made_ready_before_a_plan_is_known():
    refit = Refit("fused qkv")
    fresh = RankReceiver(refit.model, refit.model.load_weights)
    with pytest.raises(RejectedError, match="no plan was prepared"):
        fresh.ready(refit.payload())


def test_what_was_made_ready_while_another_prewarm_began_is_not_applied(monkeypatch):
    refit = Refit("fused qkv")
    payload, real = refit.payload(), RankReceiver._known

    def begins(receiver):
        known = real(receiver)
        receiver._prewarmed = receiver._plan = None  # what a prewarm of another layout begins with
        return known

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(RankReceiver, "_known", begins)
        early = refit.receiver.ready(payload)
    with pytest.raises(RejectedError, match="run prewarm first"):
        refit.receiver.apply(early)
    refit.receiver.prewarm(refit.case.catalog)
    with pytest.raises(RejectedError, match="no plan was prepared"):
        refit.receiver.apply(early)
