"""Prewarm of a model whose weights were packed, moved or derived from after loading (design note 0010).

Loader and post-load steps are learnt on a second model of the engine's, which serves nobody. Here what was learnt there is
carried over to the storages that serve, tensor by tensor, and compared with what lies in them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deltarefit.canonical import DTYPE_NBYTES, Catalog
from deltarefit.errors import LoaderContractError
from deltarefit.pieces import StridedView
from deltarefit.placement.fit import fit_pieces
from deltarefit.placement.granules import BitHome
from deltarefit.placement.layers import LearnedLayer, LearnedLayers, view_of
from deltarefit.placement.learn import LearnedLoader
from deltarefit.placement.overlap import Claim, colliding
from deltarefit.placement.reach import reach
from deltarefit.placement.run import Home, claims_of_homes
from deltarefit.placement.storages import ModelStorage, StorageMap, state_tensors
from deltarefit.receiver.assembly import Prewarmed, fingerprint_of, refusal
from deltarefit.receiver.crosscheck import sample
from deltarefit.receiver.guard import DerivedTensors, StorageFence, layout_of
from deltarefit.receiver.proving import Proofs, digest_plan_of
from deltarefit.receiver.report import PrewarmReport, TensorRoute, matches
from deltarefit.receiver.rerun import RerunUnit, SentWhole
from deltarefit.receiver.rest import rests_of
from deltarefit.receiver.routes import held_homes, held_pieces, pieces_route, written_twice
from deltarefit.receiver.settings import ReceiverSettings
from deltarefit.receiver.unreached import tensor_places, unreached_elements
from deltarefit.receiver.writers import WordsTarget, targets_of
from deltarefit.records import Encoding

__all__ = ["AfterLoadAssembly", "narrowed"]

_NARROW = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})


def narrowed(learned: LearnedLoader, catalog: Catalog) -> dict[str, str]:
    """Tensors that the loader squeezes into 8-bit floats, silently losing most of their bits."""
    found: dict[str, str] = {}
    for name, opaque in learned.opaque.items():
        for write in opaque.writes:
            if write.dtype in _NARROW and catalog[name].element_nbytes > DTYPE_NBYTES[write.dtype]:
                found[name] = (
                    f"the loader squeezes {catalog[name].dtype} into {write.storage.key}, which is {write.dtype}: the "
                    "checkpoint's quantisation settings should list this layer among those that stay unquantised"
                )
    return found


@dataclass(frozen=True, slots=True)
class _Hung:
    """Names of what hangs on one layer. No module: those of the second model must not outlive the prewarm."""

    roots: tuple[str, ...]
    holders: tuple[str, ...]
    paths: tuple[str, ...]
    """Of tensors that depend on canonical ones."""

    @classmethod
    def of(cls, layer: LearnedLayer) -> _Hung:
        return cls(tuple(layer.unit.roots), tuple(layer.unit.holders), tuple(layer.map.nbytes))

    def tensors(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Those that ``model`` has, by path."""
        roots = {name: model.get_submodule(name) for name in self.roots}
        found = reach(roots, {name: model.get_submodule(name) for name in self.holders}).tensors
        return {path: found[path] for path in self.paths if path in found}


def _derived(model: torch.nn.Module, hung: Sequence[_Hung]) -> dict[str, torch.Tensor]:
    """By path, tensors of a model that serves which depend on canonical ones."""
    return {path: tensor for layer in hung for path, tensor in layer.tensors(model).items()}


class AfterLoadAssembly:
    """Routes, targets and digests of one model that serves, and every refusal collected before it raises."""

    def __init__(
        self,
        model: torch.nn.Module,
        catalog: Catalog,
        settings: ReceiverSettings,
        learned: LearnedLoader,
        layers: LearnedLayers,
        twin: Mapping[str, tuple[object, ...]],
    ) -> None:
        """``twin``: how parameters and buffers of the model that serves nobody lay when it was loaded."""
        self._model = model
        self._catalog = catalog
        self._settings = settings
        self._learned = learned
        self._layers = layers
        self._twin = twin
        self._refused: dict[str, str] = {**learned.refused, **layers.refused}
        self._homes: dict[str, tuple[Home, ...]] = {}
        self._whole: dict[str, str] = {}
        self._unused: dict[str, str] = {}
        self._derives: dict[str, str] = {}
        """Tensors of layers that must run again, and what is computed there."""
        self._reruns: list[RerunUnit] = []
        self._taken: dict[str, str] = {}
        """By storage that serves, what lies in it in a fresh model."""
        self._state = state_tensors(model)
        self._hung = tuple(_Hung.of(layer) for layer in layers.layers)
        self._reached = _derived(model, self._hung)
        self._storages = StorageMap({**self._state, **self._reached})

    def build(self, aliases: Mapping[str, str]) -> Prewarmed:
        """Put everything together. ``aliases``: tensors that share all their storage with another, by name.

        Raises:
            RejectedError: each tensor that cannot be refit with its reason.
        """
        for layer in self._layers.layers:
            self._layer(layer)
        self._refuse_collisions()
        for name in self._layers.untouched:
            self._untouched(name)
        self._aliases(aliases)
        self._limit_whole()
        if not self._refused:
            self._cross_check()
        if self._refused:
            raise refusal(self._refused)
        targets = {name: self._targets(name) for name in self._homes}
        for rerun in self._reruns:
            rerun.readable = {name: targets[name] for name in rerun.specs if name in targets}
            rerun.remember()
        routes = self._routes(set(aliases) | set(aliases.values()))
        claims = list(self._claims())
        rests = rests_of(self._storages, claims, torch_writes=self._settings.torch_writes)
        derived = {path: tensor for path, tensor in self._reached.items() if path not in self._state}
        return Prewarmed(
            catalog=self._catalog,
            layout=layout_of(self._model),
            layout_tag=self._settings.current_tag(),
            storages=self._storages,
            fence=StorageFence(self._model),
            report=self._report(routes, claims, aliases),
            targets=targets,
            proofs=Proofs(
                {
                    name: digest_plan_of(self._catalog[name], homes, held, torch_writes=self._settings.torch_writes)
                    for name, homes in self._homes.items()
                    if (held := held_pieces(homes) or held_homes(homes)) is not None
                }
            ),
            kept={},
            known_fills=frozenset(),
            expected_writes={},
            rests=rests,
            residue_at_start={rest.key: rest.digest() for rest in rests},
            reruns=tuple(self._reruns),
            derived=DerivedTensors(functools.partial(_derived, self._model, self._hung), derived),
        )

    # --- one layer ------------------------------------------------------------------------------------------------

    def _layer(self, layer: LearnedLayer) -> None:
        problem = self._problem(layer)
        if problem:
            self._refused |= dict.fromkeys(layer.unit.names, problem)
            return
        learnt = layer.map
        for name, reason in learnt.unseen.items():
            if matches(name, self._settings.may_ignore):
                self._unused[name] = "post-load uses none of it"
            else:
                self._refused[name] = f"{reason}: it is dropped, or hidden where it cannot be reached"
        self._whole |= learnt.lost
        for name, homes in learnt.homes.items():
            self._homes[name] = tuple(self._home(home, name) for home in homes)
        if learnt.recomputed or learnt.lost:
            count = sum(int((ranges[:, 1] - ranges[:, 0]).sum()) for ranges in learnt.recomputed.values())
            where = ", ".join(list(learnt.recomputed)[:3])
            self._derives |= dict.fromkeys(learnt.homes, f"post-load computes {count} bytes of its layer, in {where}")
            self._reruns.append(self._rerun(layer))

    def _problem(self, layer: LearnedLayer) -> str:
        """Why nothing of a layer can be refit; empty if something can."""
        if layer.map.hidden:
            return f"its layer holds state that cannot be followed: {layer.map.hidden}"
        for path in layer.map.nbytes:
            if path not in self._reached:
                return f"the serving model has no {path}, a fresh one has"
            got, want = view_of(self._reached[path]), layer.views[path]
            if got != want:
                return f"{path} of the serving model is {got}, of a fresh one {want}"
            if problem := self._shared(path, self._storage(self._reached[path])):
                return problem
        return ""

    def _shared(self, path: str, storage: ModelStorage) -> str:
        """Why a storage of a fresh model cannot be told from another in the serving model; empty if it can."""
        first = self._taken.setdefault(storage.key, path)
        return "" if first == path else f"{path} and {first} share storage in the serving model, but not in a fresh one"

    def _storage(self, tensor: torch.Tensor) -> ModelStorage:
        found = self._storages.find(tensor)
        if found is None:
            raise LookupError("a tensor that is not in the storage map")
        return found[0]

    def _home(self, home: BitHome, name: str) -> Home:
        storage = self._storage(self._reached[home.path])
        if home.bits == self._catalog[name].element_nbytes * 8 and not home.flip:
            return Home(storage, home.bits // 8, home.pieces, elements=home.elements)
        return Home(storage, max(1, home.bits // 8), home.pieces, home.bits, home.flip, home.elements)

    def _rerun(self, layer: LearnedLayer) -> RerunUnit:
        specs = {name: self._catalog[name] for name in layer.unit.names if name not in layer.map.unseen}
        return RerunUnit(
            rig=layer.rig,
            specs=specs,
            whole={name: SentWhole(self._catalog[name]) for name in layer.map.lost},
            storages={path: self._storage(self._reached[path]) for path in layer.map.nbytes},
            recomputed=layer.map.recomputed,
        )

    # --- the rest -------------------------------------------------------------------------------------------------

    def _refuse_collisions(self) -> None:
        """Tensors may share bytes only where steps were seen to drop all of them: who wins is not known."""
        for first, second in colliding(claims_of_homes(self._learned.homes)):
            if not self._unused.keys() >= {first, second}:
                self._refused[first] = written_twice(second)

    def _untouched(self, name: str) -> None:
        """A tensor that lies where the loader put it; the serving model must look there as a fresh one does."""
        homes: list[Home] = []
        for home in self._learned.homes[name]:
            for inner in home.storage.names:
                if inner not in self._state or view_of(self._state[inner]) != self._twin[inner]:
                    self._refused[name] = f"{inner} of the serving model is not laid out as a fresh one's"
                    return
            storage = self._storage(self._state[home.storage.key])
            if problem := self._shared(home.storage.key, storage):
                self._refused[name] = problem
                return
            homes.append(Home(storage, home.width, home.pieces))
        self._homes[name] = tuple(homes)

    def _aliases(self, aliases: Mapping[str, str]) -> None:
        for name, primary in aliases.items():
            if matches(name, self._settings.may_ignore):
                self._unused[name] = f"{primary} overwrites it"
            elif primary in self._homes:
                self._homes[name] = self._homes[primary]
            elif primary not in self._refused:
                self._refused[name] = f"it shares its storage with {primary}, which post-load leaves nowhere to be read"

    def _limit_whole(self) -> None:
        """Refuse layers that need more bytes sent whole at each refit than allowed."""
        nbytes = sum(self._catalog[name].nbytes for name in self._whole)
        if nbytes <= self._settings.dense_nbytes:
            return
        for name, reason in self._whole.items():
            self._refused[name] = (
                f"{reason}; its layer could be loaded whole at each refit, but all such layers need {nbytes} bytes, and "
                f"dense_nbytes allows {self._settings.dense_nbytes}"
            )

    def _cross_check(self) -> None:
        """For a sample of layers: what lies in storage, read back and finished anew, must be what lies in storage."""
        by_label = {", ".join(layer.unit.roots): layer for layer in self._layers.layers if not layer.map.lost}
        for label in sample(list(by_label), self._settings.cross_check):
            check = self._rerun(by_label[label])
            check.readable = {name: self._targets(name) for name in by_label[label].map.homes}
            try:
                path = check.stale()
            except LoaderContractError as error:
                path = str(error)
            if path:
                names = by_label[label].unit.names
                self._refused |= dict.fromkeys(names, f"start-up cross-check: {path} is not what post-load makes of these bits")

    def _targets(self, name: str) -> tuple[WordsTarget, ...]:
        return targets_of(self._catalog[name], self._homes[name], torch_writes=self._settings.torch_writes)

    # --- what is told ---------------------------------------------------------------------------------------------

    def _routes(self, aliased: set[str]) -> dict[str, TensorRoute]:
        return {name: self._route(name, name in aliased) for name in self._catalog}

    def _route(self, name: str, is_alias: bool) -> TensorRoute:
        if name in self._homes:
            homes = self._homes[name]
            derives = self._derives.get(name, "")
            held = held_pieces(homes) or held_homes(homes)
            return pieces_route(homes, held, is_alias=is_alias, has_low_bits=False, derives=derives)
        if name in self._whole:
            reason = f"sent whole: {self._whole[name]}"
            count = self._catalog[name].num_elements
            overwrite = (int(Encoding.OVERWRITE),)
            return TensorRoute("scratch", overwrite, "opaque", reason, num_elements=count, is_dense=True, is_rerun=True)
        return TensorRoute(kind="skipped", encodings=(), reason=self._unused.get(name, "the loader writes nothing for it here"))

    def _claims(self) -> Iterable[Claim]:
        """Bytes of storage that canonical tensors or the layers' own computations fill."""
        for name, homes in self._homes.items():
            for home in homes:
                for view in _byte_views(home):
                    yield Claim(name, home.storage.key, view, home.width)
        for rerun in self._reruns:
            for path, ranges in rerun.recomputed.items():
                for low, high in ranges:
                    view = StridedView(int(low), (int(high - low),), (1,))
                    yield Claim(f"post-load of {rerun.label}", rerun.storages[path].key, view, 1)

    def _report(self, routes: dict[str, TensorRoute], claims: Sequence[Claim], aliases: Mapping[str, str]) -> PrewarmReport:
        places = tensor_places(self._model, self._storages)
        return PrewarmReport(
            routes=routes,
            fingerprint=fingerprint_of(self._model, self._catalog, self._settings, routes),
            unreached=unreached_elements(places, claims),
            misreported=(),
            aliases=tuple(sorted(aliases.items())),
            num_storages=len(self._storages.storages),
            resident_nbytes=self._storages.nbytes,
            scratch_nbytes=0,
        )


def _byte_views(home: Home) -> Iterable[StridedView]:
    """The words of ``home.width`` bytes that a home touches."""
    if not home.bits or home.bits >= 8:
        return [piece.storage for piece in home.pieces]
    per_byte = 8 // home.bits
    touched = np.unique(np.concatenate([piece.storage.positions() // per_byte for piece in home.pieces]))
    pieces = fit_pieces(touched, touched)
    if pieces is None:  # no pattern: claim everything between, so that nothing there counts as unchanging
        return [StridedView(int(touched[0]), (int(touched[-1] - touched[0]) + 1,), (1,))]
    return [piece.storage for piece in pieces]
