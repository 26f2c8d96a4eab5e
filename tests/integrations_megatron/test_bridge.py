"""Real Megatron Bridge on the CPU, against its own export. Needs ``make megatron``; skipped elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_cases import CASES, RECORDED, write_case_checkpoint

pytest.importorskip("torch")
pytest.importorskip("transformers")

from deltarefit.testing import megatron_cpu

pytestmark = [
    pytest.mark.torch,
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(not megatron_cpu.is_installed(), reason="Megatron is not installed here; see `make megatron-test`"),
]


def run_ranks(name, work):
    """The facts and the summary of each rank."""
    here = Path(__file__).parent
    command = [sys.executable, str(here / "bridge_rank.py"), name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    processes = []
    for rank in range(CASES[name].world_size):
        with (work / f"log{rank}").open("wb") as log:
            processes.append(
                subprocess.Popen([*command, str(rank), str(work)], stdout=log, stderr=subprocess.STDOUT, env=environment)
            )
    codes = [process.wait(timeout=500) for process in processes]
    logs = "\n".join((work / f"log{rank}").read_text(errors="replace")[-1200:] for rank in range(len(codes)))
    assert not any(codes), logs
    ranks = range(len(codes))
    return (
        [json.loads((work / f"facts{rank}.json").read_text()) for rank in ranks],
        [json.loads((work / f"summary{rank}.json").read_text()) for rank in ranks],
    )


@pytest.mark.parametrize("name", CASES)
def test_refits_equal_bridges_own_export_and_facts_are_the_recorded_ones(tmp_path, name):
    write_case_checkpoint(CASES[name], tmp_path / "checkpoint")
    facts, summaries = run_ranks(name, tmp_path)
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    assert [rank["manifest"] for rank in facts] == [recorded["manifest"]] * len(facts)
    assert [rank["facts"] for rank in facts] == recorded["ranks"]
    assert all(not summary["unmapped"] for summary in summaries)
    if name == "converted_tp2_ep2":
        assert len(summaries[0]["residual"]) == 8
    else:
        assert summaries[0]["direct"] == summaries[0]["total"]


def test_the_demo_trains_a_megatron_model_and_ends_bit_equal():
    """Experts over two ranks, gradients of real rewards, and a bridge that the publisher is given."""
    command = [sys.executable, "-c", "from deltarefit.cli import main; main()", "demo", "--json", "--source", "megatron"]
    done = subprocess.run([*command, "--engine", "torch", "--steps", "2"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert (result["bit_equal"], result["source"], len(result["refits"])) == (True, "megatron", 2)


def test_a_tensor_that_bridge_silently_skips_is_refused_by_name(tmp_path):
    """Bridge only logs that it cannot find a name, and leaves the tensor out of its tasks."""
    from safetensors.torch import load_file, save_file

    write_case_checkpoint(CASES["hybrid_experts"], tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(AssertionError, match=r"backbone.embedding.weight BF16\[250, 64\]: no rank has any part of it"):
        run_ranks("hybrid_experts", tmp_path)
