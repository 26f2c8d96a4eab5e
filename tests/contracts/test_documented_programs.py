"""Programs in the documents run as they stand there, together, in directories of their own."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from deltarefit.runtime.clock import SystemClock
from deltarefit.testing import megatron_cpu
from deltarefit.testing.checkpoints import write_tiny_checkpoint

DOCS = Path(__file__).parents[2] / "docs"
CLOCK = SystemClock()
PROGRAM = re.compile(r"```python\n(# (\w+)\.py.*?)```", re.DOTALL)

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.process]


def programs_of(document, work, place):
    """The document's programs by name, written to ``work`` with its paths under ``place`` moved there."""
    found = {}
    for text, name in PROGRAM.findall((DOCS / document).read_text(encoding="utf-8")):
        assert place in text
        found[name] = work / f"{name}.py"
        found[name].write_text(text.replace(place, str(work)))
    return found


def run(commands, work):
    """Start programs together; what each printed, once all ended well. One that fails ends the others."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    logs = [work / f"log{number}.txt" for number in range(len(commands))]
    started = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("wb") as file:
                started.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment))
        deadline_s = CLOCK.monotonic_s() + 300
        while None in (codes := [process.poll() for process in started]) and not any(codes):
            if CLOCK.monotonic_s() > deadline_s:
                break
            CLOCK.sleep(0.1)
    finally:
        for process in started:
            process.kill()
            process.wait()
    shown = [log.read_text(errors="replace") for log in logs]
    assert codes == [0] * len(started), "\n".join(text[-3000:] for text in shown)
    return shown


def torchrun(program):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]


def test_the_quickstart_refits_five_times(tmp_path):
    programs = programs_of("quickstart.md", tmp_path, "/tmp/quickstart-run")
    trainer, rollout = run([[sys.executable, str(programs[name])] for name in ("trainer", "rollout")], tmp_path)
    assert [int(found) for found in re.findall(r"version (\d+): ", trainer)] == [1, 2, 3, 4, 5]
    assert rollout.strip().endswith("holds version 5")


def test_a_source_described_by_hand_refits(tmp_path):
    programs = programs_of("sources.md", tmp_path, "/tmp/by-hand")
    (shown,) = run([[sys.executable, str(programs["by_hand"])]], tmp_path)
    assert "version 1: 1 of 48 elements changed" in shown


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize(
    ("document", "place"),
    [
        ("integrations/fsdp.md", "/tmp/fsdp-session"),
        pytest.param(
            "integrations/megatron.md",
            "/tmp/megatron-session",
            marks=[
                pytest.mark.megatron,
                pytest.mark.skipif(not megatron_cpu.is_installed(), reason="Megatron is not installed here"),
            ],
        ),
    ],
)
def test_sharded_sessions_refit_three_times(tmp_path, document, place):
    write_tiny_checkpoint(tmp_path / "v0", "qwen3")
    programs = programs_of(document, tmp_path, place)
    trainer, rollout = run([torchrun(programs["trainer"]), [sys.executable, str(programs["rollout"])]], tmp_path)
    assert [int(found) for found in re.findall(r"version (\d+): ", trainer)] == [1, 2, 3]
    assert not re.search(r" 0\.00% changed", trainer)
    assert rollout.strip().endswith("holds version 3")
