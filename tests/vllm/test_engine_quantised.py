"""Real vLLM engines with quantised weights, fed from a delta of two checkpoints: equal to fresh engines, or refused."""

from __future__ import annotations

import importlib.util
import json
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

FED = ("gptq-dense", "fp8_channel-dense")
"""Packed by nibbles, and transposed views, both with kernels that every CPU runs."""
REFUSED = "int8_channel-dense"
"""Without AMX tiles, oneDNN holds the weights."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict]:
    from deltarefit.testing.quantised import write_quantised_checkpoint

    work = tmp_path_factory.mktemp("quantised")
    for name in (*FED, REFUSED):
        write_quantised_checkpoint(work / name, *name.split("-"))
    program = Path(__file__).with_name("quantised_scenario.py")
    done = subprocess.run(
        [sys.executable, str(program), str(work), *FED, REFUSED], capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads((work / "quantised.json").read_text())


def differing(state: list[dict], fresh: list[dict]) -> list[str]:
    return [
        name for a, b in zip(state, fresh, strict=True) for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)
    ]


@pytest.mark.parametrize("name", FED)
def test_an_engine_fed_from_a_delta_is_a_fresh_engine_of_the_next_checkpoint(outcomes, name: str) -> None:
    out = outcomes[name]
    assert "error" not in out, out["error"]
    assert "refused" not in out, out["refused"]
    assert any("qkv_proj" in line for line in out["changes"])
    assert differing(out["state"], out["fresh_state"]) == []
    assert out["generated"] == out["fresh_generated"]
    assert out["generated"]["logprobs"] != out["before"]["logprobs"]


@pytest.mark.parametrize("name", FED)
def test_only_changes_travelled_and_every_bit_was_proven(outcomes, name: str) -> None:
    out = outcomes[name]
    assert 0 < out["changed"] < 0.05
    assert (out["audited"], out["audit"]) == (True, "")


def test_an_engine_whose_weights_are_out_of_reach_is_refused_by_name_and_serves_on(outcomes) -> None:
    out = outcomes[REFUSED]
    assert "error" not in out, out["error"]
    assert (
        "model.layers.1.self_attn.q_proj.weight: its layer holds state that cannot be followed: "
        "model.layers.1.self_attn.qkv_proj.scheme.kernel.dnnl_handler.handler_tensor differs" in out["refused"]
    )
    assert out["generated"]["tokens"] == out["before"]["tokens"]
