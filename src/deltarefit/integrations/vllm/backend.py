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
from deltarefit.integrations.exchange import RankEndpoint, RankOperations
from deltarefit.integrations.vllm.drafts import check_names, targets_of
from deltarefit.integrations.vllm.layout import check_layout
from deltarefit.receiver import JointModel, RankReceiver, ReceiverSettings, Target

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
        _check_each(model)
        parallel = self.parallel_config
        tag = f"vllm {vllm.__version__}, rank {parallel.rank} of {parallel.world_size}"
        settings = ReceiverSettings(layout_tag=tag, verify_writes=self._verify_writes)
        receiver = RankReceiver(model, load_weights, settings=settings)
        names = functools.partial(check_names, targets)
        return RankOperations(model, receiver, check=_check_each, key=key, check_catalog=names)

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


def _check_each(model: torch.nn.Module) -> None:
    for target in model.children() if isinstance(model, JointModel) else (model,):
        check_layout(target)
