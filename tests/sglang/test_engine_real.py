"""Real SGLang engines: after a refit, bits, checksums, tokens and logprobs are those of a fresh engine with the new weights."""

from __future__ import annotations

import importlib.util
import json
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


def run_scenario(name: str, work: Path) -> dict:
    program = Path(__file__).with_name("engine_scenario.py")
    done = subprocess.run(
        [sys.executable, str(program), name, str(work)], capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((work / f"{name}.json").read_text())


def versions(work: Path, architecture: str) -> Path:
    """Three policies ``v0``, ``v1``, ``v2``; each changes 3 % of the one before."""
    from deltarefit.testing.bare_sglang import write_sglang_checkpoint
    from deltarefit.testing.checkpoints import load_tensors, perturbed, write_checkpoint

    tensors = load_tensors(write_sglang_checkpoint(work / "v0", architecture))
    for number in (1, 2):
        tensors = perturbed(tensors, 0.03, seed=number)
        write_checkpoint(work / f"v{number}", tensors, like=work / "v0")
    return work


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3"])
def one_engine(request, tmp_path_factory) -> dict:
    return run_scenario("one_engine", versions(tmp_path_factory.mktemp(request.param), request.param))


def test_by_plug_in_and_in_a_session_everything_is_that_of_a_fresh_engine(one_engine) -> None:
    """v1 comes by the plug-in, v2 through SGLang's session and ``custom_weight_loader``."""
    for version in ("v1", "v2"):
        refitted, fresh = one_engine[version], one_engine[version]["fresh"]
        assert refitted["state"] == fresh["state"]
        assert refitted["checksums"] == fresh["checksums"]
        for part in ("tokens", "logprobs", "cached_tokens"):
            assert refitted["generated"][part] == fresh["generated"][part], part
        assert (refitted["proved"], refitted["encodings"]) == (one_engine["tensors"], ["DIFFERENCE"])
        assert refitted["generated"]["weight_version"] == version[1:]
    assert one_engine["v1"]["generated"]["logprobs"] != one_engine["v0"]["cold"]["logprobs"]
    assert one_engine["v1"]["checksums"] != one_engine["v2"]["checksums"]


def test_the_prefix_cache_is_dropped_by_a_refit(one_engine) -> None:
    assert one_engine["v0"]["warm"]["cached_tokens"] > 0
    assert one_engine["v1"]["generated"]["cached_tokens"] == 0


def test_a_payload_that_is_none_is_refused_with_its_own_error(one_engine) -> None:
    assert one_engine["refused"][0] == "PayloadInvalidError"
    assert "SGLang rank 0" in one_engine["refused"][1]
