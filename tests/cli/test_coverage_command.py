"""``deltarefit coverage``: tables from configurations and headers alone, the paper's numbers among them."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from deltarefit.cli.coverage import coverage
from deltarefit.offline.safetensors import build_header

LARGE = json.loads((Path(__file__).parent / "large_configs.json").read_text())
TINY = {
    **LARGE["qwen3-30b-a3b"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 250,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def run(*arguments):
    return CliRunner().invoke(coverage, [str(argument) for argument in arguments])


def report(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def config_of(directory, values):
    path = directory / "config.json"
    path.write_text(json.dumps(values))
    return path


@pytest.fixture
def checkpoint(tmp_path):
    words = np.zeros(64, np.uint16)
    header = build_header([("model.layers.0.self_attn.k_proj.weight", "BF16", (8, 8), words.nbytes)], {"format": "pt"})
    (tmp_path / "model.safetensors").write_bytes(header.prefix + words.tobytes())
    return tmp_path


def test_a_checkpoints_headers_are_enough(checkpoint):
    assert report("--checkpoint", checkpoint, "--tp", 8) == {
        "tensors_total": 1,
        "tensors_direct": 1,
        "bytes_total": 128,
        "bytes_direct": 128,
        "items_total": 8,
        "items_direct": 8,
        "by_type": [
            {
                "weight_type": "attention keys and values",
                "path": "direct",
                "reason": "",
                "tensors": 1,
                "nbytes": 128,
                "share": 1.0,
                "items": 8,
            }
        ],
    }


def test_keys_and_values_are_cut_no_finer_than_their_heads(checkpoint):
    config_of(checkpoint, {"text_config": {"num_key_value_heads": 2}})
    assert report("--checkpoint", checkpoint, "--tp", 8)["items_total"] == 2


def test_the_papers_classes_leave_fused_tensors_residual(checkpoint):
    result = report("--checkpoint", checkpoint, "--tp", 8, "--classes", "paper")
    assert (result["tensors_direct"], result["items_total"], result["by_type"][0]["path"]) == (0, 1, "residual")
    assert "outside the paper's mapping classes" in result["by_type"][0]["reason"]


def test_text_has_a_row_a_type_and_a_sum(checkpoint):
    result = run("--checkpoint", checkpoint, "--tp", 2, "--ep", 4, "--pp", 2)
    assert result.exit_code == 0
    assert "attention keys and values" in result.stdout
    assert "direct: 1 of 1 tensors, 100.00% of 128 B, 2 of 2 items at TP 2, expert TP 1 (pieces)" in result.stdout


@pytest.mark.parametrize("arguments", [(), ("--config", ".", "--checkpoint", "."), ("--checkpoint", ".", "--tp", "0")])
def test_wrong_usage_ends_with_2(arguments):
    assert run(*arguments).exit_code == 2


def test_a_directory_without_a_checkpoint_ends_with_1(tmp_path):
    assert run("--checkpoint", tmp_path).exit_code == 1


@pytest.mark.torch
def test_a_configuration_gives_the_names_that_the_checkpoint_would_have(tmp_path):
    pytest.importorskip("transformers")
    result = report("--config", config_of(tmp_path, TINY))
    assert result["tensors_total"] == result["tensors_direct"] == 3 + 2 * (6 + 1 + 2 + 8 * 3)
    assert {row["weight_type"]: row["tensors"] for row in result["by_type"]}["routed experts"] == 2 * 8 * 3


@pytest.mark.torch
def test_a_configuration_that_is_none_ends_with_1_and_says_so(tmp_path):
    pytest.importorskip("transformers")
    result = run("--config", config_of(tmp_path, {"model_type": "no such thing"}), "--json")
    assert result.exit_code == 1
    assert "transformers cannot build a model from it" in json.loads(result.stdout)["error"]["message"]


EXPECTED = {
    # name: tensors, of them direct in the paper's classes, bytes; from configurations, that is without blocks that only predict
    "qwen3-30b-a3b": (18_867, 18_721, 61_064_245_248),
    "qwen3-235b-a22b": (36_945, 36_661, 470_187_269_120),
    "nemotron-3-super-120b": (41_643, 41_497, 241_337_415_680),
    "nemotron-3-ultra-550b": (49_983, 49_801, None),
}


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_large_models_are_direct_as_a_whole(tmp_path, name):
    """The paper's own classes of tensors give the paper's own numbers."""
    pytest.importorskip("transformers")
    path = config_of(tmp_path, LARGE[name])
    tensors, paper_direct, nbytes = EXPECTED[name]
    ours = report("--config", path, "--tp", 8, "--etp", 8)
    assert (ours["tensors_total"], ours["tensors_direct"], ours["bytes_direct"]) == (tensors, tensors, ours["bytes_total"])
    assert nbytes in (None, ours["bytes_total"])
    paper = report("--config", path, "--tp", 8, "--etp", 8, "--classes", "paper")
    assert paper["tensors_direct"] == paper_direct
    if name == "qwen3-30b-a3b":
        assert (paper["items_direct"], paper["items_total"]) == (148_081, 148_227)
        assert round(paper["bytes_direct"] / paper["bytes_total"], 3) == 0.963
    if name == "qwen3-235b-a22b":
        assert paper["items_direct"] == 36_190 * 8 + 471
