"""The bytes that no canonical tensor reaches: all of them are watched, and none that a refit may change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.pieces import StridedView
from deltarefit.placement.overlap import Claim
from deltarefit.placement.storages import StorageMap
from deltarefit.receiver import RankReceiver, ReceiverSettings
from deltarefit.receiver.rest import rests_of
from deltarefit.testing.loaders import ToyModel

pytestmark = pytest.mark.torch


def storages(**tensors):
    return StorageMap(tensors)


def claim(storage, offset, shape, stride, width=2):
    return Claim("w", storage, StridedView(offset, shape, stride), width)


def watched_bytes(storage_map, claims):
    """Which bytes of ``w`` the rests cover, found by flipping one after another."""
    rests = rests_of(storage_map, claims)
    raw = storage_map.storages[0].words(1)
    before = [rest.digest() for rest in rests]
    found = set()
    for place in range(raw.numel()):
        raw[place] ^= 1
        if [rest.digest() for rest in rests] != before:
            found.add(place)
        raw[place] ^= 1
    return found


def claimed_bytes(claims):
    covered = set()
    for one in claims:
        index = np.lib.stride_tricks.as_strided(
            np.arange(1000)[one.view.offset :], one.view.shape, tuple(8 * step for step in one.view.stride)
        )
        covered |= {int(word) * one.width + byte for word in index.reshape(-1) for byte in range(one.width)}
    return covered


def test_a_storage_that_nothing_reaches_is_watched_whole():
    (rest,) = rests_of(storages(table=torch.ones(5, dtype=torch.float64)), [])
    assert (rest.key, rest.target) == ("table", None)


def test_a_storage_that_is_tiled_has_no_rest():
    tiles = [claim("w", 12, (12,), (1,)), claim("w", 0, (4, 3), (3, 1)), claim("w", 0, (4, 3), (3, 1))]
    assert rests_of(storages(w=torch.zeros(24, dtype=torch.bfloat16)), tiles) == ()


@pytest.mark.parametrize(
    "claims",
    [
        [claim("w", 0, (20,), (1,))],
        [claim("w", 3, (4, 3), (6, 1))],
        [claim("w", 0, (4, 3), (6, 1)), claim("w", 2, (4, 3), (6, 1))],
        [claim("w", 0, (6,), (1,), 4), claim("w", 16, (2,), (1,))],
        [claim("w", 0, (5,), (1,), 1)],
        [claim("w", 0, (), ())],
    ],
    ids=["tail", "columns", "overlapping columns", "two widths", "odd bytes", "one element"],
)
def test_exactly_the_unclaimed_bytes_are_watched(claims):
    storage_map = storages(w=torch.zeros(24, dtype=torch.bfloat16))
    assert watched_bytes(storage_map, claims) == set(range(48)) - claimed_bytes(claims)


@given(
    st.lists(
        st.tuples(st.integers(0, 15), st.integers(1, 3), st.integers(1, 4), st.integers(4, 6), st.sampled_from([1, 2, 4])),
        max_size=5,
    )
)
@settings(max_examples=60, deadline=None)
def test_random_claims_leave_exactly_the_rest(boxes):
    size = 96
    claims = [claim("w", offset, (rows, columns), (step, 1), width) for offset, rows, columns, step, width in boxes]
    claims = [one for one in claims if one.end_byte <= size]
    storage_map = storages(w=torch.zeros(size, dtype=torch.uint8))
    assert watched_bytes(storage_map, claims) == set(range(size)) - claimed_bytes(claims)


@pytest.mark.parametrize("torch_writes", [False, True])
def test_padding_inside_a_parameter_drifts_and_loaded_rows_do_not(torch_writes):
    def rule(model, w):
        model.embed.data[:5].copy_(w)
        model.embed.data[5:].fill_(0)

    model = ToyModel({"embed": ("BF16", (8, 3))}, {"embed": rule})
    receiver = RankReceiver(model, model.load_weights, settings=ReceiverSettings(torch_writes=torch_writes))
    receiver.prewarm(Catalog([TensorSpec("embed", "BF16", (5, 3))]))
    assert receiver.drift() == ()
    model.embed.data[4, 2] = 7
    assert receiver.drift() == ()
    model.embed.data.view(torch.int16)[7, 2] ^= 1
    assert receiver.drift() == ("embed",)
    model.embed.data.view(torch.int16)[7, 2] ^= 1
    assert receiver.drift() == ()
