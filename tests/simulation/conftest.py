"""Prints what the simulations came to, also under ``-q``."""

from __future__ import annotations

import pytest

LINES = pytest.StashKey[list]()


def pytest_configure(config):
    config.stash[LINES] = []


@pytest.fixture
def say(request):
    """Add a line to the report at the end."""
    return request.config.stash[LINES].append


def pytest_terminal_summary(terminalreporter, config):
    for line in config.stash.get(LINES, []):
        terminalreporter.write_line(line)
