"""What a model's checkpoint would contain, by which names, and how it comes from the module's own tensors.

For a transformers model this is what ``save_pretrained`` does: drop ignored keys, keep one name of tied weights, undo the
conversion that ``from_pretrained`` applied. For any other module the checkpoint is its ``state_dict``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from deltarefit import placement
from deltarefit.bits import dtype_name, storage_id
from deltarefit.canonical import TensorSpec
from deltarefit.errors import RejectedError
from deltarefit.integrations.torch.local import LocalTensor, clean_name, same_memory
from deltarefit.integrations.torch.watch import follow

__all__ = ["Convert", "ExportMap", "Exporter", "after", "exporter_of", "map_export"]

Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
_LAYER = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True, eq=False)
class Exporter:
    """How a model is exported."""

    kept: tuple[str, ...]
    """Module tensors that the checkpoint is made from."""
    aliases: Mapping[str, str]
    """Tied names that the checkpoint leaves out, to the kept name that is the same memory."""
    convert: Convert
    """From module names and tensors to checkpoint names and tensors. May change the tensors that it is given."""
    by_layer: bool
    """Whether the tensors of one layer may be converted without the others."""


@dataclass(frozen=True, slots=True, eq=False)
class ExportMap:
    """Where every element of every checkpoint tensor comes from."""

    specs: dict[str, TensorSpec]
    """Checkpoint tensors, by name."""
    placements: dict[str, placement.Parts]
    """Per checkpoint tensor, per module tensor it takes elements from: pieces onto that tensor taken as row-major."""
    opaque: dict[str, str]
    """Checkpoint tensors that are computed rather than rearranged, with the reason."""
    groups: dict[str, tuple[str, ...]]
    """Per opaque tensor, the module tensors that the exporter needs to compute it."""


def exporter_of(model: torch.nn.Module, tensors: Mapping[str, LocalTensor], *, merges_adapters: bool = False) -> Exporter:
    """The exporter of an unwrapped model with these tensors, adapters included if somebody will merge them.

    Raises:
        RejectedError: the model's state_dict holds tensors that are not its own memory, adapters are attached, or tied weights
            are tied in a way that its checkpoint cannot express.
    """
    state = _own_state(model, tensors)
    if not merges_adapters:
        _refuse_adapters(state)
    transformers_model = _transformers_class()
    if transformers_model is not None and isinstance(model, transformers_model):
        return _transformers_exporter(model, {name: _memory(tensors[name]) for name in state})
    kept: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name in state:
        first = kept.setdefault(_memory(tensors[name]), name)
        if first != name:
            aliases[name] = first
    return Exporter(tuple(kept.values()), aliases, lambda tensors: tensors, by_layer=True)


def after(exporter: Exporter, export: Convert, *, by_layer: bool) -> Exporter:
    """The exporter followed by a function of the user's."""
    return replace(exporter, convert=lambda tensors: export(exporter.convert(tensors)), by_layer=by_layer)


def map_export(
    exporter: Exporter, tensors: Mapping[str, LocalTensor], names: Sequence[str], *, check: bool = True
) -> ExportMap:
    """Find out where every element of the exporter's outputs comes from.

    Its operations are followed on tensors without data. What that explains is checked once per kind of layer on random bits;
    what it does not is traced with probes, a layer at a time where the exporter allows it. Without ``check`` nothing is run on
    data; names and shapes are right then, placements are unproved and some may be missing.

    Raises:
        RejectedError: it gives other tensors for a layer alone than for the whole, or reads tensors of several layers.
    """
    shapes = {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta") for name in names}
    followed = follow(exporter.convert, shapes)
    found = ExportMap(followed.specs, dict(followed.placements), {}, {})
    if not check:
        return found
    idle = {followed.placements[name][0][0] for name in followed.untouched}
    batches = _layers(name for name in names if name not in idle) if exporter.by_layer else [tuple(names)]
    unknown = set(found.specs) - set(found.placements)
    if not unknown:
        _verify_batches(exporter, tensors, batches, found, followed.untouched)
        return found
    known: dict[_Fingerprint, _TracedBatch] = {}
    for batch in batches:
        fingerprint = _fingerprint(batch, shapes)
        guess = known[fingerprint].renamed(batch) if fingerprint in known else None
        known.setdefault(fingerprint, _TracedBatch(batch, _trace_batch(exporter, shapes, batch, guess, found)))
    if missing := sorted(set(found.specs) - set(found.placements) - set(found.opaque)):
        raise RejectedError(f"export of {', '.join(missing[:3])} reads tensors of several layers; cannot be traced by layer")
    return found


def _verify_batches(
    exporter: Exporter,
    tensors: Mapping[str, LocalTensor],
    batches: Sequence[tuple[str, ...]],
    found: ExportMap,
    untouched: AbstractSet[str],
) -> None:
    """Check what was followed on random bits, on the first of every kind of layer."""
    outputs: dict[str, list[str]] = {}
    for name, parts in found.placements.items():
        if name not in untouched:
            outputs.setdefault(parts[0][0], []).append(name)
    seen = set()
    for batch in batches:
        placements = {name: found.placements[name] for source in batch for name in outputs.get(source, ())}
        kind = _fingerprint(batch, tensors)
        if not placements or kind in seen:
            continue
        seen.add(kind)
        specs = [TensorSpec(source, dtype_name(tensors[source].dtype), tensors[source].shape) for source in batch]
        wrong = placement.verify_placements(exporter.convert, specs, placements)
        if wrong is not None:
            raise RejectedError(f"export of {wrong}: random bits do not arrive where its operations lead; cannot be mapped")


_Fingerprint = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


class _HasShape(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...


def _fingerprint(batch: Sequence[str], tensors: Mapping[str, _HasShape]) -> _Fingerprint:
    """Equal for layers of one kind: names within the layer, shapes and dtypes, in order."""
    return tuple((_LAYER.sub("", name), tuple(tensors[name].shape), tensors[name].dtype) for name in batch)


@dataclass(frozen=True, slots=True)
class _TracedBatch:
    """What tracing found out about the tensors of one layer."""

    batch: tuple[str, ...]
    traced: placement.TracedConversion

    def renamed(self, batch: tuple[str, ...]) -> placement.TracedConversion:
        """The same of another layer with this one's fingerprint: a guess, as long as nobody looked at that layer."""
        sources = dict(zip(self.batch, batch, strict=True))
        mine, other = (_LAYER.match(names[0]) for names in (self.batch, batch))
        old, new = (match[1].rpartition(".")[2] if match else "" for match in (mine, other))
        number = re.compile(rf"(?<![^.]){old}(?![^.])")
        names = {name: number.sub(new, name, count=1) for name in self.traced.specs}
        return placement.TracedConversion(
            {
                names[name]: tuple((sources[source], pieces) for source, pieces in parts)
                for name, parts in self.traced.placements.items()
            },
            {names[name]: number.sub(new, reason) for name, reason in self.traced.opaque.items()},
            {names[name]: replace(spec, name=names[name]) for name, spec in self.traced.specs.items()},
            tuple(sources[source] for source in self.traced.unread),
        )


def _trace_batch(
    exporter: Exporter,
    shapes: Mapping[str, torch.Tensor],
    batch: tuple[str, ...],
    guess: placement.TracedConversion | None,
    found: ExportMap,
) -> placement.TracedConversion:
    """Trace one layer into ``found``."""
    try:
        traced = placement.trace_conversion(exporter.convert, {name: shapes[name] for name in batch}, guess=guess)
    except KeyError as error:  # what an export raises that looks for a tensor of another layer
        raise RejectedError(
            f"export of {', '.join(batch[:3])} on its own: KeyError: {error}; it needs tensors of other layers"
        ) from error
    for name, spec in traced.specs.items():
        if found.specs.get(name) != spec:
            raise RejectedError(
                f"export of {', '.join(batch[:3])}: gives {spec} on its own, {found.specs.get(name)} as part of the model; "
                "expected layers to be converted independently"
            )
    found.placements.update(traced.placements)
    found.opaque.update(traced.opaque)
    found.groups.update(dict.fromkeys(traced.opaque, batch))
    return traced


def _layers(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Names grouped by what stands before and in their first numbered component."""
    groups: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.match(name)
        groups.setdefault(match[1] if match else "", []).append(name)
    return [tuple(group) for group in groups.values()]


def _own_state(model: torch.nn.Module, tensors: Mapping[str, LocalTensor]) -> dict[str, torch.Tensor]:
    """The model's state_dict under clean names, checked to be the module's own memory."""
    state = {}
    for raw, tensor in model.state_dict().items():
        name = clean_name(raw)
        if name.endswith("_extra_state") or not isinstance(tensor, torch.Tensor):
            continue
        if name not in tensors or not same_memory(tensor, tensors[name]):
            raise RejectedError(
                f"tensor {name}: the model's state_dict returns something other than its own parameter or buffer; "
                "expected no state_dict hook that changes values"
            )
        state[name] = tensor
    return state


def _refuse_adapters(state: Mapping[str, torch.Tensor]) -> None:
    for name in state:
        if ".base_layer." in name or ".lora_" in name:
            raise RejectedError(
                f"tensor {name}: adapters are attached, so the checkpoint's weights are sums that exist nowhere in memory. "
                "Merge them, or give the adapter an export function that does"
            )


def _memory(local: LocalTensor) -> object:
    """Equal for tensors that are the same elements. What is empty here has no memory; there, one object is one tensor."""
    tensor = local.live()
    if not tensor.numel() or tensor.device.type == "meta":
        return id(local.registered())
    return storage_id(tensor), local.view, local.dtype


def _transformers_class() -> Any:
    """PreTrainedModel, if the caller's process uses transformers at all."""
    return getattr(sys.modules.get("transformers"), "PreTrainedModel", None)


def _transformers_exporter(model: Any, memory: Mapping[str, object]) -> Exporter:
    """The exporter of a transformers model with these tensors and what memory each has."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    if getattr(model, "hf_quantizer", None) is not None:
        raise RejectedError(
            f"{type(model).__name__} is quantised: its checkpoint is computed from packed parameters. "
            "Publish the unquantised model, or write conversion tasks by hand"
        )
    ignored = model._keys_to_ignore_on_save or ()
    memory = {name: where for name, where in memory.items() if name not in ignored}
    # transformers finds ties by comparing addresses; one small tensor per memory tells it the same and copies nothing.
    stand_ins: dict[object, torch.Tensor] = {where: torch.empty(1, device="cpu") for where in memory.values()}
    try:
        kept = remove_tied_weights_from_state_dict({name: stand_ins[where] for name, where in memory.items()}, model)
    except RuntimeError as error:
        raise RejectedError(f"{type(model).__name__}: transformers cannot save it: {error}") from error
    by_memory = {memory[name]: name for name in kept}
    aliases = {name: by_memory[where] for name, where in memory.items() if name not in kept}
    return Exporter(tuple(kept), aliases, lambda tensors: revert_weight_conversion(model, dict(tensors)), by_layer=True)
