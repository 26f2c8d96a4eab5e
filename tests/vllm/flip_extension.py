"""What a vLLM worker can be asked to spoil, by rank: ``worker_extension_cls="flip_extension.FlipExtension"``."""

from __future__ import annotations


class FlipExtension:
    """Mixed into vLLM's worker class."""

    def flip_bit(self, rank: int, name: str, row: int) -> None:
        """Flip the lowest bit of the first byte in a row of a parameter, on one rank only."""
        import torch

        if self.parallel_config.rank == rank:
            parameter = dict(self.model_runner.get_model().named_parameters())[name]
            parameter.detach()[row].view(-1).view(torch.uint8)[0] ^= 1
