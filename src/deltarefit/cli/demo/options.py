"""What the demo's parent tells its processes when it starts them."""

from __future__ import annotations

import msgspec

__all__ = ["RolloutOptions", "TrainerOptions"]


class TrainerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    """The framework: torch, fsdp or megatron."""
    checkpoint: str
    run: str
    rendezvous: str
    """A file that the ranks of the process group meet at."""
    learning_rate: float
    min_receivers: int
    threads: int
    lease_s: float


class RolloutOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    engine: str
    checkpoint: str
    run: str
    """Empty for the oracle, which joins no run."""
    completion_tokens: int
    threads: int
    lease_s: float
