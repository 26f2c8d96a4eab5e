"""Reading a rank's model chunks and Bridge's conversion tasks for them: what is sent directly, what not, what is left.

Bridge's tasks have one order on all ranks of a pipeline, and the same length on all ranks (each expert-parallel rank has its
own experts at the same places), so a task's place names it everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from deltarefit.bits import DTYPES
from deltarefit.canonical import Catalog
from deltarefit.errors import RejectedError
from deltarefit.integrations.megatron.facts import TaskFacts, facts_of
from deltarefit.integrations.megatron.geometry import Geometry, UnmappedError, geometry_of

__all__ = ["Held", "LocalTasks", "read_tasks", "unwrapped"]

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_ADAPTER = ".adapter."


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter that this rank holds."""

    facts: TaskFacts
    mapped: tuple[Geometry, ...]
    """Of the checkpoint tensors that it is a rearrangement of. Empty if only Bridge can convert it; two for a tied embedding of
    which the checkpoint lists both names."""
    reason: str = ""
    """Why only Bridge can convert it."""
    is_isolated: bool = True
    """Whether what it becomes depends on nothing else."""


@dataclass(frozen=True, slots=True)
class LocalTasks:
    """What one rank's tasks say."""

    tasks: tuple[Any, ...]
    """Bridge's, None where a parameter has no mapping."""
    held: dict[int, Held]
    """By the place of the task."""
    unmapped: dict[str, str]
    """Parameters of this rank that are in no checkpoint tensor, with what is known about them."""


def read_tasks(bridge: Any, chunks: Sequence[torch.nn.Module], manifest: Catalog) -> LocalTasks:
    """Ask Bridge for its tasks and read the facts of those whose parameters this rank holds. Collective over the pipeline.

    Raises:
        RejectedError: adapters are attached, or a parameter cannot be read.
    """
    tasks = tuple(_conversion_tasks(bridge, chunks))
    hook = _Hook(bridge)
    held: dict[int, Held] = {}
    for place, task in enumerate(tasks):
        if task is None or task.param_weight is None:
            continue
        held[place] = _held(bridge, task, manifest, hook)
    unmapped = _unmapped(chunks, tasks)
    _add_tied_copies(bridge, tasks, chunks, manifest, hook, held, unmapped)
    return LocalTasks(tasks, held, unmapped)


def _conversion_tasks(bridge: Any, chunks: Sequence[torch.nn.Module]) -> Sequence[Any]:
    """Bridge's tasks; a bridge that was made from a configuration alone takes another way in."""
    if hasattr(bridge.hf_pretrained, "state"):
        return bridge.get_conversion_tasks(list(chunks))  # type: ignore[no-any-return]
    return bridge._model_bridge.build_conversion_tasks(bridge.hf_pretrained, list(chunks))  # type: ignore[no-any-return]


def _held(bridge: Any, task: Any, manifest: Catalog, hook: _Hook) -> Held:
    """The facts of a parameter, and its geometry if it can be sent directly."""
    facts = facts_of(task)
    if facts.refusal:
        return Held(facts, (), facts.refusal, task.export_hook is None)
    try:
        geometry = geometry_of(facts, manifest)
    except UnmappedError as error:
        return Held(facts, (), str(error))
    if hook.may_change(task, facts, manifest):
        return Held(facts, (), f"{hook.owner}.maybe_modify_converted_hf_weight may change it", is_isolated=False)
    alias = _tied_head(bridge, task, facts)
    if alias is None or alias not in manifest:
        return Held(facts, (geometry,))
    return Held(facts, (geometry, geometry_of(msgspec.structs.replace(facts, targets={"": alias}), manifest)))


def _tied_head(bridge: Any, task: Any, facts: TaskFacts) -> str | None:
    """The checkpoint's name for an output head that shares the embedding's memory."""
    if not facts.name.endswith(_EMBEDDING) or not _is_tied(task.megatron_module.config):
        return None
    output = facts.name[: -len(_EMBEDDING)] + _OUTPUT
    mapping = bridge._model_bridge.mapping_registry().megatron_to_hf_lookup(output)
    name = getattr(mapping, "hf_param", None)
    return name if isinstance(name, str) and name not in facts.targets.values() else None


def _is_tied(config: Any) -> bool:
    return bool(getattr(config, "share_embeddings_and_output_weights", False))


class _Hook:
    """A bridge's own step after conversion, tried on tensors without data: it may do nothing to those it is given."""

    def __init__(self, bridge: Any) -> None:
        self._model_bridge = bridge._model_bridge
        self._state: Any = getattr(bridge.hf_pretrained, "state", {})
        name = "maybe_modify_converted_hf_weight"
        self.owner = next(base.__name__ for base in type(self._model_bridge).__mro__ if name in vars(base))

    def may_change(self, task: Any, facts: TaskFacts, manifest: Catalog) -> bool:
        """Whether it gives other tensors for this task than those it is given. A hook that needs their values may."""
        if self.owner == "MegatronModelBridge":
            return False
        given = {
            name: torch.empty(manifest[name].shape, dtype=DTYPES[manifest[name].dtype], device="meta")
            for name in facts.targets.values()
        }
        try:
            returned = self._model_bridge.maybe_modify_converted_hf_weight(task, dict(given), self._state)
            return any(returned.get(name) is not tensor for name, tensor in given.items())
        except Exception:  # whatever a model's bridge raises on tensors without values
            return True


def _unmapped(chunks: Sequence[torch.nn.Module], tasks: Sequence[Any]) -> dict[str, str]:
    """Local parameters and persistent buffers that no task carries.

    Raises:
        RejectedError: adapters are attached.
    """
    carried = {(task.vp_stage or 0, task.param_name) for task in tasks if task is not None and task.param_weight is not None}
    found: dict[str, str] = {}
    for chunk, model in enumerate(chunks):
        for name, _ in local_names(model):
            if _ADAPTER in name:
                raise RejectedError(
                    f"parameter {name}: adapters are attached, so the checkpoint's weights are sums that exist nowhere in "
                    "memory. Merge them before the publisher is made"
                )
            if (chunk, name) not in carried:
                found[_shown(name, chunk, chunks)] = "Bridge has no checkpoint tensor for it"
    return found


def local_names(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers of a chunk, under the names that Bridge's tasks use."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and "_extra_state" not in name:
            yield unwrapped(name), tensor


def unwrapped(name: str) -> str:
    """Without the prefixes of Megatron's wrappers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _add_tied_copies(
    bridge: Any,
    tasks: Sequence[Any],
    chunks: Sequence[torch.nn.Module],
    manifest: Catalog,
    hook: _Hook,
    held: dict[int, Held],
    unmapped: dict[str, str],
) -> None:
    """An output head on the last pipeline stage that copies the first stage's embedding is a replica of it.

    Bridge leaves it out. Listed under the embedding's own task it is compared with the embedding, and may own it.
    """
    embeddings = [
        (place, task)
        for place, task in enumerate(tasks)
        if task is not None and task.param_weight is None and task.global_param_name.endswith(_EMBEDDING)
    ]
    for place, task in embeddings:
        for chunk, model in enumerate(chunks):
            for name, tensor in local_names(model):
                module = _module_of(model, name) if name.endswith(_OUTPUT) else None
                if module is None or not _is_tied(getattr(module, "config", None)):
                    continue
                head = replace(task, param_name=name, vp_stage=chunk, megatron_module=module, param_weight=tensor)
                held[place] = _held(bridge, head, manifest, hook)
                unmapped.pop(_shown(name, chunk, chunks), None)


def _shown(name: str, chunk: int, chunks: Sequence[torch.nn.Module]) -> str:
    return name if len(chunks) == 1 else f"{name} of chunk {chunk}"


def _module_of(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """The module that holds a parameter, looked for behind the wrappers."""
    path, _, _ = name.rpartition(".")
    modules: dict[str, torch.nn.Module] = {unwrapped(found): module for found, module in model.named_modules()}
    if path in modules:
        return modules[path]
    raise RejectedError(f"parameter {name}: no module {path} in {type(model).__name__}")
