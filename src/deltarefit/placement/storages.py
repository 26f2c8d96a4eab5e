"""The storages behind a model's parameters and buffers: who owns an address, and did anything move."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deltarefit.bits import dtype_name
from deltarefit.errors import RejectedError

__all__ = ["ModelStorage", "StorageMap", "state_tensors"]


def state_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by every name it has, aliases included."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


@dataclass(frozen=True, slots=True, eq=False)
class ModelStorage:
    """One storage that parameters or buffers live in."""

    key: str
    """The first name, in the model's order, of a tensor that lies in it. Names the storage in reports."""
    names: tuple[str, ...]
    """All names of tensors that lie in it."""
    raw: torch.UntypedStorage
    """Kept, so that the address stays taken as long as anybody may write to it."""
    nbytes: int
    device: torch.device

    @property
    def address(self) -> int:
        return self.raw.data_ptr()

    def words(self, width: int) -> torch.Tensor:
        """All whole words of ``width`` bytes as a flat integer tensor over the same memory, on the storage's device."""
        dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
        flat = torch.empty(0, dtype=dtype, device=self.device)
        return flat.set_(self.raw, 0, (self.nbytes // width,), (1,))


class StorageMap:
    """Finds the storage that holds an address. Built once for a model; costs nothing per canonical name."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        found: dict[int, tuple[torch.UntypedStorage, torch.device, list[str]]] = {}
        for name, tensor in tensors.items():
            if tensor.device.type == "meta":
                raise RejectedError(
                    f"tensor {name} of the model is on the meta device; load the model before its receiver starts"
                )
            if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
                raise RejectedError(f"tensor {name} of the model is a {type(tensor).__name__}; expected plain strided storage")
            dtype_name(tensor.dtype)
            raw = tensor.untyped_storage()
            if raw.nbytes():
                found.setdefault(raw.data_ptr(), (raw, tensor.device, []))[2].append(name)
        self.storages = tuple(
            ModelStorage(names[0], tuple(names), raw, raw.nbytes(), device) for raw, device, names in found.values()
        )
        self._by_address = {storage.address: storage for storage in self.storages}
        self._ordered = sorted(self.storages, key=lambda storage: storage.address)
        self._addresses = [storage.address for storage in self._ordered]
        self._require_apart()

    def _require_apart(self) -> None:
        for before, after in zip(self._ordered, self._ordered[1:], strict=False):
            if before.address + before.nbytes > after.address and before.device == after.device:
                raise RejectedError(
                    f"storages of {before.key} and {after.key} overlap in memory without being one storage; "
                    "give both tensors views of one torch storage"
                )

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in self.storages)

    def find(self, tensor: torch.Tensor) -> tuple[ModelStorage, int] | None:
        """The model storage that holds a tensor's storage, and the byte in it where the tensor's storage begins.

        A foreign storage laid over model memory (``from_numpy``, DLPack) is found too.
        """
        raw = tensor.untyped_storage()
        address = raw.data_ptr()
        exact = self._by_address.get(address)
        if exact is not None:
            return exact, 0
        if not address:
            return None
        place = bisect.bisect_right(self._addresses, address) - 1
        if place >= 0:
            storage = self._ordered[place]
            if address < storage.address + storage.nbytes and storage.device == tensor.device:
                return storage, address - storage.address
        return None
