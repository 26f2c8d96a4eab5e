"""Puts this folder on the path: its tests share ``fsdp_layouts``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
