"""The training job's process group, as the source side asks for it: bytes in, bytes out, no pickled objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch

from deltarefit.errors import RejectedError, TransportError
from deltarefit.source import Collective, LocalCollective

__all__ = ["TorchCollective", "default_collective"]

ResultT = TypeVar("ResultT")

_MOST_NBYTES = 2**32  # of one rank's message: claims of a million shards take about 50 MB


class TorchCollective:
    """``Collective`` over a ``torch.distributed`` process group; the default group if none is given.

    Its errors arrive as TransportError. How long a call waits is the group's own timeout.
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise RejectedError("torch.distributed is not initialised; expected init_process_group before a TorchCollective")
        self._dist = dist
        self._group = group
        backend = str(dist.get_backend(group)) if group is not None else str(dist.get_backend_config())
        self._device = torch.device("cpu" if "gloo" in backend or "mpi" in backend else "cuda")

    @property
    def rank(self) -> int:
        return int(self._dist.get_rank(self._group))

    @property
    def world_size(self) -> int:
        return int(self._dist.get_world_size(self._group))

    def all_gather(self, data: bytes) -> list[bytes]:
        return self._guarded("all_gather", lambda: self._all_gather(data))

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        if (data is None) == (self.rank == root):
            raise RejectedError(f"broadcast from rank {root}: expected data there and None on the others, on rank {self.rank}")
        return self._guarded("broadcast", lambda: self._broadcast(data, root))

    def all_to_all(self, data: Sequence[bytes]) -> list[bytes]:
        if len(data) != self.world_size:
            raise RejectedError(f"all_to_all of {len(data)} messages in a world of {self.world_size} ranks")
        return self._guarded("all_to_all", lambda: self._all_to_all(data))

    def barrier(self) -> None:
        self._guarded("barrier", lambda: self._dist.barrier(group=self._group))

    def close(self) -> None:
        """Give up a group that was made for this object; the default group stays."""
        if self._group is not None:
            self._dist.destroy_process_group(self._group)

    def _all_gather(self, data: bytes) -> list[bytes]:
        length = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        lengths = [torch.empty_like(length) for _ in range(self.world_size)]
        self._dist.all_gather(lengths, length, group=self._group)
        sizes = [int(one.item()) for one in lengths]
        _check_lengths(sizes)
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self._device)
        padded[: len(data)] = _to_tensor(data)
        gathered = [torch.empty_like(padded) for _ in sizes]
        if padded.numel():
            self._dist.all_gather(gathered, padded, group=self._group)
        return [_to_bytes(one[:size]) for one, size in zip(gathered, sizes, strict=True)]

    def _all_to_all(self, data: Sequence[bytes]) -> list[bytes]:
        """Point to point: not every backend has an all_to_all of its own."""
        mine = torch.tensor([len(message) for message in data], dtype=torch.int64, device=self._device)
        lengths = [torch.empty_like(mine) for _ in data]
        self._dist.all_gather(lengths, mine, group=self._group)
        sizes = [int(one[self.rank].item()) for one in lengths]
        _check_lengths(sizes)
        incoming = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        operations = []
        for peer in range(self.world_size):
            if peer == self.rank:
                continue
            where = peer if self._group is None else int(self._dist.get_global_rank(self._group, peer))
            if sizes[peer]:
                operations.append(self._dist.P2POp(self._dist.irecv, incoming[peer], where, self._group))
            if data[peer]:
                message = _to_tensor(data[peer]).to(self._device)
                operations.append(self._dist.P2POp(self._dist.isend, message, where, self._group))
        for work in self._dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return [data[peer] if peer == self.rank else _to_bytes(one) for peer, one in enumerate(incoming)]

    def _broadcast(self, data: bytes | None, root: int) -> bytes:
        source = root if self._group is None else int(self._dist.get_global_rank(self._group, root))
        length = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64, device=self._device)
        self._dist.broadcast(length, source, group=self._group)
        size = int(length.item())
        _check_lengths([size])
        message = (
            _to_tensor(data).to(self._device) if data is not None else torch.empty(size, dtype=torch.uint8, device=self._device)
        )
        if size:
            self._dist.broadcast(message, source, group=self._group)
        return data if data is not None else _to_bytes(message)

    def _guarded(self, call: str, action: Callable[[], ResultT]) -> ResultT:
        try:
            return action()
        except RuntimeError as error:  # what every backend of torch.distributed raises
            raise TransportError(
                f"{call} between {self.world_size} training ranks failed on rank {self.rank}: {error}"
            ) from error


def default_collective(timeout_s: float | None = None) -> Collective:
    """The default process group where there is one, else a world of one rank.

    With ``timeout_s`` a group of its own on the CPU (gloo), in which a call that a dead or frozen rank holds up fails after so
    long: NCCL's watchdog would end the whole process while rank 0 waits for receivers. Every rank must then call this.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return LocalCollective()
    if timeout_s is None:
        return TorchCollective()
    return TorchCollective(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))


def _check_lengths(sizes: list[int]) -> None:
    for rank, size in enumerate(sizes):
        if not 0 <= size <= _MOST_NBYTES:
            raise TransportError(f"message of {size} bytes from rank {rank}: expected at most {_MOST_NBYTES}")


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().numpy().tobytes())
