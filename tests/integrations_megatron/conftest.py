"""Puts this folder on the path: its tests share ``megatron_cases`` and ``stand_ins``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
