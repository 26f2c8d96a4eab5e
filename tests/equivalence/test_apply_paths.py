"""Straight to storage, through torch, and through scratch and loader: the same bits, and those of a dense reload.

Loaders are drawn at random from what engines do: fused rows and columns, transposes, splits by head, widening, replication.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltarefit.bits import logical_words, tensor_from_words
from deltarefit.ids import EncodingMode
from deltarefit.receiver import ApplyPath, RankReceiver, ReceiverSettings
from deltarefit.records import Encoding
from deltarefit.testing.loaders import ToyCase, ToyModel, random_weights
from deltarefit.testing.oracle import delta_payload, dense_reload, plan_for, raw_state

pytestmark = pytest.mark.torch

WAYS = {
    "straight": ReceiverSettings(),
    "torch": ReceiverSettings(torch_writes=True),
    "scratch": ReceiverSettings(path=ApplyPath.SCRATCH),
}


def load(model, weights):
    model.load_weights([(name, tensor.clone()) for name, tensor in weights.items()])


@st.composite
def placements(draw):
    """One canonical matrix: its shape, the parameter that it fills, and how the loader gets it there."""
    rows, columns = draw(st.integers(1, 5)) * 2, draw(st.integers(1, 4)) * 2
    kind = draw(
        st.sampled_from(["rows", "columns", "transposed", "halves swapped", "strided columns", "twice", "heads", "temporary"])
    )
    canonical = draw(st.sampled_from(["BF16", "F32", "F8_E4M3", "I64", "U8"]))
    stored = "F32" if canonical == "BF16" and draw(st.booleans()) else canonical
    first = draw(st.integers(0, rows // 2))
    count = draw(st.integers(1, rows - first))
    return kind, canonical, stored, rows, columns, first, count


def build_rule(parameter, kind, rows, columns, first, count):
    def rule(model, w):
        p = getattr(model, parameter).data
        part = w.narrow(0, first, count)
        if kind in ("rows", "temporary"):
            p[3 : 3 + count].copy_(part if kind == "rows" else torch.cat([part[count // 2 :], part[: count // 2]]))
        elif kind == "columns":
            p.copy_(w.narrow(1, columns // 2, columns // 2))
        elif kind == "transposed":
            p.copy_(part.t())
        elif kind == "halves swapped":
            p[: rows // 2].copy_(w[rows // 2 :])
            p[rows // 2 :] = w[: rows // 2]
        elif kind == "strided columns":
            p[:, 0::2].copy_(w[:, : columns // 2])
            p[:, 1::2].copy_(w[:, columns // 2 :])
        elif kind == "twice":
            p[0].copy_(part)
            p[1].copy_(part)
        else:
            p.view(2, rows // 2, columns).copy_(w.view(rows // 2, 2, columns).transpose(0, 1))

    return rule


def parameter_shape(kind, rows, columns, count):
    return {
        "rows": (count + 4, columns),
        "temporary": (count + 4, columns),
        "columns": (rows, columns // 2),
        "transposed": (columns, count),
        "twice": (2, count, columns),
    }.get(kind, (rows, columns))


def build_case(drawn):
    specs, parameters, rules = {}, {}, {}
    for number, (kind, canonical, stored, rows, columns, first, count) in enumerate(drawn):
        name = f"w{number}"
        specs[name] = (canonical, (rows, columns))
        parameters[name] = (stored, parameter_shape(kind, rows, columns, count))
        rules[name] = build_rule(name, kind, rows, columns, first, count)
    return ToyCase(specs, lambda: ToyModel(parameters, rules))


def changed(case, old, generator, share):
    other = random_weights(case.catalog, int(generator.integers(1 << 30)))
    new = {}
    for name, spec in case.catalog.items():
        words = logical_words(old[name]).copy()
        places = np.flatnonzero(generator.random(words.size) < share)
        words[places] = logical_words(other[name])[places]
        new[name] = tensor_from_words(words, spec)
    return new


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(placements(), min_size=1, max_size=3),
    st.integers(0, 2**30),
    st.sampled_from(list(Encoding)),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from(list(EncodingMode)),
)
def test_all_ways_leave_the_bits_of_a_dense_reload(drawn, seed, prefer, share, mode):
    case = build_case(drawn)
    generator = np.random.default_rng(seed)
    old = random_weights(case.catalog, seed)
    new = changed(case, old, generator, share)
    want = raw_state(dense_reload(case.build, load, new))
    for way, options in WAYS.items():
        model = dense_reload(case.build, load, old)
        receiver = RankReceiver(model, model.load_weights, settings=options)
        plan = plan_for([receiver.prewarm(case.catalog)], case.catalog, prefer=prefer)
        receiver.prepare(plan)
        payload = delta_payload(plan, old, new, mode=mode)
        if payload is not None:
            receiver.apply(payload)
        receiver.synchronize()
        assert (way, raw_state(model)) == (way, want)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(placements(), min_size=1, max_size=2), st.integers(0, 2**30))
def test_digests_do_not_depend_on_how_storage_is_read(drawn, seed):
    case = build_case(drawn)
    weights = random_weights(case.catalog, seed)
    shown = []
    for way in ("straight", "torch"):
        model = dense_reload(case.build, load, weights)
        receiver = RankReceiver(model, model.load_weights, settings=WAYS[way])
        receiver.prewarm(case.catalog)
        shown.append(receiver.digests())
    assert shown[0] == shown[1]
