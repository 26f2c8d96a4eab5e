"""Experts that move between slots while an engine serves."""

from __future__ import annotations

from typing import Any

from deltarefit.errors import RejectedError

__all__ = ["check_experts"]


def check_experts(parallel_config: Any) -> None:
    """Refuse an engine that moves its experts.

    vLLM's loaders put experts where they lay at the start, whatever was moved since then: a refit through them, as a reload,
    would overwrite experts with the weights of others.

    Raises:
        RejectedError: with what to do.
    """
    if getattr(parallel_config, "enable_eplb", False):
        raise RejectedError(
            "vLLM moves experts between slots while it serves (enable_eplb), and its loader goes by the slots of the start: a "
            "refit would put weights of one expert into the slots of another. Start vLLM without --enable-eplb"
        )
