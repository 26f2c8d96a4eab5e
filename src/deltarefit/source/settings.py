"""Settings of the source side."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from deltarefit.checked import SomeNbytes, Threads, check_fields

__all__ = ["SourceSettings"]

MIB = 2**20


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """How owners keep, compare and pack what they own. All ranks must use the same."""

    chunk_nbytes: SomeNbytes = 64 * MIB
    """Input bytes, unchanged elements included, that one thread scans at a time (paper C: 64 MiB on object storage)."""
    bucket_nbytes: SomeNbytes = 512 * MIB
    """Input bytes per payload (paper C), fewer for the first and the last. Parts of shards, of 64 MiB at most, are never split,
    so chunks and buckets may exceed smaller targets."""
    scan_threads: Threads = 0
    """Threads that compare and encode; 0 means one per core that this process may use, at most 16."""
    baseline_directory: Path | None = None
    """Where to memory-map the baseline; None keeps it in anonymous host memory. The file has no name and leaves nothing."""
    check_replicas: bool = True
    """Whether copies of a shard are compared bit for bit at the start, which reads all weights that the rank holds.
    ``Source.check_replicas`` does it again at any time."""
    verify_candidate: bool = True
    """Whether commit first proves, at the price of one more scan, that the candidate is still the one that was sent."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def num_threads(self) -> int:
        return self.scan_threads or min(16, len(os.sched_getaffinity(0)))
