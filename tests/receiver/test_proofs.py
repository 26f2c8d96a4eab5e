"""Digests of many tensors at once, and the shortcuts for almost every tensor, say what the plain way says."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltarefit.canonical import Catalog, TensorDigest, TensorSpec
from deltarefit.pieces import Cast, Piece, StridedView
from deltarefit.receiver import RankDigest, report, survey_ranks
from deltarefit.receiver.proving import DigestPlan, Proofs, _Read
from deltarefit.receiver.report import WRONG_DIGEST, PartDigest
from deltarefit.receiver.routes import view_key
from deltarefit.receiver.writers import HostTarget, TorchTarget

pytestmark = pytest.mark.torch

_SIZE = 24
_DIGESTS = st.builds(TensorDigest, st.integers(0, 3), st.integers(0, 2**64 - 1))


def _piece(start: int, length: int, cast: Cast = Cast.SAME) -> Piece:
    return Piece(StridedView(start, (length,), (1,)), StridedView(start, (length,), (1,)), cast)


@st.composite
def _targets(draw, cast):
    """Words of a whole tensor, in host memory or behind torch; some widened ones have low bits that no canonical tensor has."""
    words = np.array(draw(st.lists(st.integers(0, 3), min_size=_SIZE, max_size=_SIZE)), "<u4")
    if cast is Cast.WIDEN:
        words <<= np.uint32(16)
        if draw(st.integers(0, 3)) == 0:
            words[draw(st.integers(0, _SIZE - 1))] |= 1
    if draw(st.integers(0, 2)) == 0:
        return TorchTarget("device", torch.from_numpy(words.view("<i4")), ())
    return HostTarget("host", words, ())


@st.composite
def _plans(draw):
    cast = draw(st.sampled_from(list(Cast)))
    first, copy = draw(_targets(cast)), draw(_targets(cast))
    if draw(st.booleans()):
        copy = first  # replicas that agree
    cuts = [0, *sorted(draw(st.sets(st.integers(1, _SIZE - 1), max_size=3))), _SIZE]
    boxes = [_piece(start, end - start, cast) for start, end in itertools.pairwise(cuts)]
    has_parts = draw(st.booleans())
    groups = [(box,) for box in boxes] if has_parts else [tuple(boxes)]
    replicas = [(_Read(copy, group), _Read(first, group)) for group in groups if draw(st.booleans())]
    return DigestPlan("key", _SIZE, tuple(_Read(first, group) for group in groups), tuple(replicas), has_parts)


@settings(max_examples=60, deadline=None)
@given(st.lists(_plans(), max_size=6))
def test_proofs_of_many_are_the_digest_of_each_plan(plans):
    named = {f"t{number}": plan for number, plan in enumerate(plans)}
    assert Proofs(named).digests() == {name: plan.digest() for name, plan in named.items()}


def _combined(plan: DigestPlan, digests: list[TensorDigest | None]) -> RankDigest:
    """``DigestPlan.combine`` without its shortcut."""
    if None in digests:
        return RankDigest(plan.coverage, plan.num_elements, WRONG_DIGEST.lane0, WRONG_DIGEST.lane1)
    own, further = digests[: len(plan.primary)], digests[len(plan.primary) :]
    total = sum(own, TensorDigest())
    for copy, first in zip(further[::2], further[1::2], strict=True):
        for _ in range(3):
            total = total + copy - first
    parts = [
        PartDigest(view_key(read.pieces[0].canonical), read.pieces[0].num_elements, digest.lane0, digest.lane1)
        for read, digest in zip(plan.primary, own, strict=True)
    ]
    return RankDigest(plan.coverage, plan.num_elements, total.lane0, total.lane1, tuple(parts) if plan.has_parts else ())


@settings(max_examples=60, deadline=None)
@given(_plans(), st.data())
def test_one_read_is_combined_like_many(plan, data):
    if data.draw(st.booleans()):
        plan = replace(plan, primary=plan.primary[:1], replicas=())
    digests = [data.draw(st.one_of(st.none(), _DIGESTS, _DIGESTS, _DIGESTS)) for _ in plan.reads]
    assert plan.combine(digests) == _combined(plan, digests)


@st.composite
def _held(draw):
    """What one rank holds of a tensor: all of it, half of it with or without its parts, or nothing."""
    digest = draw(st.builds(TensorDigest, st.integers(0, 1), st.just(7)))
    share = draw(st.sampled_from(["whole", "whole", "whole", "left", "right", "parts", ""]))
    if share in ("left", "right"):
        return RankDigest(share, 1, digest.lane0, digest.lane1)
    parts = ()
    if share == "parts":
        parts = (PartDigest("left", 1, digest.lane0, 3), PartDigest("right", 1, 0, 4))
    return RankDigest(share, 2, digest.lane0, digest.lane1, parts) if share else None


@settings(max_examples=150, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), _held()), max_size=4))
def test_ranks_that_agree_are_surveyed_like_others(per_rank):
    held = [{name: digest for name, digest in rank.items() if digest is not None} for rank in per_rank]
    catalog = Catalog(TensorSpec(name, "U8", (2,)) for name in "abc")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_are_alike", lambda digests: False)
        plain = survey_ranks(held, catalog)
    assert survey_ranks(held, catalog) == plain
