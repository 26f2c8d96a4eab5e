"""The demo with real SGLang engines."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang (make sglang)"),
]


def test_the_demo_ends_bit_equal_and_generates_as_fresh_engines_do() -> None:
    """Its one payload is damaged in transit, and mended."""
    program = "from deltarefit.cli import main; main()"
    command = [sys.executable, "-c", program, "demo", "--json", "--engine", "sglang", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    (refit,) = result["refits"]
    assert (result["engine"], result["bit_equal"], refit["bit_equal"]) == ("sglang", True, True)
    assert refit["compared_tensors"] > 20
    assert (refit["payload_damaged"], refit["attempts"]) == (True, 2)
    assert "SGLang 0.5.23" in done.stderr
