"""Puts routes, targets and digests of one prewarm together, and collects every refusal before it raises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from deltarefit.canonical import Catalog, TensorDigest
from deltarefit.errors import RejectedError
from deltarefit.kernels import BoundPieces
from deltarefit.placement.inputs import LoadWeights
from deltarefit.placement.learn import LearnedLoader
from deltarefit.placement.storages import StorageMap
from deltarefit.receiver.crosscheck import contradiction, sample
from deltarefit.receiver.guard import DerivedTensors, Place, StorageFence, layout_fingerprint, layout_of
from deltarefit.receiver.interceptor import WriteKey
from deltarefit.receiver.kept import KeptCopy
from deltarefit.receiver.proving import DigestPlan, Proofs, digest_plan_of
from deltarefit.receiver.report import PrewarmReport, TensorRoute
from deltarefit.receiver.rerun import RerunUnit
from deltarefit.receiver.rest import Rest, rests_of
from deltarefit.receiver.routes import (
    aliases_and_collisions,
    claims_of,
    held_pieces,
    is_constant,
    pieces_route,
    scratch_route,
)
from deltarefit.receiver.settings import ApplyPath, ReceiverSettings
from deltarefit.receiver.trial import TrialResult
from deltarefit.receiver.unreached import TensorPlace, lacking, tensor_places, unreached_elements
from deltarefit.receiver.writers import HostTarget, WordsTarget, targets_of
from deltarefit.wording import some_of

__all__ = ["Assembly", "PrewarmRefusedError", "Prewarmed", "fingerprint_of", "refusal"]

_SHOWN = 20


class PrewarmRefusedError(RejectedError):
    """Tensors that cannot be refit."""

    def __init__(self, text: str, reasons: Mapping[str, str]) -> None:
        super().__init__(text)
        self.reasons = dict(reasons)
        """Canonical tensors, or parameters where no tensor is at fault, and why."""


def refusal(reasons: Mapping[str, str], note: str = "nothing was changed") -> PrewarmRefusedError:
    """One error that lists tensors with their reasons."""
    lines = some_of((f"{name}: {reason}" for name, reason in reasons.items()), _SHOWN, joint="\n  ")
    return PrewarmRefusedError(f"prewarm refuses {len(reasons)} tensors ({note}):\n  {lines}", reasons)


def fingerprint_of(
    model: torch.nn.Module, catalog: Catalog, settings: ReceiverSettings, routes: Mapping[str, TensorRoute]
) -> str:
    """Changes when a new prewarm is needed, or led to other routes."""
    lines = [f"{name} {r.kind} {r.encodings} {r.cast} {r.coverage} {r.is_dense}" for name, r in routes.items()]
    return layout_fingerprint(layout_of(model), catalog.digest, settings.current_tag(), *lines)


@dataclass(frozen=True, slots=True, eq=False)
class Prewarmed:
    """What one prewarm learned, ready for use."""

    catalog: Catalog
    layout: Mapping[str, Place]
    layout_tag: str
    storages: StorageMap
    fence: StorageFence
    report: PrewarmReport
    targets: Mapping[str, tuple[WordsTarget, ...]]
    proofs: Proofs
    kept: Mapping[str, KeptCopy]
    known_fills: frozenset[WriteKey]
    expected_writes: Mapping[str, frozenset[WriteKey]]
    """Per tensor that goes through the loader, what its load writes."""
    rests: tuple[Rest, ...]
    """What no canonical tensor reaches, by storage."""
    residue_at_start: Mapping[str, TensorDigest]
    """Its digests when the model was prewarmed."""
    reruns: tuple[RerunUnit, ...] = ()
    """Layers whose post-load step must run again after a refit."""
    derived: DerivedTensors = field(default_factory=lambda: DerivedTensors(dict, {}))
    """Tensors beside parameters and buffers that refits write to."""
    _rerun_by_name: dict[str, RerunUnit] = field(init=False, default_factory=dict)
    direct: dict[str, tuple[BoundPieces, ...]] = field(init=False, default_factory=dict)
    """Pieces of all homes of each tensor of which all lie in host memory, so that items may go straight there."""

    def __post_init__(self) -> None:
        self._rerun_by_name.update((name, unit) for unit in self.reruns for name in unit.specs)
        for name, route in self.report.routes.items():
            if route.kind != "pieces" or name in self.kept or name in self._rerun_by_name:
                continue
            targets = self.targets[name]
            bound = tuple(t.bound for t in targets if isinstance(t, HostTarget) and t.bound is not None)
            if len(bound) == len(targets):
                self.direct[name] = bound

    def rerun_of(self, name: str) -> RerunUnit | None:
        """The layer that must run again once this tensor was written; None if there is none."""
        return self._rerun_by_name.get(name)

    def residue(self) -> dict[str, TensorDigest]:
        """Digests of what no canonical tensor reaches, by the name of the storage."""
        return {rest.key: rest.digest() for rest in self.rests}


class Assembly:
    """Puts routes, targets and digests together, and collects every refusal before it raises."""

    def __init__(
        self,
        model: torch.nn.Module,
        storages: StorageMap,
        catalog: Catalog,
        settings: ReceiverSettings,
        learned: LearnedLoader,
        trials: Mapping[str, TrialResult],
    ) -> None:
        self._model = model
        self._storages = storages
        self._catalog = catalog
        self._settings = settings
        self._learned = learned
        self._trials = trials
        self._refused = dict(learned.refused)
        self._targets: dict[str, tuple[WordsTarget, ...]] = {}
        self._digest_plans: dict[str, DigestPlan] = {}

    def build(self, load_weights: LoadWeights) -> Prewarmed:
        learned = self._learned
        claims = claims_of(learned)
        aliases, collisions = aliases_and_collisions(learned, claims)
        self._refused.update(collisions)
        for name, trial in self._trials.items():
            if trial.refusal is not None:
                self._refused[name] = trial.refusal
        places = tensor_places(self._model, self._storages)
        unreached = unreached_elements(places, claims)
        self._refuse_unreached(places, unreached)
        if not self._refused:
            self._cross_check(load_weights)
        if self._refused:
            raise refusal(self._refused)
        routes = self._routes({name for pair in aliases for name in pair})
        canonical = [claim for claim in claims if not is_constant(claim)]
        rests = rests_of(self._storages, canonical, torch_writes=self._settings.torch_writes)
        return Prewarmed(
            catalog=self._catalog,
            layout=layout_of(self._model),
            layout_tag=self._settings.current_tag(),
            storages=self._storages,
            fence=StorageFence(self._model),
            report=self._report(routes, unreached, aliases),
            targets=self._targets,
            proofs=Proofs(self._digest_plans),
            kept=self._kept(routes),
            known_fills=frozenset(write.key for write in learned.fills),
            expected_writes=self._expected_writes(routes),
            rests=rests,
            residue_at_start={rest.key: rest.digest() for rest in rests},
        )

    def _refuse_unreached(self, places: Mapping[str, TensorPlace], unreached: Mapping[str, int]) -> None:
        for name, reason in lacking(self._model, places, unreached, self._settings.may_lack).items():
            is_reported = name in self._learned.reported
            self._refused.setdefault(
                name, "the loader reports it as loaded, but no write to it was seen" if is_reported else reason
            )

    def _routes(self, aliased: set[str]) -> dict[str, TensorRoute]:
        routes: dict[str, TensorRoute] = {}
        constant = {write.current for write in self._learned.fills}
        for name, spec in self._catalog.items():
            if name in self._learned.homes:
                routes[name] = self._pieces(name, name in aliased)
            elif name in self._learned.opaque:
                routes[name] = scratch_route(spec, self._trials[name])
            else:
                what = "a constant" if name in constant else "nothing"
                routes[name] = TensorRoute(kind="skipped", encodings=(), reason=f"the loader writes {what} for it here")
        return routes

    def _pieces(self, name: str, is_alias: bool) -> TensorRoute:
        homes = self._learned.homes[name]
        held = held_pieces(homes)
        targets = targets_of(self._catalog[name], homes, torch_writes=self._settings.torch_writes)
        self._targets[name] = targets
        is_wide = any(home.width != self._catalog[name].element_nbytes for home in homes)
        has_low_bits = is_wide and not all(target.low_bits_are_zero() for target in targets)
        if held is not None and not has_low_bits:
            spec = self._catalog[name]
            self._digest_plans[name] = digest_plan_of(spec, homes, held, torch_writes=self._settings.torch_writes)
        return pieces_route(homes, held, is_alias=is_alias, has_low_bits=has_low_bits)

    def _expected_writes(self, routes: Mapping[str, TensorRoute]) -> dict[str, frozenset[WriteKey]]:
        through_loader = self._settings.path is ApplyPath.SCRATCH
        return {
            name: frozenset(write.key for write in self._learned.writes.get(name, ()))
            for name, route in routes.items()
            if route.kind == "scratch" or (through_loader and route.kind == "pieces")
        }

    def _kept(self, routes: Mapping[str, TensorRoute]) -> dict[str, KeptCopy]:
        """Copies of computed tensors. Those that must be loaded whole are gathered in any case."""
        kept: dict[str, KeptCopy] = {}
        left = self._settings.keep_nbytes
        for name, route in routes.items():
            if route.kind == "scratch" and (route.is_dense or self._catalog[name].nbytes <= left):
                left -= self._catalog[name].nbytes
                kept[name] = KeptCopy(self._catalog[name], self._trials[name].ranges, route.is_dense)
        return kept

    def _cross_check(self, load_weights: LoadWeights) -> None:
        """Compare a sample of tensors with what the loader does to them alone."""
        homes, generator = self._learned.homes, np.random.default_rng(2)
        direct = [name for name in homes if name not in self._learned.indirect]
        for name in sample(direct, self._settings.cross_check):
            problem = contradiction(load_weights, self._storages, self._catalog[name], homes[name], generator)
            if problem is not None:
                self._refused[name] = f"start-up cross-check: {problem}"

    def _report(
        self, routes: dict[str, TensorRoute], unreached: dict[str, int], aliases: list[tuple[str, str]]
    ) -> PrewarmReport:
        through_loader = [
            self._catalog[name].nbytes
            for name, route in routes.items()
            if route.kind == "scratch" or (route.kind == "pieces" and self._settings.path is ApplyPath.SCRATCH)
        ]
        return PrewarmReport(
            routes=routes,
            fingerprint=fingerprint_of(self._model, self._catalog, self._settings, routes),
            unreached=unreached,
            misreported=tuple(sorted(n for n in self._learned.reported if n in routes and routes[n].kind == "skipped")),
            aliases=tuple(aliases),
            num_storages=len(self._storages.storages),
            resident_nbytes=self._storages.nbytes,
            scratch_nbytes=max(through_loader, default=0),
        )
