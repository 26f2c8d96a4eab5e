"""Checkpoints on disk as a source: what changed from one to the next goes to a run's engines, without a trainer.

For quantised policies in particular: the canonical bits are those of the quantised checkpoint, whoever quantised it.
"""

from deltarefit.integrations.checkpoints.source import CheckpointSource

__all__ = ["CheckpointSource"]
