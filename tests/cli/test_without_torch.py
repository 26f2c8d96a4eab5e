"""What a node without torch must be able to run: a relay, the operator's commands, coverage from a checkpoint's headers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from deltarefit.offline.safetensors import build_header

pytestmark = pytest.mark.process

SCRIPT = (
    "import sys; sys.modules['torch'] = None\n"  # any import of torch fails
    "from deltarefit.cli import main\n"
    "try:\n    main()\nexcept SystemExit as end:\n    code = end.code\n"
    "assert sys.modules['torch'] is None\n"
    "sys.exit(code)"
)
WAIT_S = 60.0


def call(*arguments):
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)


def test_a_relay_serves_and_ends(tmp_path):
    run = (tmp_path / "run").as_uri()
    (tmp_path / "shared").mkdir()
    command = [sys.executable, "-c", SCRIPT, "relay", "--run", run, "--shared-directory", str(tmp_path / "shared")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as relay:
        try:
            assert f"for run {run}" in relay.stderr.readline()
            assert len(list((tmp_path / "run" / "relays").iterdir())) == 1
            relay.send_signal(signal.SIGTERM)
            assert "received 0 payload bytes" in relay.stderr.read()
            assert relay.wait(WAIT_S) == 0
        finally:
            relay.kill()


def test_operators_commands_say_what_is_wrong_with_a_run_that_is_none(tmp_path):
    run = (tmp_path / "run").as_uri()
    for command in (("status",), ("abort", "--reason", "x"), ("receiver", "restore", "--name", "r")):
        done = call(*command, "--run", run, "--json")
        assert (done.returncode, json.loads(done.stdout)["error"]["kind"]) == (1, "RejectedError"), done.stderr
    done = call("doctor", "--run", run, "--json")
    assert "checks" in json.loads(done.stdout), done.stderr


def test_coverage_of_a_checkpoint(tmp_path):
    words = np.zeros(64, np.uint16)
    header = build_header([("k_proj.weight", "BF16", (8, 8), words.nbytes)], {"format": "pt"})
    (tmp_path / "model.safetensors").write_bytes(header.prefix + words.tobytes())
    done = call("coverage", "--checkpoint", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes_direct"] == 128
    done = call("coverage", "--config", tmp_path, "--json")
    assert done.returncode == 1
    assert "needs torch and transformers" in done.stderr


def test_what_needs_torch_says_so():
    program = "import sys; sys.modules['torch'] = None\nimport deltarefit\ndeltarefit.Publisher"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert "ImportError: deltarefit.Publisher needs torch, which is not installed here: install deltarefit with" in done.stderr
