"""Digests computed from what ranks hold: sums over ranks, one flipped bit anywhere, what cannot be proved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltarefit import kernels
from deltarefit.bits import logical_words
from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.errors import BaseMismatchError
from deltarefit.pieces import Piece, StridedView
from deltarefit.receiver import PartDigest, RankDigest, RankReceiver, ReceiverSettings, merge_digests
from deltarefit.testing.loaders import LOADERS, ToyCase, ToyModel, random_weights
from deltarefit.testing.oracle import delta_payload, dense_reload, plan_for

pytestmark = pytest.mark.torch

PROVABLE = [
    name
    for name, make in LOADERS.items()
    if make().refused is None and set(make().routes.values()) <= {"skipped"} and name != "scale taken into Python"
]


def load(model, weights):
    model.load_weights([(name, tensor.clone()) for name, tensor in weights.items()])


def source_digest(tensor):
    words = logical_words(tensor)
    view = StridedView(0, (words.size,), (1,))
    return kernels.digest(words, [Piece(view, view)])


def receive(case, seed=1, **settings):
    weights = random_weights(case.catalog, seed)
    for first, second in case.equal_pairs:
        weights[second] = weights[first].clone()
    model = dense_reload(case.build, load, weights)
    receiver = RankReceiver(model, model.load_weights, settings=ReceiverSettings(**settings))
    receiver.prewarm(case.catalog)
    return weights, model, receiver


@pytest.mark.parametrize("name", PROVABLE)
@pytest.mark.parametrize("torch_writes", [False, True])
def test_digests_are_those_of_the_loaded_tensors(name, torch_writes):
    case = LOADERS[name]()
    weights, _, receiver = receive(case, torch_writes=torch_writes)
    merged = merge_digests([receiver.digests()], case.catalog)
    whole = {n: digest for n, digest in merged.items() if digest is not None}
    assert whole == {n: source_digest(weights[n]) for n in whole}
    held = {
        n for n, route in receiver.prewarm(case.catalog).routes.items() if route.num_elements == case.catalog[n].num_elements
    }
    assert {n for n in whole if case.catalog[n].num_elements} == {n for n in held if case.catalog[n].num_elements}


@pytest.mark.parametrize("name", ["fused qkv", "redundant experts", "widened", "head copied from the embedding", "every dtype"])
def test_one_flipped_bit_is_noticed_in_every_byte_that_is_held(name):
    case = LOADERS[name]()
    _, model, receiver = receive(case)
    before = receiver.digests()
    for parameter in model.parameters():
        stored = parameter.data.reshape(-1).view(torch.uint8)
        for place in range(0, stored.numel(), 7):
            stored[place] ^= 1
            assert receiver.digests() != before
            stored[place] ^= 1
    assert receiver.digests() == before


def test_a_flipped_bit_in_a_computed_parameter_is_noticed_once_its_copy_is_complete():
    case = LOADERS["A_log composed"]()
    weights, model, receiver = receive(case)
    assert receiver.digests() == {}
    plan = plan_for([receiver.prewarm(case.catalog)], case.catalog)
    dense = type(plan)(case.catalog, plan.encodings, 1, frozenset({"w"}))
    receiver.prepare(dense)
    receiver.apply(delta_payload(dense, weights, weights))
    proven = merge_digests([receiver.digests()], case.catalog)
    assert proven == {"w": source_digest(weights["w"])}
    model.w.data.view(torch.int32)[3] ^= 1
    assert merge_digests([receiver.digests()], case.catalog) != proven


def rows(first, last, of=8, replicated=2):
    """A rank that holds rows ``first`` to ``last`` of ``w``, and the last ``replicated`` rows in any case."""
    specs = {"w": ("BF16", (of, 3))}

    def rule(model, w):
        model.w.data[: last - first].copy_(w[first:last])
        if replicated:
            model.w.data[last - first :].copy_(w[of - replicated :])

    shape = (last - first + replicated, 3)
    return ToyCase(specs, lambda: ToyModel({"w": ("BF16", shape)}, {"w": rule}))


def test_ranks_that_hold_different_rows_add_up():
    ranks = [receive(rows(0, 4, replicated=0)), receive(rows(4, 8, replicated=0))]
    catalog = rows(0, 4).catalog
    merged = merge_digests([receiver.digests() for _, _, receiver in ranks], catalog)
    assert merged == {"w": source_digest(ranks[0][0]["w"])}


def test_ranks_that_share_a_box_add_up_box_by_box():
    ranks = [receive(rows(0, 3)), receive(rows(3, 6))]
    catalog = rows(0, 3).catalog
    digests = [receiver.digests() for _, _, receiver in ranks]
    assert merge_digests(digests, catalog) == {"w": source_digest(ranks[0][0]["w"])}
    ranks[1][1].w.data.view(torch.int16)[4, 1] ^= 1
    with pytest.raises(BaseMismatchError, match=r"w \(ranks 0 and 1\)"):
        merge_digests([digests[0], ranks[1][2].digests()], catalog)


def test_kv_heads_on_more_ranks_than_heads_must_agree():
    def head(of_rank):
        def rule(model, w):
            model.k.data.copy_(w.narrow(0, 2 * (of_rank // 2), 2))

        return ToyCase({"k": ("BF16", (4, 3))}, lambda: ToyModel({"k": ("BF16", (2, 3))}, {"k": rule}))

    ranks = [receive(head(rank)) for rank in range(4)]
    catalog = head(0).catalog
    assert merge_digests([r.digests() for _, _, r in ranks], catalog) == {"k": source_digest(ranks[0][0]["k"])}
    ranks[3][1].k.data.view(torch.int16)[0, 0] ^= 2
    with pytest.raises(BaseMismatchError, match=r"ranks 2 and 3"):
        merge_digests([r.digests() for _, _, r in ranks], catalog)


def test_a_part_that_nobody_holds_leaves_the_tensor_unproven():
    _, _, receiver = receive(rows(0, 3))
    assert merge_digests([receiver.digests()], rows(0, 3).catalog) == {"w": None}


def test_overlapping_shares_without_common_boxes_are_unproven():
    catalog = Catalog([TensorSpec("w", "BF16", (8,))])
    shares = [{"w": RankDigest("first", 6, 1, 2)}, {"w": RankDigest("second", 6, 3, 4)}]
    assert merge_digests(shares, catalog) == {"w": None}


def test_low_bits_that_appear_in_a_widened_value_spoil_the_digest_and_raise_nothing():
    case = LOADERS["widened"]()
    _, model, receiver = receive(case)
    before = receiver.digests()
    model.w.data.view(torch.int32)[0, 1] ^= 1
    assert receiver.digests() != before


def test_both_names_of_a_tied_head_show_the_same_digest():
    case = LOADERS["tied head loaded twice"]()
    weights, _, receiver = receive(case)
    merged = merge_digests([receiver.digests()], case.catalog)
    assert merged["embed"] == merged["head"] == source_digest(weights["embed"])


def test_digests_add_over_parts():
    part = PartDigest("x", 2, 2**64 - 1, 5)
    assert (part.digest + part.digest).lane0 == 2**64 - 2
    assert np.iinfo(np.uint64).max == part.lane0
