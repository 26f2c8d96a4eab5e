"""Real vLLM engines: after a refit, bits, tokens and logprobs are those of a fresh engine that loaded the new weights."""

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


def run_scenario(name: str, work: Path) -> dict:
    program = Path(__file__).with_name("engine_scenario.py")
    done = subprocess.run(
        [sys.executable, str(program), name, str(work)], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads((work / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def one_rank(versions) -> dict:
    return run_scenario("one_rank", versions)


@pytest.fixture(scope="module")
def speculative(versions) -> dict:
    return run_scenario("speculative", versions)


@pytest.fixture(scope="module")
def served(versions) -> dict:
    return run_scenario("served", versions)


def differing(states: list[dict], fresh: list[dict]) -> list[str]:
    assert len(states) == len(fresh)
    return [
        name for a, b in zip(states, fresh, strict=True) for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)
    ]


def test_prewarm_takes_differences_for_every_tensor_and_proves_the_base(one_rank) -> None:
    assert one_rank["encodings"] == ["DIFFERENCE"]
    assert one_rank["dense"] == []
    assert one_rank["base"] == {"proved": one_rank["tensors"], "disproved": []}


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_every_parameter_and_buffer_has_the_bits_of_a_fresh_load(one_rank, version: str) -> None:
    assert differing(one_rank[version]["state"], one_rank[version]["fresh_state"]) == []
    assert len(differing(one_rank[version]["state"], one_rank["v0"]["state"])) > 10


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_tokens_and_logprobs_are_those_of_a_fresh_engine(one_rank, version: str) -> None:
    assert one_rank[version]["generated"] == one_rank[version]["fresh_generated"]
    assert one_rank[version]["generated"]["logprobs"] != one_rank["v0"]["cold"]["logprobs"]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_digests_of_what_the_engine_holds_are_the_sources(one_rank, version: str) -> None:
    assert one_rank[version]["disproved"] == []
    assert one_rank[version]["proved"] == one_rank["tensors"]


def test_the_prefix_cache_is_dropped_by_a_refit(one_rank) -> None:
    assert one_rank["v0"]["warm"]["cached_tokens"] > 0
    assert one_rank["v1"]["generated"]["cached_tokens"] == 0


def test_storage_stays_where_captured_graphs_point(one_rank) -> None:
    assert one_rank["moved"] == [False]


def test_answers_carry_the_policy_version(one_rank) -> None:
    assert [one_rank[version]["weight_version"] for version in ("v1", "v2")] == ["1", "2"]


def test_a_payload_that_is_none_is_refused_with_its_own_error(one_rank) -> None:
    assert one_rank["refused"][0] == "PayloadInvalidError"
    assert "rank 0" in one_rank["refused"][1]


def test_experts_are_packed_as_in_any_other_engine(one_rank) -> None:
    assert {line.partition(":")[0].rpartition(".")[2] for line in one_rank["packed"]} == {"w13_weight", "w2_weight"}
    assert all("bits were rearranged" in line for line in one_rank["packed"])


def test_a_packed_convolution_and_its_unpacked_copy_are_refitted_too(versions) -> None:
    out = run_scenario("packed_convolution", versions)
    if not out["missing"]:
        assert any("conv1d.weight: was torch.bfloat16" in line for line in out["packed"])
        assert any("_cpu_unpacked_conv_weight: was derived" in line for line in out["packed"])
    assert out["refit"]["disproved"] == []
    assert differing(out["state"], out["fresh_state"]) == []
    assert out["generated"] == out["fresh_generated"]
    assert out["generated"]["logprobs"] != out["before"]["logprobs"]


@pytest.mark.parametrize(
    ("policy", "version", "reason"), [("wait", "v1", "length"), ("keep", "v2", "length"), ("abort", "v2", "abort")]
)
def test_a_served_engine_is_refitted_while_it_generates(served, one_rank, policy: str, version: str, reason: str) -> None:
    out = served[policy]
    assert differing(out["state"], one_rank[version]["fresh_state"]) == []
    assert out["generated"]["tokens"] == one_rank[version]["fresh_generated"]["tokens"]
    assert out["weight_version"] == version[1:]
    assert out["running"]["finish_reason"] == reason
    assert (len(out["running"]["tokens"]) == 400) == (reason == "length")


def test_two_tensor_parallel_ranks_in_two_processes(versions) -> None:
    out = run_scenario("tensor_parallel", versions)
    assert len(out["v1"]["state"]) == 2
    assert differing(out["v1"]["state"], out["v1"]["fresh_state"]) == []
    assert out["v1"]["generated"] == out["v1"]["fresh_generated"]
    assert out["base"] == {"proved": out["tensors"], "disproved": []}
    assert (out["v1"]["proved"], out["v1"]["disproved"]) == (out["tensors"], [])
    assert out["moved"] == [False, False]
    assert out["v1"]["weight_version"] == "1"
    assert out["refused"][0] == "PayloadInvalidError"


def test_a_policy_and_its_speculative_draft_are_refitted_together(speculative) -> None:
    out = speculative
    assert out["base"] == {"proved": out["tensors"], "disproved": []}
    assert (out["v1"]["proved"], out["v1"]["disproved"]) == (out["tensors"], [])
    assert differing(out["v1"]["state"], out["v1"]["fresh_state"]) == []
    changed = differing(out["v1"]["state"], out["v0"]["state"])
    assert {name.partition(".")[0] for name in changed} == {"policy", "draft"}
    assert out["v1"]["generated"] == out["v1"]["fresh_generated"]


def test_a_draft_that_nobody_publishes_is_refused_unless_it_is_to_stay(speculative) -> None:
    out = speculative
    kind, text = out["refused"]
    assert kind == "RejectedError"
    assert "no canonical name begins with 'draft.'" in text
    assert "--keep-drafts" in text
    assert out["kept"]["tensors"] < out["tensors"]
    assert not any(name.startswith("draft.") for name in out["kept"]["names"])
