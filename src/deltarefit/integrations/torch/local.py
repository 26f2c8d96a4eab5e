"""The tensors of a torch module as stable facts, and their bits as they are now."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from deltarefit.bits import dtype_name, storage_id, storage_view, storage_words
from deltarefit.canonical import Words
from deltarefit.errors import RejectedError
from deltarefit.pieces import StridedView

__all__ = ["LocalTensor", "clean_name", "local_tensors", "unwrap"]

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


@dataclass(frozen=True, slots=True, eq=False)
class LocalTensor:
    """A parameter or persistent buffer, found again under its module each time, because trainers rebind them."""

    name: str
    module: torch.nn.Module
    attribute: str
    dtype: torch.dtype
    view: StridedView
    """Where its elements lie in its storage."""

    def live(self) -> torch.Tensor:
        """The tensor as it is now.

        Raises:
            RejectedError: it moved, or changed shape, strides or dtype, since its facts were read.
        """
        tensor = getattr(self.module, self.attribute).detach()
        if tensor.dtype != self.dtype or storage_view(tensor) != self.view:
            raise RejectedError(
                f"tensor {self.name}: is {tensor.dtype} with {storage_view(tensor)}, was {self.dtype} with {self.view} when "
                "the publisher was made; expected layout and dtype to stay. Make a new publisher after changing the model"
            )
        return tensor  # type: ignore[no-any-return]

    def words(self, first: int, count: int, dtype: torch.dtype) -> Words:
        """Bits of ``count`` elements from position ``first`` of the storage, each cast to ``dtype``.

        A view of the parameter where it is in host memory and of that dtype, else a host copy.
        """
        tensor = self.live()
        part = tensor.as_strided((count,), (1,), first).to(dtype)
        if tensor.device.type == "cpu":
            start = part.storage_offset()
            return storage_words(part)[start : start + count]
        # The allocator of pinned memory keeps freed blocks, so repeated scans reuse a few buffers.
        host = torch.empty(count, dtype=dtype, pin_memory=tensor.device.type == "cuda")
        host.copy_(part)
        return storage_words(host)[:count]


def local_tensors(model: torch.nn.Module) -> dict[str, LocalTensor]:
    """Every parameter and persistent buffer under its clean name, aliases included, in module order.

    Raises:
        RejectedError: a tensor is sharded, not materialised, sparse or a subclass that hides its storage.
    """
    found: dict[str, LocalTensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in _own_tensors(module):
            name = clean_name(f"{path}.{attribute}" if path else attribute)
            _check_plain(name, tensor)
            found[name] = LocalTensor(name, module, attribute, tensor.dtype, storage_view(tensor))
    return found


def same_memory(tensor: torch.Tensor, local: LocalTensor) -> bool:
    """Whether a tensor is a local tensor under another Python object."""
    live = local.live()
    return storage_id(tensor) == storage_id(live) and tensor.dtype == local.dtype and storage_view(tensor) == local.view


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    for attribute, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if attribute not in module._non_persistent_buffers_set:
            yield attribute, buffer


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    if hasattr(tensor, "placements") and hasattr(tensor, "device_mesh"):
        raise RejectedError(
            f"tensor {name} is a DTensor: the adapter for plain modules sees one shard only; use the fsdp adapter "
            "(deltarefit.integrations.fsdp)"
        )
    if tensor.device.type == "meta":
        raise RejectedError(f"tensor {name} is on the meta device; expected materialised weights. Load the checkpoint first")
    if tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__"):
        raise RejectedError(
            f"tensor {name} is a {type(tensor).__name__} with layout {tensor.layout}: its stored bits are not one strided "
            "array. Write conversion tasks for it by hand"
        )
    dtype_name(tensor.dtype)
