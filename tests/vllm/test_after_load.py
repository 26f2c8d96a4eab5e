"""Bare vLLM models after vLLM packed their weights: refits leave every storage as a fresh load does, or are refused by name.

Models are built, loaded and finished by vLLM; which kernels it may select is set in ``after_load_scenario`` (CPUs with and
without AMX tiles; some CUDA classes whose post-load step is plain torch). No forward pass is computed with them.
"""

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

EXACT = {
    "plain": (
        "qwen3_moe",
        "qwen3_moe_padded",
        "nemotron_h",
        "qwen3_next",
        "fp8_channel-dense",
        "gptq-dense",
        "awq-dense",
        "int4_group-dense",
    ),
    "amx": ("fp8_block-moe", "fp8_block-mla", "int8_channel-moe", "mxfp4-gpt_oss", "gptq-moe", "awq-moe", "int4_group-moe"),
    "cuda": ("fp8_block-dense", "nvfp4-dense"),
}
REFUSED = {
    "plain": {"int8_channel-dense": "dnnl_handler.handler_tensor differs between two equal loads"},
    "amx": {"fp8_block_router-moe": "squeezes BF16 into model.layers.0.mlp.gate.weight, which is F8_E4M3"},
    "cuda": {},
}
NOT_BUILT = {"gptq-moe": "WNA16", "awq-moe": "WNA16", "int4_group-moe": "WNA16"}
"""Experts of which vLLM itself has no kernel for a CPU without AMX tiles, and what it says."""
OUTCOMES = {
    ("plain", "qwen3_moe"): {"exact"},
    ("plain", "qwen3_moe_padded"): {"exact"},
    ("plain", "qwen3_next"): {"exact"},
    ("plain", "nemotron_h"): {"exact", "dense"},
    ("plain", "fp8_channel-dense"): {"exact"},
    ("plain", "gptq-dense"): {"exact", "skipped"},
    ("plain", "awq-dense"): {"exact"},
    ("plain", "int4_group-dense"): {"exact", "skipped"},
    ("amx", "fp8_block-moe"): {"exact"},
    ("amx", "fp8_block-mla"): {"exact", "rerun", "dense"},
    ("amx", "mxfp4-gpt_oss"): {"exact"},
    ("amx", "gptq-moe"): {"exact", "rerun", "dense", "skipped"},
    ("amx", "awq-moe"): {"exact", "rerun"},
    ("amx", "int4_group-moe"): {"exact", "rerun", "dense", "skipped"},
    ("amx", "int8_channel-moe"): {"exact", "rerun"},
    ("cuda", "fp8_block-dense"): {"exact"},
    ("cuda", "nvfp4-dense"): {"exact", "rerun", "dense"},
}
"""``dense``: a loader's ``-exp``, maxima over shards, a latent projection that is requantised, zero points that experts unpack.
``skipped``: symmetric zero points, ordered group indices, shapes."""
CASES = [(selection, name) for selection, names in EXACT.items() for name in names]


class Results:
    """What each selection's program wrote; it runs when it is first asked for."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._done: dict[str, dict] = {}

    def __getitem__(self, case: tuple[str, str]) -> dict:
        selection, name = case
        if selection not in self._done:
            self._done[selection] = self._run(
                selection, [*EXACT[selection], *REFUSED[selection], *(NOT_BUILT if selection == "plain" else ())]
            )
        if missing := self._done[selection].get("missing"):
            pytest.skip(missing)
        return self._done[selection][name]

    def _run(self, selection: str, names: list[str]) -> dict:
        from deltarefit.testing.checkpoints import write_tiny_checkpoint
        from deltarefit.testing.quantised import write_quantised_checkpoint

        for name in ("first", *names):
            scheme, _, kind = name.partition("-")
            if not (self._work / name).exists():
                if kind:
                    write_quantised_checkpoint(self._work / name, scheme, kind)
                else:
                    write_tiny_checkpoint(self._work / name, "qwen3_moe" if name == "first" else name)
        program = Path(__file__).with_name("after_load_scenario.py")
        command = [sys.executable, str(program), str(self._work), selection, *names]
        done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return json.loads((self._work / f"after-load-{selection}.json").read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    return Results(tmp_path_factory.mktemp("after_load"))


@pytest.mark.parametrize(("selection", "name"), CASES)
def test_refits_and_retries_leave_every_storage_as_a_fresh_load_does(results, selection: str, name: str) -> None:
    result = results[selection, name]
    assert "error" not in result, result["error"]
    assert "refused" not in result, result["refused"]
    assert (result["prewarm_changed"], result["wrong_v1"], result["wrong_v2"]) == ([], [], [])
    assert result["changed"] > 20


@pytest.mark.parametrize(("selection", "name"), CASES)
def test_what_is_held_is_proven_and_one_flipped_bit_shows(results, selection: str, name: str) -> None:
    result = results[selection, name]
    assert (result["base"], result["digests_v1"], result["drift"], result["unnoticed"]) == ([], [], [], [])


@pytest.mark.parametrize(("selection", "name"), CASES)
def test_each_layout_is_exact_as_far_as_it_is_said_to_be(results, selection: str, name: str) -> None:
    assert set(results[selection, name]["kinds"]) == OUTCOMES[selection, name]


@pytest.mark.parametrize(("selection", "name"), [(s, n) for s, names in REFUSED.items() for n in names])
def test_what_cannot_be_followed_is_refused_by_name(results, selection: str, name: str) -> None:
    rows = results[selection, name]["rows"]
    refused = [row for row in rows if row[1] == "refused"]
    assert any(REFUSED[selection][name] in reason for _, _, reason in refused), refused[:3]


@pytest.mark.parametrize("name", NOT_BUILT)
def test_what_vllm_does_not_build_here(results, name: str) -> None:
    """If it does one day, the case belongs among the others."""
    error = results["plain", name]["error"]
    assert "NotImplementedError" in error
    assert NOT_BUILT[name] in error
