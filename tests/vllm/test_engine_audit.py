"""One flipped bit on one of two tensor-parallel ranks is found by an audit, and its tensor named."""

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


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    work = tmp_path_factory.mktemp("audit")
    program = Path(__file__).with_name("audit_scenario.py")
    done = subprocess.run([sys.executable, str(program), str(work)], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    return json.loads((work / "audit.json").read_text())


def test_nothing_is_found_where_nothing_was_flipped(found):
    assert (found["clean"], found["mended"]) == ("", "")
    assert found["covered"].endswith("on 2 ranks")


def test_a_bit_of_one_ranks_share_names_the_canonical_tensor(found):
    experts = found["a row of rank 1's experts"]
    assert experts == {"differing": ["model.layers.1.mlp.experts.3.down_proj.weight"], "disagreeing": {}, "drifted": []}
    query = found["query rows of rank 0"]
    assert query == {"differing": ["model.layers.0.self_attn.q_proj.weight"], "disagreeing": {}, "drifted": []}


def test_a_bit_of_what_both_ranks_hold_names_the_ranks_too(found):
    norm = found["a norm that both ranks hold"]
    name = "model.layers.0.input_layernorm.weight"
    assert norm == {"differing": [name], "disagreeing": {name: [0, 1]}, "drifted": []}


def test_a_bit_of_padding_that_no_refit_ever_wrote_is_drift_of_its_rank(found):
    padding = found["a padding row of the vocabulary, on rank 1"]
    assert padding == {"differing": [], "disagreeing": {}, "drifted": ["rank 1: model.embed_tokens.weight"]}
