"""Writes the demo's checkpoint: ``python -m deltarefit.cli.demo.checkpoint <directory>``."""

from __future__ import annotations

import sys
from pathlib import Path

from deltarefit.testing.checkpoints import write_tiny_checkpoint

if __name__ == "__main__":
    write_tiny_checkpoint(Path(sys.argv[1]))
