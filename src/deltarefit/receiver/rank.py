"""One rank's model as a receiver: prewarm, prepare, apply, digests."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from deltarefit import kernels
from deltarefit.canonical import Catalog, TensorDigest
from deltarefit.errors import LoaderContractError, RejectedError
from deltarefit.placement.after_load import AfterLoad
from deltarefit.placement.inputs import LoadWeights
from deltarefit.plan import RefitPlan
from deltarefit.receiver.assembly import Prewarmed
from deltarefit.receiver.guard import layout_of
from deltarefit.receiver.prewarm import prewarm_after_load, prewarm_model
from deltarefit.receiver.ready import ReadyPayload, make_ready
from deltarefit.receiver.report import PrewarmReport, RankDigest
from deltarefit.receiver.scratch import LoaderPath, ScratchBuffer
from deltarefit.receiver.settings import ApplyPath, ReceiverSettings
from deltarefit.receiver.writers import verify_item
from deltarefit.records import CodedItem, Encoding

if TYPE_CHECKING:
    from deltarefit.payload import Payload

__all__ = ["RankReceiver"]


class RankReceiver:
    """Applies payloads to the parameters and buffers of one rank's model, in place.

    Call it from one thread at a time, the one on which the engine's loader may run. Storage is never moved or replaced. After
    any error of ``apply`` storage may hold a mixture of old and new bits until an overwrite attempt has passed (paper 6.3).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        load_weights: LoadWeights,
        *,
        settings: ReceiverSettings | None = None,
        after_load: AfterLoad | None = None,
    ) -> None:
        """Nothing is read or changed yet.

        Args:
            model: holds every tensor that the loader writes as a parameter or buffer.
            load_weights: the engine's own loader; takes (canonical name, tensor) pairs and copies them into place.
            settings: how to receive.
            after_load: the engine's post-load steps, if they moved or derived anything since ``model`` was loaded.
        """
        self._model = model
        self._load_weights = load_weights
        self._settings = settings or ReceiverSettings()
        self._after_load = after_load
        self._prewarmed: Prewarmed | None = None
        self._path: LoaderPath | None = None
        self._plan: RefitPlan | None = None
        self._attempt = ""

    def prewarm(self, catalog: Catalog) -> PrewarmReport:
        """Learn where every tensor of the catalog goes. Changes no byte of the model; cheap if nothing changed since.

        Raises:
            RejectedError: tensors that cannot be refit, each with its reason.
        """
        known = self._prewarmed
        if known is None or known.catalog != catalog or self._stale(known):
            self._prewarmed, self._plan, self._path = None, None, None
            known = self._learn(catalog)
            self._path = LoaderPath(
                self._load_weights,
                known.storages,
                ScratchBuffer(known.report.scratch_nbytes),
                known_fills=known.known_fills,
                expected=known.expected_writes,
                verify=self._settings.verify_writes,
            )
            self._prewarmed = known
        return known.report

    def _learn(self, catalog: Catalog) -> Prewarmed:
        if self._after_load is not None:
            known = prewarm_after_load(self._model, self._after_load, catalog, self._settings)
            gc.collect()  # modules of the second model may refer to one another
            return known
        return prewarm_model(self._model, self._load_weights, catalog, self._settings)

    def prepare(self, plan: RefitPlan) -> None:
        """Fix the plan of the next attempt.

        Raises:
            RejectedError: no prewarm for this catalog and layout, or an encoding that this rank cannot take.
        """
        known = self._known()
        if plan.catalog != known.catalog:
            raise RejectedError("prepare: the plan's catalog is not the one of the last prewarm; run prewarm again")
        if stale := self._stale(known):
            raise RejectedError(f"prepare: {stale} changed since prewarm; run prewarm again")
        for name, route in known.report.routes.items():
            if route.kind == "skipped":
                continue
            encoding = plan.encodings[name]
            if name not in plan.dense and int(encoding) not in route.encodings:
                raise RejectedError(f"prepare: tensor {name} cannot take {encoding.name} here: {route.reason or route.kind}")
            if route.is_dense and name not in plan.dense:
                raise RejectedError(f"prepare: every element of tensor {name} must be sent each time: {route.reason}")
        self._plan = plan
        self._begin("", known)

    def ready(self, payload: Payload) -> ReadyPayload:
        """Do ahead of time what need not wait for the payload's turn. Writes nothing; may be called from other threads.

        Args:
            payload: from ``payload.decode``, which has checked every position in it.

        Raises:
            RejectedError: no plan was prepared.
            PayloadInvalidError: the payload does not fit the plan.
        """
        plan = self._plan  # read once: another thread may begin a prewarm meanwhile
        if plan is None:
            raise RejectedError("apply: no plan was prepared on this receiver")
        return make_ready(payload, self._known(), plan, self._settings)

    def apply(self, payload: Payload | ReadyPayload) -> int:
        """Apply a payload's items. All are checked before the first is applied.

        Returns:
            Storage elements written on this rank.

        Raises:
            RejectedError: no plan was prepared.
            PayloadInvalidError: the payload does not fit the plan; nothing of it was applied.
            LoaderContractError: storage was moved (nothing was written), the engine's loader did what prewarm had not seen, or
                a check of written bits failed.
        """
        known = self._known()
        if not isinstance(payload, ReadyPayload):
            payload = self.ready(payload)
        elif payload.known is not known or payload.plan is not self._plan:
            payload = self.ready(payload.payload)
        self._require_layout(known)
        if known.fence.first_moved() is not None:
            raise self._moved_error(known)
        attempt = str(payload.payload.header.attempt)
        if attempt != self._attempt:
            self._begin(attempt, known)
        written = 0
        for part in payload.items(self._settings):
            written += sum(self._apply_item(item, known) for item in part.others) + part.direct.run()
        return written

    def synchronize(self) -> None:
        """Return once every write has reached its device.

        Raises:
            PayloadMissingError: a tensor that must be loaded whole did not arrive whole.
            LoaderContractError: storage was moved or replaced since prewarm.
        """
        known = self._known()
        for device in {storage.device for storage in known.storages.storages}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        for copy in known.kept.values():
            copy.require_whole()
        for unit in known.reruns:
            unit.finish()
        if self._moved(known):
            raise self._moved_error(known)

    def digests(self) -> dict[str, RankDigest]:
        """Digests computed now from the bits that this rank holds, for every tensor whose canonical bits it can prove.

        A further copy of elements on the same rank counts too: if it differs, the tensor's digest is wrong on purpose.

        Raises:
            LoaderContractError: storage was moved or replaced since prewarm.
        """
        known = self._known()
        self._require_layout(known)
        if moved := self._moved(known):
            raise LoaderContractError(
                f"digests: storage of {', '.join(moved[:3])} was moved or replaced since prewarm, so nothing is known of what "
                "is served; run prewarm again"
            )
        result = known.proofs.digests()
        for name, copy in known.kept.items():
            shown = copy.digest(self._load_weights, known.storages)
            if shown is not None:
                result[name] = RankDigest("whole", copy.spec.num_elements, shown.lane0, shown.lane1)
        for unit in known.reruns:
            for name, sent in unit.whole.items():
                if (shown := unit.digest(name)) is not None:
                    result[name] = RankDigest("whole", sent.spec.num_elements, shown.lane0, shown.lane1)
        return result

    def residue(self) -> dict[str, TensorDigest]:
        """Digests of what no canonical tensor reaches (caches, runtime constants, padding), by storage: no refit changes it."""
        return self._known().residue()

    def drift(self) -> tuple[str, ...]:
        """Storages of which bytes that no canonical tensor reaches have changed since prewarm, by their first tensor's name."""
        known = self._known()
        rest = tuple(name for name, digest in known.residue().items() if digest != known.residue_at_start[name])
        return rest + tuple(path for unit in known.reruns for path in unit.drifted() if path not in rest)

    def _begin(self, attempt: str, known: Prewarmed) -> None:
        """Parts of tensors that an earlier attempt left waiting count no longer."""
        self._attempt = attempt
        for copy in known.kept.values():
            copy.begin()
        for unit in known.reruns:
            unit.begin()

    def stale(self) -> str:
        """What has changed since prewarm so that it must be run again, in words; empty if nothing has, or before any."""
        return "" if self._prewarmed is None else self._stale(self._prewarmed)

    def _known(self) -> Prewarmed:
        if self._prewarmed is None:
            raise RejectedError("receiver: run prewarm first")
        return self._prewarmed

    def _stale(self, known: Prewarmed) -> str:
        """What makes a prewarm stale, in words; empty if nothing does."""
        if self._settings.current_tag() != known.layout_tag:
            return "the engine's settings"
        moved = self._moved(known)
        return f"storage of {', '.join(moved[:3])}" if moved else ""

    def _require_layout(self, known: Prewarmed) -> None:
        """Storage that stays may hold other weights: engines move experts between slots while they serve.

        Raises:
            LoaderContractError: the engine says that its layout is another than the one that prewarm learned.
        """
        if (tag := self._settings.current_tag()) != known.layout_tag:
            raise LoaderContractError(
                f"the engine's layout was {known.layout_tag!r} at prewarm and is {tag!r} now; run prewarm again"
            )

    def _moved_error(self, known: Prewarmed) -> LoaderContractError:
        names = ", ".join(self._moved(known)[:3])
        return LoaderContractError(f"storage of {names} was moved or replaced since prewarm; run prewarm again")

    def _moved(self, known: Prewarmed) -> list[str]:
        now = layout_of(self._model)
        derived = known.derived.moved()
        if now == known.layout:
            return derived
        return derived + sorted(name for name in {*known.layout, *now} if known.layout.get(name) != now.get(name))

    def _apply_item(self, item: CodedItem, known: Prewarmed) -> int:
        name = item.spec.name
        route = known.report.routes[name]
        if route.kind == "skipped":
            return 0
        if self._path is None:
            raise RejectedError("receiver: run prewarm first")
        if (unit := known.rerun_of(name)) is not None:
            unit.is_touched = True
            if name in unit.whole:
                return unit.whole[name].take(item)
        if name in known.kept:
            return known.kept[name].apply(item, self._path)
        if route.kind == "pieces" and self._settings.path is ApplyPath.COMPILED:
            return self._apply_to_targets(item, known)
        positions, values = kernels.decode_positions(item), kernels.decode_values(item)
        if item.encoding is not Encoding.OVERWRITE:
            return self._path.masks(item.spec, positions, values, item.encoding)
        if route.kind == "pieces":
            return self._path.bits(item.spec, positions, values)
        return self._path.values(item.spec, positions, values)

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
