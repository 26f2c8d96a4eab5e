"""Settings of one rank's receiver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from deltarefit.checked import Count, Nbytes, check_fields

__all__ = ["ApplyPath", "ReceiverSettings"]


class ApplyPath(Enum):
    """How changed elements reach storage."""

    COMPILED = "compiled"
    """Straight to their addresses through pieces; the engine's loader only for tensors that fit no piece."""
    SCRATCH = "scratch"
    """Every item through a scratch tensor and the engine's loader, as in the paper (6.1). The plain twin."""


@dataclass(frozen=True, slots=True)
class ReceiverSettings:
    """How a rank receives. All have defaults that are right for an unpacked model."""

    path: ApplyPath = ApplyPath.COMPILED
    """How changed elements reach storage; both ways leave the same bits."""
    verify_writes: bool = False
    """Check every write after it was made (paper Fig. A.12)."""
    may_lack: tuple[str, ...] = ()
    """Patterns (as in file names) of parameters that no canonical tensor reaches, and that is right so."""
    may_be_empty: tuple[str, ...] = ()
    """Patterns of parameters of shape (0,) that were not emptied by weight packing."""
    layout_tag: str | Callable[[], str] = ""
    """Whatever else decides where the engine puts weights: its version, its options. A change asks for a new prewarm."""
    cross_check: Count = 16
    """Tensors whose learned pieces are compared at prewarm with what the loader does to random bits; 0 for none."""
    snapshot_nbytes: Nbytes = 256 * 2**20
    """A model up to this size is copied for the time of prewarm, so that a loader that writes behind the hook does no harm."""
    keep_nbytes: Nbytes = 64 * 2**20
    """Canonical copies kept of tensors whose values the loader computes, all together at most (``kept``)."""
    may_ignore: tuple[str, ...] = ()
    """Patterns of canonical tensors that the engine's post-load step is known to drop. Others that leave no trace are refused:
    their bits may be hidden where no refit reaches."""
    dense_nbytes: Nbytes = 64 * 2**20
    """Canonical bytes, all together at most, of tensors that are sent whole at each refit because post-load leaves nothing of
    them that could be changed in place. 0 refuses such layers."""
    torch_writes: bool = False
    """Write host memory with torch operations too, as memory of an accelerator is. For tests."""

    def current_tag(self) -> str:
        """The layout tag as it is now."""
        return self.layout_tag if isinstance(self.layout_tag, str) else self.layout_tag()

    def __post_init__(self) -> None:
        check_fields(self)
