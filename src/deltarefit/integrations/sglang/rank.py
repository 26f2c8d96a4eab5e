"""One rank's end: answers the driver inside SGLang's scheduler process, on the thread that owns the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deltarefit.bits import logical_words
from deltarefit.errors import RejectedError
from deltarefit.integrations.exchange import RankEndpoint, RankOperations, changed_after_load, named_state
from deltarefit.integrations.exchange.directory import Exchange
from deltarefit.integrations.sglang.derived import DerivedState
from deltarefit.integrations.sglang.plugin import LOADER, PREFIX
from deltarefit.integrations.sglang.receiver import SglangReceiver
from deltarefit.receiver import ReceiverSettings
from deltarefit.runtime.messages import Failure
from deltarefit.wording import some_of

__all__ = ["answer", "check_layout", "meet", "receive", "refuse_draft", "whole_state"]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class _Met:
    """A driver has introduced itself to the rank of a model."""

    endpoint: RankEndpoint
    dtype: torch.dtype
    """The one that SGLang's loaders take as the default in this engine; its checkpoint may name another."""


_MET: dict[torch.nn.Module, _Met] = {}
"""At most one entry: a process of SGLang's serves one policy, for as long as it lives."""


def meet(model: torch.nn.Module, info: Mapping[str, str], *, dtype: torch.dtype) -> None:
    """Answer to the driver that introduces itself (``directory``, ``session``, ``key_file``) from now on, and to no other.

    Raises:
        RejectedError: its directory is none that this rank can use.
    """
    rank, world_size = _place()
    settings = ReceiverSettings(layout_tag=partial(_tag, rank), verify_writes=info.get("verify_writes") == "true")
    endpoint = RankEndpoint(rank, world_size, partial(_operations, model, settings))
    with _as_in_loading(model, dtype):
        endpoint.meet(info["directory"], info["session"], info.get("key_file", ""))
    _MET.clear()
    _MET[model] = _Met(endpoint, dtype)


def answer(model: torch.nn.Module, info: Mapping[str, str]) -> None:
    """Carry out one of a driver's operations (``session``, ``number``, ``operation``).

    Raises:
        RejectedError: the operation is not from the driver that this rank answers to, or makes no sense.
    """
    known, number = _MET.get(model), info.get("number", "")
    if known is None or not number.isdecimal():
        raise RejectedError(
            f"operation {info.get('operation')!r}, number {number!r}: expected a driver that has introduced itself"
        )
    with _as_in_loading(model, known.dtype):
        known.endpoint.receive(info["session"], int(number), info["operation"])


def receive(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's ``custom_weight_loader``: one operation inside an update session. The tensor's name says which.

    Raises:
        RejectedError: this is no operation of a driver of ours.
    """
    for name, _ in named_tensors:
        if not name.startswith(PREFIX):
            raise RejectedError(f"{LOADER} got a tensor {name[:80]!r}: expected an operation of a deltarefit receiver")
        answer(model, json.loads(name.removeprefix(PREFIX)))


def refuse_draft(info: Mapping[str, str]) -> None:
    """Answer for the rank of a draft, in place of what that of its policy has just answered: nobody would refit the draft."""
    rank, world_size = _place()
    refusal = RejectedError(
        "this engine speculates with a draft model, which would keep its old weights: deltarefit does not refit drafts of "
        "SGLang. Serve without --speculative-algorithm, or leave the draft as it is: 'deltarefit receiver --keep-drafts', "
        "SglangEngine(..., refit_drafts=False)"
    )
    Exchange(Path(info["directory"]), info["session"]).reply(0, rank, world_size, None, Failure.of(refusal))


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
        listed = some_of(changed, _SHOWN, joint="\n  ")
        raise RejectedError(
            f"{len(changed)} weights of this SGLang model are not in the layout that its loader writes, so they cannot be "
            f"refitted in place:\n  {listed}\n"
            "Choose kernel backends that keep the checkpoint's layout, such as Triton for experts"
        )
    for module in model.modules():
        if (reason := getattr(module, "_derived_weight_cache_error", None)) is not None:
            raise RejectedError(f"SGLang refuses weight updates of this model: {reason}")


def whole_state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer, and what SGLang derives from them outside of both."""
    yield from named_state(model)
    yield from DerivedState(model).tensors().items()


def _place() -> tuple[int, int]:
    """This rank's number, and how many there are."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.pp_rank * parallel.tp_size + parallel.tp_rank, parallel.tp_size * parallel.pp_size


def _tag(rank: int) -> str:
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    import sglang

    tag = f"sglang {sglang.__version__}, rank {rank}"
    experts = get_global_expert_location_metadata()
    if experts is None:
        return tag
    # SGLang moves experts between slots while it serves, and loads by the map of the moment.
    slots = logical_words(experts.physical_to_logical_map_cpu).tobytes()
    return f"{tag}, experts {hashlib.blake2b(slots, digest_size=8).hexdigest()}"


def _operations(model: torch.nn.Module, settings: ReceiverSettings, key: bytes | None) -> RankOperations:
    check_layout(model)
    load: Any = model.load_weights
    receiver = SglangReceiver(model, load, settings=settings)
    return RankOperations(model, receiver, check=check_layout, key=key, state=whole_state)


@contextmanager
def _as_in_loading(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """What SGLang has around its own loading; and nothing that was launched before still reads the weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.no_grad():
            _wait_for_devices(model)
            yield
    finally:
        torch.set_default_dtype(before)


def _wait_for_devices(model: torch.nn.Module) -> None:
    """Forward passes that were launched before may still be reading weights."""
    for device in {parameter.device for parameter in model.parameters()}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
