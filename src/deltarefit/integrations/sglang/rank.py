"""One rank's end: answers the driver inside SGLang's scheduler process, on the thread that owns the model."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from deltarefit.errors import RejectedError
from deltarefit.integrations.exchange import RankEndpoint, RankOperations, changed_after_load, named_state
from deltarefit.integrations.sglang.derived import DerivedState
from deltarefit.integrations.sglang.plugin import LOADER, PREFIX
from deltarefit.integrations.sglang.receiver import SglangReceiver
from deltarefit.receiver import ReceiverSettings
from deltarefit.wording import some_of

__all__ = ["answer", "check_layout", "receive", "whole_state"]

_SHOWN = 5
_ENDPOINTS: weakref.WeakKeyDictionary[Any, RankEndpoint] = weakref.WeakKeyDictionary()


def answer(model: torch.nn.Module, info: Mapping[str, str], *, dtype: torch.dtype | None = None) -> None:
    """Meet a driver (``directory``, ``session``, ``key_file``), or carry out one of its operations (``number``, ``operation``).

    ``dtype``: the one that SGLang's loaders take as the default.

    Raises:
        RejectedError: the operation is not from the driver that this rank answers to, or makes no sense.
    """
    with torch.no_grad(), _default_dtype(dtype):
        _wait_for_devices(model)
        if "directory" in info:
            endpoint = _new_endpoint(model, verify_writes=info.get("verify_writes") == "true")
            _ENDPOINTS[model] = endpoint
            endpoint.meet(info["directory"], info["session"], info.get("key_file", ""))
            return
        known = _ENDPOINTS.get(model)
        number = info.get("number", "")
        if known is None or not number.isdecimal():
            raise RejectedError(
                f"operation {info.get('operation')!r}, number {number!r}: expected a driver that has introduced itself"
            )
        known.receive(info["session"], int(number), info["operation"])


def receive(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's ``custom_weight_loader``: one operation inside an update session. The tensor's name says which.

    Raises:
        RejectedError: this is no operation of a driver of ours.
    """
    for name, _ in named_tensors:
        if not name.startswith(PREFIX):
            raise RejectedError(f"{LOADER} got a tensor {name[:80]!r}: expected an operation of a deltarefit receiver")
        answer(model, json.loads(name.removeprefix(PREFIX)), dtype=getattr(getattr(model, "config", None), "torch_dtype", None))


def check_layout(model: torch.nn.Module) -> None:
    """Refuse a model of which weights no longer lie where SGLang's loader wrote them, or that SGLang says to leave alone.

    Raises:
        RejectedError: with the names and what to do.
    """
    changed = changed_after_load(model)
    if changed is None:
        raise RejectedError(
            "SGLang loaded this model by a way that deltarefit did not see, so its weights may be packed: expected "
            f"--custom-weight-loader {LOADER}, a loader derived from DefaultModelLoader, and the entry point 'deltarefit' of "
            "sglang.srt.plugins (see SGLANG_PLUGINS)"
        )
    if changed:
        lines = some_of(changed, _SHOWN, joint="\n  ")
        raise RejectedError(
            f"{len(changed)} weights of this SGLang model are not in the layout that its loader writes, so they cannot be "
            f"refitted in place:\n  {lines}\n"
            "Choose kernel backends that keep the checkpoint's layout, such as Triton for experts"
        )
    for module in model.modules():
        if (reason := getattr(module, "_derived_weight_cache_error", None)) is not None:
            raise RejectedError(f"SGLang refuses weight updates of this model: {reason}")


def whole_state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer, and what SGLang derives from them outside of both."""
    yield from named_state(model)
    yield from DerivedState(model).tensors().items()


def _new_endpoint(model: torch.nn.Module, *, verify_writes: bool) -> RankEndpoint:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    rank = parallel.pp_rank * parallel.tp_size + parallel.tp_rank
    world_size = parallel.tp_size * parallel.pp_size
    return RankEndpoint(rank, world_size, partial(_operations, weakref.ref(model), rank, verify_writes))


def _operations(held: weakref.ref[torch.nn.Module], rank: int, verify_writes: bool, key: bytes | None) -> RankOperations:
    import sglang

    model = held()
    if model is None:
        raise RejectedError("the model that this driver met is gone; meet the engine again")
    check_layout(model)
    settings = ReceiverSettings(layout_tag=f"sglang {sglang.__version__}, rank {rank}", verify_writes=verify_writes)
    load: Any = model.load_weights
    receiver = SglangReceiver(model, load, settings=settings)
    return RankOperations(model, receiver, check=check_layout, key=key, state=whole_state)


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """As around SGLang's own loading."""
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _wait_for_devices(model: torch.nn.Module) -> None:
    """Forward passes that were launched before may still be reading weights."""
    for device in {parameter.device for parameter in model.parameters()}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
