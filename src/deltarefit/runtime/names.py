"""Names under a run that both sides know."""

from __future__ import annotations

__all__ = ["COORDINATOR", "coordinator_mailbox"]

COORDINATOR = "coordinator"
"""Name of the coordinator's beacon, and the stem of its mailbox's name."""


def coordinator_mailbox(epoch: int) -> str:
    """Each coordinator has a mailbox of its own, so that nothing meant for an earlier one reaches it."""
    return f"{COORDINATOR}-{epoch}"
