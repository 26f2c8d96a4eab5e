"""One rank's receiver of an SGLang model: SGLang's loaders kept on one thread, and its derived state kept current."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import msgspec
import torch

from deltarefit.canonical import Catalog
from deltarefit.integrations.sglang.derived import DerivedState
from deltarefit.placement.inputs import LoadWeights
from deltarefit.receiver import RankReceiver, ReceiverSettings
from deltarefit.receiver.assembly import Prewarmed

__all__ = ["SglangReceiver"]

_READ_AT_ONCE = "_sglang_runai_streamer_tensor"
"""SGLang's own mark for tensors that must be consumed on the calling thread. Without it some loaders hand host tensors to a
thread pool, where no dispatch hook sees what becomes of them."""


class SglangReceiver(RankReceiver):
    """``RankReceiver`` for a model class of SGLang, in an engine or bare."""

    def __init__(self, model: torch.nn.Module, load_weights: LoadWeights, *, settings: ReceiverSettings | None = None) -> None:
        """``load_weights``: the model's own. What its loader computes outside parameters and buffers is looked after here."""
        self._derived = DerivedState(model)
        super().__init__(model, _on_this_thread(load_weights, self._derived), settings=settings)

    def _learn(self, catalog: Catalog) -> Prewarmed:
        """Also refuses models that derive state from weights which their own hook does not compute anew."""
        known = super()._learn(catalog)
        return _with_reruns(known, self._derived.check(self._settings.snapshot_nbytes))

    def synchronize(self) -> None:
        """As ``RankReceiver.synchronize``, with the derived state computed anew from the weights as they are now."""
        super().synchronize()
        self._derived.rerun()
        for device in {storage.device for storage in self._known().storages.storages}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def _on_this_thread(load_weights: LoadWeights, derived: DerivedState) -> LoadWeights:
    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        with derived.hook_held():
            return load_weights(_marked(weights))

    return load


def _marked(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        setattr(tensor, _READ_AT_ONCE, True)
        yield name, tensor


def _with_reruns(known: Prewarmed, reads: frozenset[int]) -> Prewarmed:
    """Note which tensors the hook derives state from."""
    read_keys = {storage.key for storage in known.storages.storages if storage.address in reads}
    routes = dict(known.report.routes)
    for name, targets in known.targets.items():
        if any(target.key in read_keys for target in targets):
            reason = routes[name].reason or "post_load_weights derives further state from it, and runs after each refit"
            routes[name] = msgspec.structs.replace(routes[name], is_rerun=True, reason=reason)
    return dataclasses.replace(known, report=msgspec.structs.replace(known.report, routes=routes))
