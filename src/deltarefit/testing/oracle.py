"""The oracle of every refit test: a dense reload, compared as raw bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from deltarefit import kernels
from deltarefit.bits import logical_words
from deltarefit.canonical import Catalog
from deltarefit.ids import AttemptId, EncodingMode, OwnerId, PolicyVersion
from deltarefit.payload import Payload, decode, encode
from deltarefit.plan import RefitPlan
from deltarefit.receiver import PrewarmReport, merge_reports
from deltarefit.records import CodedItem, DeltaRecords, Encoding

__all__ = ["assert_same_bits", "delta_bytes", "delta_payload", "dense_reload", "differing", "plan_for", "raw_state"]


def raw_state(model: torch.nn.Module) -> dict[str, bytes]:
    """The stored bytes of every parameter and buffer, by every name, in logical order."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: logical_words(tensor).tobytes() for name, tensor in named}


def differing(got: Mapping[str, bytes], want: Mapping[str, bytes]) -> list[str]:
    """Names whose bytes differ, or that only one side has."""
    return sorted(name for name in {*got, *want} if got.get(name) != want.get(name))


def assert_same_bits(got: torch.nn.Module, want: torch.nn.Module) -> None:
    """Compare all parameters and buffers of two models as raw bytes.

    Raises:
        AssertionError: names of the tensors that differ, and by how many bytes.
    """
    left, right = raw_state(got), raw_state(want)
    wrong = differing(left, right)
    if wrong:
        counts = [
            f"{name} ({sum(a != b for a, b in zip(left.get(name, b''), right.get(name, b''), strict=False))} bytes)"
            for name in wrong[:5]
        ]
        raise AssertionError(f"{len(wrong)} of {len(right)} tensors differ from the dense reload: {', '.join(counts)}")


def dense_reload(
    build: Callable[[], torch.nn.Module],
    load: Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], object],
    weights: Mapping[str, torch.Tensor],
) -> torch.nn.Module:
    """A fresh model that its own loader filled with all weights."""
    model = build()
    with torch.no_grad():
        load(model, weights)
    return model


def plan_for(reports: Sequence[PrewarmReport], catalog: Catalog, *, prefer: Encoding = Encoding.DIFFERENCE) -> RefitPlan:
    """The plan that a coordinator would make for these ranks, with ``prefer`` wherever all of them can take it."""
    merged = merge_reports(reports, catalog)
    encodings: dict[str, Encoding] = {}
    for name in catalog:
        held = [report.routes[name] for report in reports if report.routes[name].kind != "skipped"]
        can = all(int(prefer) in route.encodings for route in held)
        encodings[name] = prefer if can else Encoding(merged.encodings[name])
    return RefitPlan(catalog, encodings, 1, frozenset(merged.dense))


def delta_payload(
    plan: RefitPlan,
    old: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    *,
    mode: EncodingMode = EncodingMode.MIXED,
    attempt: str = "v000001-a1-test",
) -> Payload | None:
    """All changes from ``old`` to ``new`` as one payload that travelled as bytes; None if nothing differs."""
    data = delta_bytes(plan, old, new, mode=mode, attempt=attempt)
    return None if data is None else decode(data, catalog=plan.catalog)


def delta_bytes(
    plan: RefitPlan,
    old: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    *,
    mode: EncodingMode = EncodingMode.MIXED,
    attempt: str = "v000001-a1-test",
) -> bytes | None:
    """The same as it travels."""
    items: list[CodedItem] = []
    for name, spec in plan.catalog.items():
        before, after = logical_words(old[name]), logical_words(new[name])
        changed = np.arange(spec.num_elements) if name in plan.dense else np.flatnonzero(before != after)
        if changed.size:
            records = DeltaRecords(spec, changed.astype(np.int64), after[changed], before[changed])
            items.append(kernels.code_records(records, plan.encoding(name, mode)))
    if not items:
        return None
    return encode(
        items,
        attempt=AttemptId(attempt),
        owner=OwnerId(0),
        sequence=0,
        base_version=PolicyVersion(0),
        target_version=PolicyVersion(1),
        plan_digest=plan.digest,
    )
