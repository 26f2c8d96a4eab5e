"""Bare SGLang models pass the shipped suite for receivers."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang (make sglang)"),
]


@pytest.mark.parametrize("architecture", ["qwen3_moe", "nemotron_h", "qwen3_next"])
def test_a_bare_sglang_model_passes_the_suite(tmp_path, architecture: str) -> None:
    """Experts in stacked parameters; a loader that computes one tensor (``-exp``); one with tensors that are loaded whole."""
    cases = Path(__file__).with_name("receiver_sglang_cases.py")
    command = [
        sys.executable, "-m", "pytest", "-q", "-o", "filterwarnings=ignore", "-p", "no:cacheprovider",
        f"--basetemp={tmp_path / 'cases'}", str(cases),
    ]  # fmt: skip
    environment = os.environ | {"ARCHITECTURE": architecture}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 25
