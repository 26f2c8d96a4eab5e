"""Puts this folder on the path: its tests share ``checkpoints``."""

import sys
from pathlib import Path

import pytest

from deltarefit.offline import grid

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def small_slices(monkeypatch):
    """Slices of 64 bytes and units of 256, so that tensors of a few hundred bytes exercise what large ones do."""
    monkeypatch.setattr(grid, "SLICE_NBYTES", 64)
    monkeypatch.setattr(grid, "UNIT_NBYTES", 256)
