"""A rollout engine for machines without vLLM: a transformers model behind a loader that fuses and slices as engines do.

It generates slowly, but its weights arrive exactly as a real engine's: checkpoint tensors one by one, each expert's gate and up
projections copied into slices of one stacked parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

__all__ = ["FusingLoader", "TorchEngine"]

_EXPERT = re.compile(r"(?P<prefix>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")


class FusingLoader:
    """Loads checkpoint tensors, given in any order and any grouping, into a model with stacked experts."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        with torch.no_grad():
            for name, tensor in weights:
                self._home(name).copy_(tensor)
                loaded.add(name)
        return loaded

    def _home(self, name: str) -> torch.Tensor:
        """The view that this checkpoint tensor belongs in."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return self._parameters[name]
        expert = int(match["expert"])
        if match["part"] == "down":
            return self._parameters[f"{match['prefix']}.down_proj"][expert]
        gate, up = self._parameters[f"{match['prefix']}.gate_up_proj"][expert].chunk(2)
        return gate if match["part"] == "gate" else up


class TorchEngine:
    """Sampling and greedy decoding with a plain transformers model."""

    def __init__(self, checkpoint: str) -> None:
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(checkpoint)
        self.model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation="eager", attn_implementation="eager"
        ).eval()
        self.load_weights = FusingLoader(self.model)
        self.load_weights(load_file(f"{checkpoint}/model.safetensors").items())

    @torch.no_grad()
    def complete(
        self, prompts: Sequence[Sequence[int]], *, count: int, max_tokens: int, seed: int | None
    ) -> tuple[list[list[list[int]]], list[list[float]]]:
        """``count`` completions of each prompt and the log-probabilities of each prompt's first completion.

        ``seed=None`` decodes greedily.
        """
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        rows = torch.tensor([list(prompt) for prompt in prompts for _ in range(count)])
        start = rows.shape[1]
        logprobs = torch.zeros(len(rows), 0)
        for _ in range(max_tokens):
            scores = torch.log_softmax(self.model(input_ids=rows, use_cache=False).logits[:, -1].float(), dim=-1)
            if generator is None:
                chosen = scores.argmax(-1, keepdim=True)
            else:
                chosen = torch.multinomial(scores.exp(), 1, generator=generator)
            logprobs = torch.cat([logprobs, scores.gather(-1, chosen)], dim=-1)
            rows = torch.cat([rows, chosen], dim=-1)
        tokens = rows[:, start:].tolist()
        grouped = [tokens[i * count : (i + 1) * count] for i in range(len(prompts))]
        return grouped, logprobs[::count].tolist()
