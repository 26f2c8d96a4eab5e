"""What the demo trains, in three frameworks behind one face: whole models, FSDP2 shards, Megatron with its experts spread."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = ["SOURCES", "Trained", "open_trained"]

SOURCES: tuple[str, ...] = ("torch", "fsdp", "megatron")


class Trained(Protocol):
    """A model in training on one rank."""

    model: Any
    """What a Publisher is given."""
    options: Mapping[str, Any]
    """What else it is given."""
    note: str

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of the next token at each position, [batch, positions, vocabulary], float32, for this rank's share."""

    def step(self) -> None:
        """Reduce gradients over ranks and take one optimizer step."""

    def save(self, directory: Path) -> None:
        """Write the present weights as a checkpoint, by the framework's own means. Every rank must call it."""


def open_trained(source: str, checkpoint: str, learning_rate: float) -> Trained:
    """The checkpoint's model, ready to train, in this process group."""
    kinds: Mapping[str, Callable[[Path, float], Trained]] = {"torch": _Plain, "fsdp": _Sharded, "megatron": _Megatron}
    return kinds[source](Path(checkpoint), learning_rate)


def _adamw(parameters: Iterable[torch.nn.Parameter], learning_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(list(parameters), lr=learning_rate, betas=(0.9, 0.999), weight_decay=0.0)


def _transformers_model(checkpoint: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, experts_implementation="eager", attn_implementation="eager"
    ).train()


class _MasterAdamW:
    """AdamW on 32-bit master weights behind 16-bit parameters, as RL trainers keep them.

    Updates far below one bf16 step add up in the master instead of being lost, so that a step changes about 1 % of the stored
    values (measured: 0.8 to 1.8 % at a learning rate of 1e-6).
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], learning_rate: float, *, clips: bool) -> None:
        self._parameters = list(parameters)
        self._masters = [parameter.detach().float().clone() for parameter in self._parameters]
        self._optimizer = _adamw(self._masters, learning_rate)  # type: ignore[arg-type]
        self._clips = clips

    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        if self._clips:
            torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.copy_(master)


def _average(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Average gradients over all ranks, so that copies stay bitwise equal."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


class _Plain:
    """A whole transformers model on each rank."""

    note = "bf16, whole on each rank"

    def __init__(self, checkpoint: Path, learning_rate: float) -> None:
        self.model: Any = _transformers_model(checkpoint, torch.bfloat16)
        self.options: Mapping[str, Any] = {}
        self._optimizer = _MasterAdamW(self.model.parameters(), learning_rate, clips=True)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits.float()  # type: ignore[no-any-return]

    def step(self) -> None:
        _average(self.model.parameters())
        self._optimizer.step()

    def save(self, directory: Path) -> None:
        if dist.get_rank() == 0:
            self.model.save_pretrained(directory)


class _Sharded:
    """FSDP2 shards of a transformers model in 32 bits, published in the checkpoint's 16."""

    note = "FSDP2 shards in 32 bits, published in bf16"

    def __init__(self, checkpoint: Path, learning_rate: float) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.model: Any = _transformers_model(checkpoint, torch.float32)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in (*self.model.model.layers, self.model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        self.options: Mapping[str, Any] = {"manifest": checkpoint}
        self._checkpoint = checkpoint
        self._optimizer = _adamw(self.model.parameters(), learning_rate)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits.float()  # type: ignore[no-any-return]

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self, directory: Path) -> None:
        gathered = {name: tensor.full_tensor().to(torch.bfloat16) for name, tensor in self.model.state_dict().items()}
        if dist.get_rank() == 0:
            plain = _transformers_model(self._checkpoint, torch.bfloat16)
            plain.load_state_dict(gathered)
            plain.save_pretrained(directory)


class _Megatron:
    """A Megatron model of which each rank holds its share of the experts and a copy of the rest, on the CPU."""

    note = "Megatron, experts over all ranks, the rest copied"

    def __init__(self, checkpoint: Path, learning_rate: float) -> None:
        from deltarefit.testing import megatron_cpu

        sizes = {"expert_model_parallel_size": dist.get_world_size()}
        self._bridge, chunks = megatron_cpu.make_model(checkpoint, sizes=sizes, settings={"parallel_output": False})
        self.model: Any = chunks
        self.options: Mapping[str, Any] = {"bridge": self._bridge}
        self._checkpoint = checkpoint
        self._chunk: Any = chunks[0].train()
        # Ranks clip by different norms, as each has experts of its own; copies would drift apart.
        self._optimizer = _MasterAdamW(self._chunk.parameters(), learning_rate, clips=False)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        positions = torch.arange(length)[None].expand(len(tokens), -1)
        hidden = torch.triu(torch.ones(length, length), 1).bool()[None, None]
        return self._chunk(input_ids=tokens, position_ids=positions, attention_mask=hidden).float()  # type: ignore[no-any-return]

    def step(self) -> None:
        _average(self._copied())
        self._optimizer.step()

    def _copied(self) -> Iterator[torch.nn.Parameter]:
        """Parameters that every rank has; Megatron marks the experts."""
        return (parameter for parameter in self._chunk.parameters() if getattr(parameter, "allreduce", True))

    def save(self, directory: Path) -> None:
        from safetensors.torch import save_file

        exported = self._bridge.export_hf_weights(self.model, cpu=True, show_progress=False)
        tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in exported}
        if dist.get_rank() == 0:
            directory.mkdir(parents=True)
            save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
            shutil.copy(self._checkpoint / "config.json", directory)
