"""SGLang's own loaders on bare models: refits equal dense reloads in raw bytes, derived state included."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from deltarefit.testing.bare_sglang import ARCHITECTURES

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang (make sglang)"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each architecture's program wrote; it runs when it is first asked for."""
    work, done = tmp_path_factory.mktemp("bare"), {}

    def outcome(architecture: str) -> dict:
        if architecture not in done:
            program = Path(__file__).with_name("bare_scenario.py")
            ran = subprocess.run(
                [sys.executable, str(program), str(work), architecture],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
            done[architecture] = json.loads((work / f"{architecture}.json").read_text())
        assert "error" not in done[architecture], done[architecture]["error"]
        return done[architecture]

    return outcome


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_refits_and_retries_leave_the_state_of_a_dense_reload(outcomes, architecture):
    outcome = outcomes(architecture)
    assert outcome["changed_v1"] > 10
    for path in ("compiled", "scratch"):
        result = outcome[path]
        if "refused" in result:
            assert (architecture, path) == ("deepseek_v3", "scratch")
            assert (
                "kv_a_proj_with_mqa.weight: it is copied through a temporary; the loader writes it only together"
                in result["refused"]
            )
            continue
        assert (path, result["prewarm_changed"], result["wrong_v1"], result["wrong_v2"]) == (path, [], [], [])
        assert result["moved"] == []


def kinds(outcome: dict) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for row in outcome["compiled"]["outcomes"]:
        found.setdefault(row["outcome"], {})[row["name"]] = row["reason"]
    return found


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_plain_models_take_every_change_straight_to_its_place(outcomes, architecture):
    assert set(kinds(outcomes(architecture))) == {"exact"}


def test_mla_copies_are_made_anew_and_compared(outcomes):
    """``w_kc`` and ``w_vc`` are neither parameters nor buffers; a receiver that knows only those would leave them stale."""
    outcome = outcomes("deepseek_v3")
    assert [name for name in outcome["state"] if name.endswith(("w_kc", "w_vc"))] == [
        f"derived model.layers.{layer}.self_attn.{copy}" for layer in (0, 1) for copy in ("w_kc", "w_vc")
    ]
    rerun = kinds(outcome)["rerun"]
    assert set(rerun) == {f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in (0, 1)}
    assert all("post_load_weights" in reason for reason in rerun.values())


def test_norms_that_keep_one_plus_their_weight_are_loaded_whole(outcomes):
    found = kinds(outcomes("qwen3_next"))
    assert Counter(name.rpartition(".")[0].rpartition(".")[2] for name in found["dense"]) == {
        "input_layernorm": 2, "post_attention_layernorm": 2, "q_norm": 1, "k_norm": 1, "norm": 1,
    }  # fmt: skip
    assert all("gemma_weight" in reason for reason in found["dense"].values())


@pytest.mark.parametrize("architecture", ["nemotron_h", "nemotron_h_moe", "granite_hybrid"])
def test_of_hybrid_models_only_decay_rates_go_through_the_loader(outcomes, architecture):
    found = kinds(outcomes(architecture))
    assert set(found) == {"exact", "rerun"}
    assert all(name.endswith("A_log") for name in found["rerun"])
