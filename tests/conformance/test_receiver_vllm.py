"""Bare vLLM models pass the shipped suite for receivers."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]


def test_bare_vllm_models_pass_the_suite(tmp_path):
    cases = Path(__file__).with_name("receiver_vllm_cases.py")
    command = [
        sys.executable, "-m", "pytest", "-q", "-o", "filterwarnings=ignore", "-p", "no:cacheprovider",
        f"--basetemp={tmp_path / 'cases'}", str(cases),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, cwd=cases.parents[2])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 50, "the suite ran on both models"
