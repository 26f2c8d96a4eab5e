"""What all tests share: the fast ones come first, and no test is judged by how long an example took."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Machines are shared and noisy, so an example has no deadline; pytest's own timeout ends what hangs. In continuous integration
# the same examples run each time: a failure there is a failure everywhere.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what is fast first, so that a broken change shows early."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
