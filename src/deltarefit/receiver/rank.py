"""One rank's model as a receiver: prewarm, prepare, apply, digests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from deltarefit import kernels
from deltarefit.canonical import Catalog, TensorDigest, TensorSpec, Words
from deltarefit.errors import LoaderContractError, PayloadInvalidError, PayloadMissingError, RejectedError
from deltarefit.placement.inputs import LoadWeights
from deltarefit.plan import RefitPlan
from deltarefit.receiver.guard import layout_fingerprint, layout_of
from deltarefit.receiver.prewarm import Prewarmed, prewarm_model
from deltarefit.receiver.report import PrewarmReport, RankDigest
from deltarefit.receiver.scratch import LoaderPath, ScratchBuffer
from deltarefit.receiver.settings import ApplyPath, ReceiverSettings
from deltarefit.receiver.writers import verify_item
from deltarefit.records import CodedItem, Encoding

if TYPE_CHECKING:
    from deltarefit.payload import Payload

__all__ = ["RankReceiver"]


@dataclass(slots=True, eq=False)
class _DenseStage:
    """Elements of a tensor that must be loaded whole, gathered from several items of one attempt."""

    words: Words
    present: NDArray[np.bool_]

    def add(self, item: CodedItem) -> bool:
        """Take an item's elements; whether all are there now."""
        positions = kernels.decode_positions(item)
        self.words[positions] = kernels.decode_values(item)
        self.present[positions] = True
        return bool(self.present.all())


class RankReceiver:
    """Applies payloads to the parameters and buffers of one rank's model, in place.

    Call it from one thread at a time, the one on which the engine's loader may run. Storage is never moved or replaced. After
    any error of ``apply`` storage may hold a mixture of old and new bits until an overwrite attempt has passed (paper 6.3).
    """

    def __init__(self, model: torch.nn.Module, load_weights: LoadWeights, *, settings: ReceiverSettings | None = None) -> None:
        self._model = model
        self._load_weights = load_weights
        self._settings = settings or ReceiverSettings()
        self._prewarmed: Prewarmed | None = None
        self._fingerprint = ""
        self._plan: RefitPlan | None = None
        self._path: LoaderPath | None = None
        self._attempt = ""
        self._stages: dict[str, _DenseStage] = {}

    def prewarm(self, catalog: Catalog) -> PrewarmReport:
        """Learn where every tensor of the catalog goes. Changes no byte of the model; cheap if nothing changed since.

        Raises:
            RejectedError: tensors that cannot be refit, each with its reason.
        """
        fingerprint = self._layout(catalog)
        if self._prewarmed is None or fingerprint != self._fingerprint:
            self._prewarmed, self._plan, self._path = None, None, None
            self._prewarmed = prewarm_model(self._model, self._load_weights, catalog, self._settings)
            self._fingerprint = fingerprint
            self._path = self._loader_path(self._prewarmed)
        return self._prewarmed.report

    def prepare(self, plan: RefitPlan) -> None:
        """Fix the plan of the next attempt.

        Raises:
            RejectedError: no prewarm for this catalog and layout, or an encoding that this rank cannot take.
        """
        known = self._known()
        if plan.catalog != known.catalog:
            raise RejectedError("prepare: the plan's catalog is not the one of the last prewarm; run prewarm again")
        if self._layout(plan.catalog) != self._fingerprint:
            raise RejectedError(
                f"prepare: the model's layout changed since prewarm ({', '.join(self._moved()[:3]) or 'other settings'}); "
                "run prewarm again"
            )
        for name, route in known.report.routes.items():
            if route.kind == "skipped":
                continue
            encoding = plan.encodings[name]
            if name not in plan.dense and int(encoding) not in route.encodings:
                raise RejectedError(f"prepare: tensor {name} cannot take {encoding.name} here: {route.reason or route.kind}")
            if route.is_dense and name not in plan.dense:
                raise RejectedError(f"prepare: every element of tensor {name} must be sent each time: {route.reason}")
        self._plan = plan
        self._stages = {}
        self._attempt = ""

    def apply(self, payload: Payload) -> int:
        """Apply a payload's items in order. All items are checked before the first is applied.

        Returns:
            Storage elements written on this rank.

        Raises:
            RejectedError: no plan was prepared.
            PayloadInvalidError: the payload does not fit the plan; nothing of it was applied.
            LoaderContractError: the engine's loader did what prewarm had not seen, or a check of written bits failed.
        """
        known = self._known()
        if self._plan is None:
            raise RejectedError("apply: no plan was prepared on this receiver")
        if payload.header.plan_digest != self._plan.digest:
            raise PayloadInvalidError(
                f"payload {payload.header.sequence} of owner {payload.header.owner}: made for plan "
                f"{payload.header.plan_digest}, this receiver prepared {self._plan.digest}"
            )
        for item in payload.items:
            self._check(item, known, self._plan)
        if payload.header.attempt != self._attempt:
            self._attempt, self._stages = str(payload.header.attempt), {}
        return sum(self._apply_item(item, known) for item in payload.items)

    def synchronize(self) -> None:
        """Return once every write has reached its device.

        Raises:
            PayloadMissingError: a tensor that must be loaded whole did not arrive whole.
            LoaderContractError: storage was moved or replaced since prewarm.
        """
        for device in {storage.device for storage in self._known().storages.storages}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        if self._stages:
            name, stage = next(iter(self._stages.items()))
            raise PayloadMissingError(
                f"tensor {name}: must be loaded whole, {int(stage.present.sum())} of {stage.present.size} elements arrived"
            )
        if moved := self._moved():
            raise LoaderContractError(
                f"storage of {', '.join(moved[:3])} was moved or replaced since prewarm; run prewarm again"
            )

    def digests(self) -> dict[str, RankDigest]:
        """Digests computed now from the bits that this rank holds, for every tensor that it holds as its stored bits.

        A further copy of elements on the same rank counts too: if it differs, the tensor's digest is wrong.
        """
        known = self._known()
        result: dict[str, RankDigest] = {}
        for name, plan in known.digest_plans.items():
            digest = plan.digest()
            result[name] = RankDigest(plan.coverage, plan.num_elements, digest.lane0, digest.lane1)
        return result

    def residue(self) -> dict[str, TensorDigest]:
        """Digests of the storages that no canonical tensor reaches (caches, runtime constants): no refit changes them."""
        return self._known().residue()

    def _known(self) -> Prewarmed:
        if self._prewarmed is None:
            raise RejectedError("receiver: run prewarm first")
        return self._prewarmed

    def _layout(self, catalog: Catalog) -> str:
        return layout_fingerprint(layout_of(self._model), catalog.digest, self._settings.layout_tag)

    def _moved(self) -> list[str]:
        before, now = self._known().layout, layout_of(self._model)
        return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))

    def _loader_path(self, known: Prewarmed) -> LoaderPath:
        return LoaderPath(
            self._load_weights,
            known.storages,
            ScratchBuffer(known.report.scratch_nbytes),
            known_fills=known.known_fills,
            verify=self._settings.verify_writes,
        )

    def _check(self, item: CodedItem, known: Prewarmed, plan: RefitPlan) -> None:
        name = item.spec.name
        spec = known.catalog.get(name)
        if spec != item.spec:
            raise PayloadInvalidError(f"item of {item.spec}: expected {spec or 'a name of the catalog'}")
        allowed = {Encoding.OVERWRITE} if name in plan.dense else {Encoding.OVERWRITE, plan.encodings[name]}
        if item.encoding not in allowed:
            raise PayloadInvalidError(f"item of {name}: encoding {item.encoding.name} is not what the plan says for it")
        kernels.decode_positions(item)

    def _apply_item(self, item: CodedItem, known: Prewarmed) -> int:
        route = known.report.routes[item.spec.name]
        if route.kind == "skipped":
            return 0
        if route.kind == "pieces" and self._settings.path is ApplyPath.COMPILED:
            return self._apply_to_targets(item, known)
        return self._apply_through_loader(item, known)

    def _apply_to_targets(self, item: CodedItem, known: Prewarmed) -> int:
        written = 0
        for target in known.targets[item.spec.name]:
            if not self._settings.verify_writes:
                written += target.apply(item)
                continue
            before = target.read(kernels.decode_positions(item))
            written += target.apply(item)
            verify_item(target, item, before)
        return written

    def _apply_through_loader(self, item: CodedItem, known: Prewarmed) -> int:
        path = self._path
        if path is None:
            raise RejectedError("receiver: run prewarm first")
        spec, route = item.spec, known.report.routes[item.spec.name]
        if route.is_dense:
            stage = self._stages.setdefault(spec.name, _new_stage(spec))
            if not stage.add(item):
                return 0
            del self._stages[spec.name]
            return path.dense(spec, stage.words)
        positions, values = kernels.decode_positions(item), kernels.decode_values(item)
        if item.encoding is not Encoding.OVERWRITE:
            return path.masks(spec, positions, values, item.encoding)
        if route.kind == "pieces":
            return path.bits(spec, positions, values)
        return path.values(spec, positions, values)


def _new_stage(spec: TensorSpec) -> _DenseStage:
    return _DenseStage(np.zeros(spec.num_elements, spec.word_dtype), np.zeros(spec.num_elements, bool))
