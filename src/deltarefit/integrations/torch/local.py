"""The tensors of a torch module as stable facts, and their bits as they are now."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from deltarefit.bits import dtype_name, storage_id, storage_view, storage_words
from deltarefit.canonical import Words
from deltarefit.errors import RejectedError
from deltarefit.pieces import Piece, StridedView
from deltarefit.source import onto_shard, onto_view

__all__ = [
    "LocalTensor",
    "Shard",
    "ShardOf",
    "check_same_tensors",
    "check_same_ties",
    "clean_name",
    "is_in_host_memory",
    "is_sharded",
    "local_part",
    "local_tensors",
    "own_tensors",
    "refuse_shards",
    "same_memory",
    "unwrap",
]

_WRAPPER_PARTS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Path components that torch.compile, FSDP1 and activation checkpointing put into names; the checkpoint has none of them."""


def clean_name(name: str) -> str:
    """A parameter's name as the unwrapped model would spell it."""
    return _WRAPPER_PARTS.sub("", name)


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside data-parallel and compile wrappers."""
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a tensor a rank holds."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    held: tuple[tuple[tuple[int, int], ...], ...]
    """Per dimension the intervals of the whole tensor that the shard holds, in its own order."""

    @property
    def label(self) -> str:
        """Equal for equal parts only."""
        return ",".join("+".join(f"{start}:{stop}" for start, stop in intervals) or "-" for intervals in self.held)


ShardOf = Callable[[str, torch.Tensor], Shard | None]
"""Says which part of the named tensor this rank holds; None if all of it."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalTensor:
    """A parameter or persistent buffer, found again in its model each time, because trainers rebind parameters and modules."""

    name: str
    model: torch.nn.Module
    path: str
    """Of the module that has it, as the model spells it."""
    attribute: str
    dtype: torch.dtype
    view: StridedView
    """Where this rank's elements lie in their storage."""
    shard: Shard | None
    """None if this rank holds the whole tensor."""
    is_dtensor: bool = False
    """Whether the parameter itself knows that it is a shard."""
    shard_seen: list[Any] = field(default_factory=list, repr=False)
    """The parameter itself, as ``live`` saw it last, if it is a DTensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.view.shape if self.shard is None else self.shard.shape

    def place(self, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
        """This rank's part of pieces that address the whole tensor as row-major, on its storage."""
        if self.shard is None:
            return onto_view(pieces, self.view)
        return onto_shard(pieces, self.shard.shape, self.shard.held, self.view)

    def registered(self) -> Any:
        """The parameter or buffer itself, as the model has it now.

        Raises:
            RejectedError: it has none by that name any more.
        """
        try:
            found = getattr(self.model.get_submodule(self.path), self.attribute)
        except AttributeError:
            found = None
        if not isinstance(found, torch.Tensor):
            raise RejectedError(
                f"tensor {self.name}: is not in the model any more; expected its tensors to be those it had when the publisher "
                "was made. Make a new publisher after changing the model"
            )
        return found

    def tensor(self) -> Any:
        """What it holds now."""
        return self.registered().detach()

    def whole_tensor(self) -> torch.Tensor:
        """A copy of the whole tensor. Collective over the ranks that share it if it is a DTensor."""
        found = self._found()
        self._part(found)
        return found.detach().full_tensor() if self.is_dtensor else found.detach().clone()  # type: ignore[no-any-return]

    def live(self) -> torch.Tensor:
        """This rank's part as it is now.

        Raises:
            RejectedError: it changed shape, strides or dtype, or was gathered, since its facts were read.
        """
        found = self.registered()
        if is_sharded(found) != self.is_dtensor:
            now = "gathered" if self.is_dtensor else "sharded"
            raise RejectedError(
                f"tensor {self.name}: is {now} now and was not when the publisher was made; expected shards to be as they are "
                "between steps. Reshard the module before the refit"
            )
        if self.is_dtensor:
            self.shard_seen[:] = [found]
        return self._part(found)

    def _found(self) -> Any:
        """What ``live`` reads, also while the module computes: what it gathers for that is a copy, its shard stays."""
        found = self.registered()
        return self.shard_seen[0] if self.shard_seen and not is_sharded(found) else found

    def _part(self, found: torch.Tensor) -> torch.Tensor:
        tensor = local_part(found.detach())
        if tensor.dtype != self.dtype or storage_view(tensor) != self.view:
            raise RejectedError(
                f"tensor {self.name}: is {tensor.dtype} with {storage_view(tensor)}, was {self.dtype} with {self.view} when "
                "the publisher was made; expected layout and dtype to stay. Make a new publisher after changing the model"
            )
        _check_stored(self.name, tensor)
        return tensor

    def words(self, first: int, count: int, dtype: torch.dtype) -> Words:
        """Bits of ``count`` elements from position ``first`` of the storage, each cast to ``dtype``.

        A view of the parameter where it is in host memory and of that dtype, else a host copy.
        """
        tensor = self._part(self._found())
        part = tensor.as_strided((count,), (1,), first).to(dtype)
        if not is_in_host_memory(tensor):
            return host_copy(part)
        start = part.storage_offset()
        return storage_words(part)[start : start + count]

    def packed_words(self, views: Sequence[StridedView], dtype: torch.dtype) -> Words:
        """Bits of the elements of views on the storage, one view behind another, each cast to ``dtype``. Always a copy."""
        tensor = self._part(self._found())
        packed = torch.empty(sum(view.num_elements for view in views), dtype=dtype, device=tensor.device)
        start = 0
        for view in views:
            place = packed[start : start + view.num_elements].view(view.shape)
            place.copy_(tensor.as_strided(view.shape, view.stride, view.offset))
            start += view.num_elements
        return storage_words(packed) if is_in_host_memory(tensor) else host_copy(packed)


def is_in_host_memory(tensor: torch.Tensor) -> bool:
    """Whether its words can be read where they lie."""
    return tensor.device.type == "cpu"


def host_copy(part: torch.Tensor) -> Words:
    """The words of a contiguous tensor on an accelerator, copied into pinned memory where there is such a thing."""
    # The allocator of pinned memory keeps freed blocks, so repeated scans reuse a few buffers.
    host = torch.empty(part.numel(), dtype=part.dtype, device="cpu", pin_memory=part.device.type == "cuda")
    host.copy_(part)
    return storage_words(host)[: part.numel()]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. They are told by what they offer, so that importing torch.distributed.tensor is not needed."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or what this rank holds of a DTensor."""
    sharded: Any = tensor
    return sharded.to_local().detach() if is_sharded(tensor) else tensor


def refuse_shards(name: str, tensor: torch.Tensor) -> Shard | None:
    """The ``ShardOf`` of models that every rank holds whole."""
    if is_sharded(tensor):
        raise RejectedError(
            f"tensor {name} is a DTensor: the adapter for plain modules sees one shard only; use the fsdp adapter "
            "(deltarefit.integrations.fsdp)"
        )
    return None


def local_tensors(
    model: torch.nn.Module, shard_of: ShardOf = refuse_shards, *, needs_data: bool = True
) -> dict[str, LocalTensor]:
    """Every parameter and persistent buffer under its clean name, aliases included, in module order.

    Without ``needs_data``, tensors on the meta device are taken too: their facts can be read, their words cannot.

    Raises:
        RejectedError: a tensor is not materialised, sparse or a subclass that hides its storage, or ``shard_of`` refuses it.
    """
    found: dict[str, LocalTensor] = {}
    for name, path, attribute, tensor in _named_tensors(model):
        shard = shard_of(name, tensor)
        part = local_part(tensor)
        _check_plain(name, part, needs_data=needs_data)
        found[name] = LocalTensor(name, model, path, attribute, part.dtype, storage_view(part), shard, is_sharded(tensor))
    return found


def check_same_tensors(model: torch.nn.Module, tensors: Container[str]) -> None:
    """Refuse a model that has tensors beside those that were read: no receiver would ever get them.

    Raises:
        RejectedError: it has; the text names some.
    """
    added = [name for name, *_ in _named_tensors(model) if name not in tensors]
    if added:
        raise RejectedError(
            f"tensor {', '.join(added[:3])}: {len(added)} tensors were added to the model since the publisher was made, and "
            "receivers have no place for them; expected its parameters and persistent buffers to stay the same. Make a new "
            "publisher after changing the model"
        )


def check_same_ties(tensors: Mapping[str, LocalTensor], ties: Iterable[tuple[str, str]]) -> None:
    """Refuse tensors that were one memory when they were read, and are not any more: only the second of each pair is sent.

    Raises:
        RejectedError: a pair came apart.
    """
    for name, sent in ties:
        if not same_memory(tensors[name].tensor(), tensors[sent]):
            raise RejectedError(
                f"tensor {name}: shared its memory with {sent} when the publisher was made, and does not now; what it holds "
                "would never be sent. Tie them again, or make a new publisher after changing the model"
            )


def same_memory(tensor: torch.Tensor, local: LocalTensor) -> bool:
    """Whether a tensor is a local tensor under another Python object."""
    live, tensor = local.live(), local_part(tensor)
    return storage_id(tensor) == storage_id(live) and tensor.dtype == local.dtype and storage_view(tensor) == local.view


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, str, str, torch.Tensor]]:
    """Clean name, module path, attribute and tensor of every parameter and persistent buffer, aliases included."""
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in own_tensors(module):
            yield clean_name(f"{path}.{attribute}" if path else attribute), path, attribute, tensor


def own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What of a module itself, without those inside it, is in checkpoints: parameters and persistent buffers."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    for attribute, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if attribute not in module._non_persistent_buffers_set:
            yield attribute, buffer


def _check_plain(name: str, tensor: torch.Tensor, *, needs_data: bool) -> None:
    if tensor.device.type == "meta" and needs_data:
        raise RejectedError(f"tensor {name} is on the meta device; expected materialised weights. Load the checkpoint first")
    if tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__"):
        raise RejectedError(
            f"tensor {name} is a {type(tensor).__name__} with layout {tensor.layout}: its stored bits are not one strided "
            "array. Write conversion tasks for it by hand"
        )
    _check_stored(name, tensor)
    try:
        dtype_name(tensor.dtype)
    except RejectedError as error:
        raise RejectedError(f"tensor {name}: {error}") from error


def _check_stored(name: str, tensor: torch.Tensor) -> None:
    # Such a view's elements are not what its storage holds: torch negates them whenever it reads them.
    if tensor.is_conj() or tensor.is_neg():
        raise RejectedError(
            f"tensor {name}: is a view that torch {'conjugates' if tensor.is_conj() else 'negates'} as it reads it; expected "
            "its bits to be stored. Call resolve_conj() and resolve_neg() on it first"
        )
