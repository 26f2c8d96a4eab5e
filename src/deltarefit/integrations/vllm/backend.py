"""The weight-transfer backend: one rank's receiver inside a vLLM worker. Only vLLM imports this module.

A session (``start_weight_update`` to ``finish_weight_update``) carries any number of operations. A refit in place must never
be wrapped in vLLM's layerwise reload, which moves layers to the meta device: start and finish do nothing here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.utils.torch_utils import set_default_torch_dtype

import vllm
from deltarefit.errors import RejectedError
from deltarefit.integrations.exchange import RankEndpoint, RankOperations, changed_after_load
from deltarefit.integrations.vllm.after_load import IGNORED, UNFILLED, VllmAfterLoad
from deltarefit.integrations.vllm.drafts import POLICY, check_names, making_of, targets_of
from deltarefit.integrations.vllm.experts import check_experts
from deltarefit.integrations.vllm.plain_linears import plain_linears
from deltarefit.placement.after_load import AfterLoad
from deltarefit.receiver import JointAfterLoad, JointModel, RankReceiver, ReceiverSettings, Target

__all__ = ["DeltarefitBackend"]


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What ``init_weight_transfer_engine`` is given."""

    directory: str
    """The driver's exchange directory, the only one that this backend writes to."""
    session: str
    """The driver's name; operations of any other driver are refused."""
    key_file: str = ""
    """File of the run's key, if it has one. The key itself never travels in a call."""
    verify_writes: bool = False
    """Check every write after it was made."""
    refit_drafts: bool = True
    """Refit speculative drafts with the policy; else they stay as they were loaded."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What ``update_weights`` is given: one operation, whose input lies in the exchange directory."""

    session: str
    number: int
    operation: str


class DeltarefitBackend(WeightTransferEngine):  # type: ignore[misc]
    """vLLM makes one in every worker whose configuration names the backend, right after its model is loaded."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False  # a draft is refitted with the policy, in the same session

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._verify_writes, self._refit_drafts = False, True
        self._endpoint = RankEndpoint(rank, parallel.world_size * parallel.data_parallel_size, self._make_operations)

    def _make_operations(self, key: bytes | None) -> RankOperations:
        targets = targets_of(self.model, str(self.model_config.model), self.config if self._refit_drafts else None)
        model, load_weights = _joined(targets)
        _check_loading(model)
        parallel = self.parallel_config
        check_experts(parallel)
        settings = ReceiverSettings(
            layout_tag=f"vllm {vllm.__version__}, rank {parallel.rank} of {parallel.world_size}",
            verify_writes=self._verify_writes,
            may_ignore=IGNORED,
            may_lack=UNFILLED,
        )
        receiver = RankReceiver(model, load_weights, settings=settings, after_load=self._after_load(model, targets))
        names = functools.partial(check_names, targets)
        return RankOperations(model, receiver, check=_check_loading, key=key, check_catalog=names)

    def _after_load(self, model: torch.nn.Module, targets: Mapping[str, Target]) -> AfterLoad | None:
        """vLLM's post-load steps, if they changed anything; else weights lie where the loader wrote them."""
        if not any(changed_after_load(target.module) for target in targets.values()):
            return None
        parts: dict[str, AfterLoad] = {}
        for name, target in targets.items():
            making = making_of(target.module, self.vllm_config)
            parts[name] = VllmAfterLoad(
                making.vllm_config,
                self.device,
                model_config=making.model_config,
                prefix=making.prefix,
                finishing=plain_linears,
            )
        return JointAfterLoad(model, targets, parts) if isinstance(model, JointModel) else parts[POLICY]

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Meet a driver. A second one replaces the first, as after a restart of the receiver beside a running server."""
        self._verify_writes, self._refit_drafts = init_info.verify_writes, init_info.refit_drafts
        self._endpoint.meet(init_info.directory, init_info.session, init_info.key_file)

    def start_weight_update(self) -> None:
        """Nothing to prepare: weights change in place."""

    def finish_weight_update(self) -> None:
        """Nothing to finish: weights changed in place."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Carry out one operation, under the conditions that vLLM's own loading gives to ``load_weights``."""
        dtype = set_default_torch_dtype(self.model_config.dtype)
        with torch.no_grad(), set_current_vllm_config(self.vllm_config), dtype:
            self._endpoint.receive(update_info.session, int(update_info.number), update_info.operation)

    def shutdown(self) -> None:
        """Forget the driver; the model stays as it is."""
        self._endpoint.forget()


def _joined(targets: Mapping[str, Target]) -> tuple[torch.nn.Module, Callable[..., object]]:
    """The policy, or policy and drafts as one module, with what loads it."""
    if len(targets) == 1:
        (policy,) = targets.values()
        return policy.module, policy.load_weights
    joint = JointModel(targets)
    return joint, joint.load_weights


def _check_loading(model: torch.nn.Module) -> None:
    """Refuse a model of which nobody knows what happened after loading.

    Raises:
        RejectedError: with what to do.
    """
    for target in model.children() if isinstance(model, JointModel) else (model,):
        if changed_after_load(target) is None:
            raise RejectedError(
                "vLLM loaded this model by a way that deltarefit did not see, so its weights may be packed: expected a loader "
                "derived from BaseModelLoader, in a process that ran "
                "the vllm.general_plugins entry point 'deltarefit' (see VLLM_PLUGINS)"
            )
