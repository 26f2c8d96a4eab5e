"""Refits one bare model twice, with a failed attempt in between, and says what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deltarefit.cli.conformance.rows import Row
from deltarefit.errors import RejectedError

if TYPE_CHECKING:
    import torch

    from deltarefit.receiver import RankReceiver

__all__ = ["GroupLeftOutError", "Subject", "judge"]

_SHOWN_CHARACTERS = 200

Weights = Mapping[str, "torch.Tensor"]


class GroupLeftOutError(Exception):
    """This machine cannot build the models of a group; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One model of an engine, without the engine."""

    engine: str
    model: str
    quantisation: str
    kernels: str = ""
    versions: Sequence[Weights]
    """Three checkpoints."""
    served: Callable[[Weights], Any]
    """A fresh model that the engine's own code loaded, as an engine would serve it."""
    receiver: Callable[[Any], RankReceiver]
    state: Callable[[Any], Mapping[str, bytes]]
    """The bytes of whatever a refit must leave as a fresh load does."""


def judge(subject: Subject) -> Row:
    """Measure; nothing is assumed.

    Raises:
        AttemptFailedError: a refit failed that prewarm had accepted.
    """
    from deltarefit.bits import spec_of
    from deltarefit.canonical import Catalog
    from deltarefit.receiver import outcomes_of

    catalog = Catalog(spec_of(name, tensor) for name, tensor in subject.versions[0].items())
    model = subject.served(subject.versions[0])
    before = subject.state(model)
    receiver = subject.receiver(model)
    try:
        report = receiver.prewarm(catalog)
    except RejectedError as error:
        untouched = dict(subject.state(model)) == dict(before)
        reason = _reason(error) if untouched else f"BUT BYTES WERE CHANGED: {_reason(error)}"
        return _row(subject, {}, refused=reason, bit_equal=False)
    is_equal = dict(subject.state(model)) == dict(before) and _refits(subject, receiver, report, catalog, model)
    sizes: dict[str, int] = {}
    for outcome in outcomes_of(report, catalog):
        sizes[outcome.outcome] = sizes.get(outcome.outcome, 0) + outcome.nbytes
    return _row(subject, sizes, refused="", bit_equal=is_equal)


def _refits(subject: Subject, receiver: RankReceiver, report: Any, catalog: Any, model: Any) -> bool:
    from deltarefit.ids import EncodingMode
    from deltarefit.testing.oracle import delta_payload, plan_for

    versions, plan = subject.versions, plan_for([report], catalog)
    fresh = [dict(subject.state(subject.served(weights))) for weights in versions]
    if fresh[0] == fresh[1] or fresh[1] == fresh[2]:
        return False  # nothing would be shown
    receiver.prepare(plan)
    first = delta_payload(plan, versions[0], versions[1])
    if first is None:
        return False
    receiver.apply(first)
    receiver.synchronize()
    if dict(subject.state(model)) != fresh[1]:
        return False
    failed = delta_payload(plan, versions[1], versions[2], attempt="v000002-a1-conformance")
    retry = delta_payload(plan, versions[1], versions[2], mode=EncodingMode.OVERWRITE, attempt="v000002-a2-conformance")
    if failed is None or retry is None:
        return False
    receiver.apply(replace(failed, items=failed.items[::2]))
    receiver.prepare(plan)
    receiver.apply(retry)
    receiver.synchronize()
    return dict(subject.state(model)) == fresh[2]


def _row(subject: Subject, sizes: Mapping[str, int], *, refused: str, bit_equal: bool) -> Row:
    total = sum(sizes.values())

    def share(outcome: str) -> float:
        return round(sizes.get(outcome, 0) / total, 8) if total else 0.0

    return Row(
        engine=subject.engine,
        model=subject.model,
        quantisation=subject.quantisation,
        kernels=subject.kernels,
        exact_bytes_fraction=share("exact"),
        rerun=share("rerun"),
        dense=share("dense"),
        skipped=share("skipped"),
        refused=refused,
        bit_equal=bit_equal,
    )


def _reason(error: RejectedError) -> str:
    """The first tensor with its reason, and how many there are."""
    reasons: Mapping[str, str] = getattr(error, "reasons", {})
    if not reasons:
        return str(error).splitlines()[0][:_SHOWN_CHARACTERS]
    name, reason = next(iter(reasons.items()))
    more = f" ({len(reasons)} tensors)" if len(reasons) > 1 else ""
    return f"{name}: {reason.splitlines()[0][:_SHOWN_CHARACTERS]}{more}"
