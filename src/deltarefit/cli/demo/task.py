"""The toy task: complete a prompt with even token ids. Anyone can check the reward by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

__all__ = ["advantages", "prompts", "reward"]

PROMPT_TOKENS = 6
COMPLETION_TOKENS = 12
GROUP = 4
"""Completions per prompt; their mean reward is the baseline (GRPO)."""


def prompts(rng: random.Random, count: int, vocab_size: int) -> list[list[int]]:
    """Random prompts; the first tokens of the vocabulary are special and left out."""
    return [[rng.randrange(3, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def reward(completion: Sequence[int]) -> float:
    """The share of even token ids among the completion's tokens, 0 to 1."""
    return sum(token % 2 == 0 for token in completion) / len(completion) if completion else 0.0


def advantages(rewards: Sequence[float]) -> list[float]:
    """Each reward against its group: (reward - mean) / standard deviation, zero where all are equal."""
    mean = sum(rewards) / len(rewards)
    spread = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [(r - mean) / spread if spread > 0 else 0.0 for r in rewards]
