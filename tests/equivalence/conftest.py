"""Puts this folder and those that it borrows from on the path."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "integrations_fsdp", HERE.parent / "integrations_megatron"):
    sys.path.insert(0, str(folder))
