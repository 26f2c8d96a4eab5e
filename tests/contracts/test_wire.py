"""Catalogs and plans reach another process unchanged, or are refused."""

from __future__ import annotations

import msgspec
import pytest

from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.errors import RejectedError
from deltarefit.plan import RefitPlan
from deltarefit.records import Encoding

CATALOG = Catalog(
    [TensorSpec("b.weight", "BF16", (3, 5)), TensorSpec("a scalar, né", "F32", ()), TensorSpec("empty", "F8_E4M3", (0, 7))]
)
PLAN = RefitPlan(
    CATALOG,
    {"b.weight": Encoding.DIFFERENCE, "a scalar, né": Encoding.XOR, "empty": Encoding.OVERWRITE},
    num_owners=4,
    dense=frozenset({"empty"}),
)


def test_a_catalog_comes_back_equal() -> None:
    again = Catalog.from_wire(CATALOG.to_wire())
    assert again == CATALOG
    assert list(again.values()) == list(CATALOG.values())


def test_a_plan_comes_back_equal() -> None:
    again = RefitPlan.from_wire(memoryview(PLAN.to_wire()))
    assert (again.digest, again.num_owners, again.dense) == (PLAN.digest, 4, {"empty"})
    assert dict(again.encodings) == dict(PLAN.encodings)
    assert again.catalog == CATALOG


@pytest.mark.parametrize("data", [b"", b"[[1]]", b'[["a","BF16",[2]]', b'[["a","BF17",[2]]]', b'[["a","BF16",[-2]]]'])
def test_what_is_no_catalog_is_refused(data: bytes) -> None:
    with pytest.raises(RejectedError):
        Catalog.from_wire(data)


@pytest.mark.parametrize(
    "change", [{"num_owners": 5}, {"encodings": [0, 0]}, {"encodings": [0, 0, 9]}, {"dense": ["unknown"]}, {"extra": 1}]
)
def test_a_plan_that_is_not_what_its_digest_says_is_refused(change: dict) -> None:
    wire = msgspec.json.decode(PLAN.to_wire()) | change
    with pytest.raises(RejectedError):
        RefitPlan.from_wire(msgspec.json.encode(wire))
