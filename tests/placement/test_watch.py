"""Storages, shadows, claims and the hook itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltarefit.bits import logical_words
from deltarefit.canonical import TensorSpec
from deltarefit.errors import RejectedError
from deltarefit.pieces import StridedView
from deltarefit.placement.inputs import Inputs
from deltarefit.placement.learn import in_units
from deltarefit.placement.overlap import Claim, colliding
from deltarefit.placement.run import run_loader
from deltarefit.placement.shadow import Shadow
from deltarefit.placement.storages import StorageMap, state_tensors
from deltarefit.placement.watch import WriteKind

pytestmark = pytest.mark.torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).bfloat16(), requires_grad=False)
        self.tied = self.w
        self.register_buffer("b", torch.zeros(4))
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.zeros(0, 3))

    def storages(self):
        return StorageMap(state_tensors(self))


W = TensorSpec("w", "BF16", (3, 4))


def watch(rule, model=None, **options):
    model = model or Model()
    return run_loader(lambda ws: [rule(model, t) for _, t in ws] and None, model.storages(), [W], **options)


# --- storages -------------------------------------------------------------------------------------------------------------


def test_aliases_share_one_storage_and_foreign_views_are_found():
    model = Model()
    storages = model.storages()
    assert [(s.key, s.names) for s in storages.storages] == [("w", ("w", "tied")), ("b", ("b",))]
    foreign = torch.from_numpy(model.b.numpy()[1:])
    assert storages.find(foreign) == (storages.storages[1], 4)
    assert storages.find(model.w[1:].t()) == (storages.storages[0], 0)
    assert storages.find(torch.zeros(3)) is None
    assert storages.find(model.empty) is None
    assert storages.nbytes == 24 + 16


def test_words_of_a_storage_share_its_memory():
    model = Model()
    words = model.storages().storages[0].words(2)
    words[5] = 0x3F80
    assert model.w[1, 1] == 1


def test_overlapping_storages_are_refused():
    raw = np.zeros(8, np.float32)
    with pytest.raises(RejectedError, match="overlap in memory"):
        StorageMap({"a": torch.from_numpy(raw[:5]), "b": torch.from_numpy(raw[4:])})


def test_tensors_without_plain_storage_are_refused():
    with pytest.raises(RejectedError, match="plain strided"):
        StorageMap({"a": torch.eye(2).to_sparse()})


# --- the hook -------------------------------------------------------------------------------------------------------------


def test_nothing_is_written_and_views_are_told():
    model = Model()
    before = logical_words(model.w).copy()
    run = watch(lambda m, w: m.w.data[1:, 1:3].copy_(w[:2, 2:]), model)
    (write,) = run.writes
    assert (write.kind, write.storage.key, write.dtype, write.current) == (WriteKind.COPY, "w", "BF16", "w")
    assert write.view == StridedView(5, (2, 2), (4, 1))
    assert (write.source.name, write.source.view) == ("w", StridedView(2, (2, 2), (4, 1)))
    np.testing.assert_array_equal(logical_words(model.w), before)


@pytest.mark.parametrize(
    ("rule", "kind", "has_source"),
    [
        (lambda m, w: m.w.data.__setitem__(0, w[1]), WriteKind.COPY, True),
        (lambda m, w: m.w.data.copy_(w.clone()), WriteKind.COPY, False),
        (lambda m, w: m.w.data.copy_(-w), WriteKind.COPY, False),
        (lambda m, w: m.b.data.fill_(w[0, 0]), WriteKind.COPY, True),
        (lambda m, w: m.b.data[2:].zero_(), WriteKind.FILL, False),
        (lambda m, w: m.b.data.fill_(3), WriteKind.FILL, False),
        (lambda m, w: m.b.add_(1), WriteKind.OTHER, False),
        (lambda m, w: torch.add(m.b, 1, out=m.b), WriteKind.OTHER, False),
        (lambda m, w: torch._foreach_add_([m.b], 1), WriteKind.OTHER, False),
        (lambda m, w: m.b.index_fill_(0, torch.tensor([1]), 3), WriteKind.OTHER, False),
        (lambda m, w: m.b.data.resize_(2), WriteKind.OTHER, False),
    ],
)
def test_every_kind_of_write_is_classified_and_none_is_made(rule, kind, has_source):
    model = Model()
    before = [logical_words(t).copy() for t in (model.w, model.b)]
    run = watch(rule, model)
    assert [(w.kind, w.source is not None) for w in run.writes] == [(kind, has_source)]
    for tensor, bits in zip((model.w, model.b), before, strict=True):
        np.testing.assert_array_equal(logical_words(tensor), bits)


def test_operations_in_place_on_exactly_what_was_copied_are_told_apart():
    def rule(m, w):
        m.w.data.copy_(w).add_(1)
        m.w.data[0].copy_(w[0])
        m.w.data[1:].mul_(2)

    run = watch(rule)
    assert [w.kind for w in run.writes] == [WriteKind.COPY, WriteKind.UPDATE, WriteKind.COPY, WriteKind.OTHER]


def test_a_broadcast_source_has_stride_0():
    run = watch(lambda m, w: m.w.data.copy_(w[0]))
    assert run.writes[0].source.view == StridedView(0, (3, 4), (0, 1))


def test_changed_inputs_read_values_failures_and_reports_are_noted():
    run = watch(lambda m, w: m.w.data.copy_(w.mul_(2)))
    assert (run.changed_inputs, run.writes[0].source) == ({"w"}, None)
    assert watch(lambda m, w: m.b.data.fill_(w.max().item())).read_inputs == {"w"}
    assert watch(lambda m, w: {}["gone"]).failure == "KeyError: 'gone'"
    model = Model()
    run = run_loader(lambda ws: {name for name, _ in ws} | {3}, model.storages(), [W])
    assert (run.reported, run.last, run.is_exhausted) == (frozenset({"w"}), "w", True)


def test_a_loader_that_takes_everything_before_it_writes_is_told_apart():
    model = Model()
    specs = [W, TensorSpec("v", "BF16", (3, 4))]

    def streaming(weights):
        for _, w in weights:
            model.w.data.copy_(w)

    def collecting(weights):
        for _, w in list(weights):
            model.w.data.copy_(w)

    assert not run_loader(streaming, model.storages(), specs).is_collecting
    assert run_loader(collecting, model.storages(), specs).is_collecting


def test_large_inputs_are_separate_storages_that_start_at_their_tensor():
    specs = [TensorSpec(f"t{k}", "F32", (k,)) for k in (0, 1, 5, 4_000_000, 3)]
    inputs = Inputs(specs)
    tensors = dict(inputs)
    assert inputs.is_exhausted
    for spec in specs:
        assert tensors[spec.name].shape == spec.shape
        assert tensors[spec.name].storage_offset() == 0
        assert not tensors[spec.name].any()
        assert inputs.find(tensors[spec.name]) == (spec if spec.num_elements else None)


# --- shadows --------------------------------------------------------------------------------------------------------------


def test_a_loader_runs_on_a_shadow_while_the_model_keeps_its_bits():
    model = Model()
    storages = model.storages()
    before = logical_words(model.w).copy()
    shadow = Shadow(storages, [(storages.storages[0], 0, 24)])

    def rule(m, w):
        rows = m.w.data[1:]
        rows.copy_(w[1:])
        m.w.data[0].copy_(m.w.data[1] + 1)

    watch(rule, model, shadow=shadow, content=lambda spec: np.full(12, 0x4000, np.uint16))
    got = shadow.read(storages.storages[0], StridedView(0, (3, 4), (4, 1)), "BF16")
    assert got.tolist() == [0x4040] * 4 + [0x4000] * 8
    np.testing.assert_array_equal(logical_words(model.w), before)


def test_only_what_lies_inside_a_shadow_is_redirected():
    model = Model()
    storages = model.storages()
    shadow = Shadow(storages, [(storages.storages[0], 2, 4), (storages.storages[0], 8, 10)])
    assert shadow.nbytes == 16
    inside, outside = model.w.data[0, :4], model.w.data[2]
    assert shadow.redirect(inside) is not inside
    assert torch.equal(shadow.redirect(inside), inside)
    assert shadow.redirect(outside) is outside
    assert shadow.redirect(model.b) is model.b
    with pytest.raises(LookupError):
        shadow.read(storages.storages[0], StridedView(8, (4,), (1,)), "BF16")


# --- claims ---------------------------------------------------------------------------------------------------------------


def claim(owner, offset, shape, stride, width=2, storage="s"):
    return Claim(owner, storage, StridedView(offset, shape, stride), width)


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ([claim("a", 0, (4,), (1,)), claim("b", 4, (4,), (1,))], set()),
        ([claim("a", 0, (4,), (1,)), claim("b", 3, (4,), (1,))], {("a", "b")}),
        ([claim("a", 0, (4,), (2,)), claim("b", 1, (4,), (2,))], set()),
        ([claim("a", 0, (4,), (2,)), claim("b", 2, (1,), (1,))], {("a", "b")}),
        ([claim("a", 0, (4,), (1,)), claim("a", 2, (1,), (1,))], {("a", "a")}),
        ([claim("a", 0, (4,), (1,)), claim("b", 0, (4,), (1,), storage="t")], set()),
        ([claim("a", 0, (2,), (1,), width=4), claim("b", 3, (1,), (1,), width=2)], {("a", "b")}),
        ([claim("a", 0, (2,), (1,), width=4), claim("b", 4, (1,), (1,), width=2)], set()),
        ([claim("a", 0, (0, 4), (4, 1)), claim("b", 0, (4,), (1,))], set()),
        ([claim("b", 1, (), ()), claim("a", 0, (2,), (1,))], {("a", "b")}),
    ],
)
def test_collisions(claims, expected):
    assert colliding(claims) == expected


@given(
    st.lists(
        st.tuples(
            st.integers(0, 20),
            st.integers(1, 4),
            st.integers(1, 4),
            st.integers(1, 6),
            st.integers(1, 3),
            st.sampled_from([1, 2, 4]),
        ),
        max_size=6,
    )
)
def test_collisions_are_those_of_byte_sets(drawn):
    claims = [
        claim(str(n), offset, (rows, columns), (row_step, step), width)
        for n, (offset, rows, columns, row_step, step, width) in enumerate(drawn)
    ]
    cells = {c.owner: {int(p) * c.width + k for p in c.view.positions() for k in range(c.width)} for c in claims}
    wanted = {(a, b) for a in cells for b in cells if a < b and cells[a] & cells[b]}
    assert {pair for pair in colliding(claims) if pair[0] != pair[1]} == wanted


@pytest.mark.parametrize(
    ("view", "width", "unit", "expected"),
    [
        (StridedView(4, (3, 8), (16, 1)), 1, 2, StridedView(2, (3, 4), (8, 1))),
        (StridedView(4, (3, 7), (16, 1)), 1, 2, None),
        (StridedView(3, (4,), (1,)), 1, 2, None),
        (StridedView(4, (4,), (2,)), 1, 2, None),
        (StridedView(1, (3,), (2,)), 4, 2, StridedView(2, (3, 2), (4, 1))),
        (StridedView(1, (), ()), 2, 2, StridedView(1, (), ())),
        (StridedView(2, (), ()), 1, 2, None),
    ],
)
def test_views_are_counted_in_other_units_only_whole(view, width, unit, expected):
    assert in_units(view, width, unit) == expected
