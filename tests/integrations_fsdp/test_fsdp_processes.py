"""FSDP2 between real processes: training steps, a computed export, refits equal to gathered tensors."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.process
def test_refits_of_a_sharded_model_equal_its_gathered_tensors(tmp_path):
    script = Path(__file__).parent / "fsdp_rank.py"
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "2", str(tmp_path / "store")], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
