"""Sizes of chunks and buckets: the paper's, or what suits a smaller model."""

from __future__ import annotations

from pathlib import Path

from deltarefit.runtime.settings import PublisherSettings
from deltarefit.source import SourceSettings

__all__ = ["source_settings"]

_BUCKET_NBYTES = 512 << 20
_CHUNK_NBYTES = 64 << 20
_LEAST_BUCKET_NBYTES = 4 << 20
_BUCKETS = 16
"""Of a small model's share: then start and drain of the pipeline take an eighth of it, and no payload is tiny."""


def source_settings(settings: PublisherSettings, share_nbytes: int) -> SourceSettings:
    """How owners compare and pack; ``share_nbytes`` is what one rank owns, about."""
    bucket_nbytes = settings.bucket_nbytes or min(_BUCKET_NBYTES, max(_LEAST_BUCKET_NBYTES, share_nbytes // _BUCKETS))
    return SourceSettings(
        chunk_nbytes=settings.chunk_nbytes or min(_CHUNK_NBYTES, max(1, bucket_nbytes // 4)),
        bucket_nbytes=bucket_nbytes,
        scan_threads=settings.scan_threads,
        baseline_directory=Path(settings.baseline_directory) if settings.baseline_directory else None,
        check_replicas=settings.check_replicas,
        verify_candidate=settings.verify_candidate,
    )
