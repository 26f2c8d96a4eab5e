"""The tiny policy of the kill matrix, its rollout model, and a hash of everything a rollout holds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

__all__ = ["Policy", "Rollout", "perturb", "state_hash"]

_LAYERS = 6
_ROWS, _COLUMNS = 16, 24


class Policy(torch.nn.Module):
    """Six layers and a buffer that checkpoints carry."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for number in range(_LAYERS):
            weight = torch.randn(_ROWS, _COLUMNS, generator=generator).bfloat16()
            self.register_parameter(f"layer{number}", torch.nn.Parameter(weight, requires_grad=False))
        self.register_buffer("scale", torch.ones(8))


class Rollout(torch.nn.Module):
    """All layers in two flat storages, loaded by name as engines do."""

    scale: torch.Tensor

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        half = _LAYERS // 2
        for name in ("low", "high"):
            flat = torch.zeros(half * _ROWS * _COLUMNS, dtype=torch.bfloat16)
            self.register_parameter(name, torch.nn.Parameter(flat, requires_grad=False))
        self.register_buffer("scale", torch.zeros(8))
        self.load_weights(policy.state_dict().items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self._home(name).copy_(tensor)

    def _home(self, name: str) -> torch.Tensor:
        if name == "scale":
            return self.scale
        number = int(name.removeprefix("layer"))
        flat = self.get_parameter("low" if number < _LAYERS // 2 else "high").data
        start = number % (_LAYERS // 2) * _ROWS * _COLUMNS
        return flat[start : start + _ROWS * _COLUMNS].view(_ROWS, _COLUMNS)


def perturb(policy: Policy, seed: int) -> None:
    """One training step: some elements of every tensor move."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in policy.state_dict().values():
        chosen = torch.rand(tensor.shape, generator=generator) < 0.1
        chosen.view(-1)[seed % chosen.numel()] = True
        tensor[chosen] = (tensor[chosen].float() * 1.02 + 0.01).to(tensor.dtype)


def state_hash(module: torch.nn.Module) -> str:
    """32 hex digits over the raw bytes of every parameter and buffer."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
