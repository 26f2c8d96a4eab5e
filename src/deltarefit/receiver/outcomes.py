"""What becomes of each canonical tensor of a model at hand: exact, rerun, dense, skipped or refused, each with its reason."""

from __future__ import annotations

import msgspec
import torch

from deltarefit.canonical import Catalog
from deltarefit.placement.after_load import AfterLoad
from deltarefit.placement.inputs import LoadWeights
from deltarefit.receiver.assembly import PrewarmRefusedError
from deltarefit.receiver.rank import RankReceiver
from deltarefit.receiver.report import PrewarmReport, TensorRoute
from deltarefit.receiver.settings import ReceiverSettings

__all__ = ["TensorOutcome", "outcomes_of", "tensor_outcomes"]


class TensorOutcome(msgspec.Struct, frozen=True):
    """What becomes of one canonical tensor."""

    name: str
    outcome: str
    """``exact``: changed bits go straight to every place that holds them. ``rerun``: changes alone are sent, and the engine's
    own code computes what it derives from them. ``dense``: every element is sent at each refit. ``skipped``: this rank holds
    none of it. ``refused``: the model cannot be refitted because of it. ``blocked``: nothing is wrong with it, but the model
    is refused because of others."""
    reason: str
    """Why it is not exact; empty if it is."""
    nbytes: int
    """Of the canonical tensor."""


def tensor_outcomes(
    model: torch.nn.Module,
    load_weights: LoadWeights,
    catalog: Catalog,
    *,
    settings: ReceiverSettings | None = None,
    after_load: AfterLoad | None = None,
) -> tuple[TensorOutcome, ...]:
    """Prewarm a receiver of ``model`` and say for every tensor of the catalog what came of it. Changes no byte of the model.

    Unlike ``RankReceiver.prewarm`` a refusal is an answer here, not an error.
    """
    receiver = RankReceiver(model, load_weights, settings=settings, after_load=after_load)
    try:
        return outcomes_of(receiver.prewarm(catalog), catalog)
    except PrewarmRefusedError as error:
        reasons = error.reasons
    elsewhere = ", ".join(list(reasons)[:3])
    rows = [
        TensorOutcome(name, "refused", reasons[name], spec.nbytes)
        if name in reasons
        else TensorOutcome(name, "blocked", f"the model is refused because of {elsewhere}", spec.nbytes)
        for name, spec in catalog.items()
    ]
    rows += [TensorOutcome(name, "refused", reason, 0) for name, reason in reasons.items() if name not in catalog]
    return tuple(rows)


def outcomes_of(report: PrewarmReport, catalog: Catalog) -> tuple[TensorOutcome, ...]:
    """The same for a prewarm that refused nothing, in the catalog's order."""
    return tuple(
        TensorOutcome(name, _outcome(report.routes[name]), report.routes[name].reason, spec.nbytes)
        for name, spec in catalog.items()
    )


def _outcome(route: TensorRoute) -> str:
    if route.kind == "skipped":
        return "skipped"
    if route.is_dense:
        return "dense"
    return "rerun" if route.kind == "scratch" or route.is_rerun else "exact"
