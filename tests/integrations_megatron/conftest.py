"""Puts this folder on the path: its tests share ``source_cases``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
