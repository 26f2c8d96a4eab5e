"""The demo as a user runs it: real processes, real engines, every bit compared."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from deltarefit.cli.demo import engines, task
from deltarefit.cli.demo.state import compare, read_state, write_state
from deltarefit.errors import RejectedError

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def run_demo(*arguments: str) -> tuple[dict, str]:
    command = [sys.executable, "-c", "from deltarefit.cli import main; main()", "demo", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr


def check(result: dict, steps: int) -> None:
    assert result["bit_equal"] is True
    assert len(result["refits"]) == steps
    for number, refit in enumerate(result["refits"], start=1):
        assert refit["policy_version"] == number
        assert refit["bit_equal"] is True
        assert refit["compared_tensors"] > 20
        assert 0 < refit["changed_fraction"] < 0.2
        assert 0 < refit["payload_nbytes"] < refit["checkpoint_nbytes"] / 10
        assert set(refit["stage_s"]) >= {"scan", "encode", "send", "fetch", "apply", "commit"}
    damaged = [refit for refit in result["refits"] if refit["payload_damaged"]]
    assert len(damaged) == 1
    assert damaged[0]["attempts"] >= 2


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.torch
def test_the_demo_ends_bit_equal_with_the_stand_in_engine_and_says_so():
    result, progress = run_demo("--engine", "torch", "--steps", "3")
    check(result, 3)
    assert "not vLLM" in result["note"]
    assert "not vLLM" in progress
    assert "refit 3 of 3" in progress


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.torch
def test_sharded_trainers_with_32_bit_masters_end_bit_equal_too():
    result, progress = run_demo("--engine", "torch", "--source", "fsdp", "--steps", "2")
    check(result, 2)
    assert result["source"] == "fsdp"
    assert "FSDP2 shards in 32 bits, published in bf16" in progress


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.vllm
@pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM")
def test_the_demo_ends_bit_equal_with_real_vllm_engines():
    result, progress = run_demo("--engine", "vllm", "--steps", "3")
    check(result, 3)
    assert result["engine"] == "vllm"
    assert "vLLM" in progress


def test_a_missing_engine_is_named_with_what_to_do(monkeypatch):
    missing = {"vllm"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else object())
    assert engines.engine_or_fallback("auto") == ("sglang", "")
    with pytest.raises(RejectedError, match=r"vLLM is not installed .*--engine torch"):
        engines.engine_or_fallback("vllm")
    missing.add("sglang")
    assert engines.engine_or_fallback("auto")[0] == "torch"
    with pytest.raises(RejectedError, match=r"SGLang is not installed .*make demo ENGINE=sglang"):
        engines.engine_or_fallback("sglang")


def test_missing_torch_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(RejectedError, match=r"torch cannot be imported here; run `make demo`"):
        engines.engine_or_fallback("auto")


def test_a_missing_source_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    engines.ensure_source("fsdp")
    with pytest.raises(RejectedError, match=r"megatron-bridge is not installed .*make megatron"):
        engines.ensure_source("megatron")


def test_states_differ_in_a_single_bit_or_a_missing_name(tmp_path):
    write_state(tmp_path / "a", [("parameter x", b"\x00\x01"), ("buffer y", b"")])
    write_state(tmp_path / "b", [("parameter x", b"\x00\x03"), ("buffer z", b"")])
    a, b = read_state(tmp_path / "a"), read_state(tmp_path / "b")
    assert compare(a, a).is_equal
    assert compare(a, b).differing == ("buffer y", "buffer z", "parameter x")
    assert not compare({}, {}).is_equal


def test_the_toy_task_is_what_it_says():
    assert task.reward([2, 4, 5, 7]) == 0.5
    assert task.reward([]) == 0.0
    assert task.advantages([1.0, 0.0]) == [1.0, -1.0]
    assert task.advantages([0.5, 0.5]) == [0.0, 0.0]
