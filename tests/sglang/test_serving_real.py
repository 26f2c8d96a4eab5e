"""Real SGLang engines that serve while they are refitted: requests in flight, and a server with a receiver beside it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import sysconfig
from contextlib import ExitStack
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang (make sglang)"),
]

PROMPT = [5 + (7 * i) % 240 for i in range(40)]
NUM_TOKENS = 400


# --- an Engine in an event loop -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serving(tmp_path_factory) -> dict:
    from deltarefit.testing.bare_sglang import write_sglang_checkpoint
    from deltarefit.testing.checkpoints import load_tensors, perturbed, write_checkpoint

    work = tmp_path_factory.mktemp("serving")
    tensors = load_tensors(write_sglang_checkpoint(work / "v0", "qwen3_moe"))
    for number in (1, 2):
        tensors = perturbed(tensors, 0.03, seed=number)
        write_checkpoint(work / f"v{number}", tensors, like=work / "v0")
    program = Path(__file__).with_name("serving_scenario.py")
    done = subprocess.run([sys.executable, str(program), str(work)], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((work / "serving.json").read_text())


@pytest.mark.parametrize(("mode", "version"), [("retract", "1"), ("abort", "2"), ("in_place", "1")])
def test_a_refit_during_a_request_is_exact_and_proven(serving, mode: str, version: str) -> None:
    outcome = serving[mode]
    assert outcome["proved"] > 20
    assert outcome["generated"]["weight_version"] == version
    if version == "1":
        assert outcome["state"] == serving["fresh"]["state"]
    else:
        assert outcome["state"] != serving["fresh"]["state"]


def test_a_retracted_request_goes_on_as_a_fresh_engine_would_from_there(serving) -> None:
    """Every bit of its log-probabilities is that of the new weights, and so is what later requests find in the cache."""
    running, fresh = serving["retract"]["running"], serving["fresh"]["retract"]
    assert (running["finish_reason"], len(running["tokens"])) == ("length", NUM_TOKENS)
    first, second = running["spans"]
    assert (first["start"], second["version"], second["end"]) == (0, "1", NUM_TOKENS)
    compared = slice(second["start"], second["start"] + len(fresh["tokens"]))
    assert running["tokens"][compared] == fresh["tokens"]
    assert running["logprobs"][compared] == fresh["logprobs"]
    for part in ("tokens", "logprobs", "cached_tokens"):
        assert serving["retract"]["generated"][part] == fresh["warm"][part]


def test_an_aborted_request_ends_and_leaves_nothing_in_the_cache(serving) -> None:
    running = serving["abort"]["running"]
    assert running["finish_reason"] == "abort"
    assert len(running["tokens"]) < NUM_TOKENS
    assert serving["abort"]["generated"]["cached_tokens"] == 0


def test_a_frozen_request_goes_on_with_what_older_weights_computed(serving) -> None:
    """As documented: such an answer mixes two policies."""
    running, fresh = serving["in_place"]["running"], serving["fresh"]["in_place"]
    assert (running["finish_reason"], len(running["tokens"])) == ("length", NUM_TOKENS)
    assert [span["version"] for span in running["spans"]] == ["2", "1"]
    start = running["spans"][1]["start"]
    assert running["logprobs"][start : start + len(fresh["logprobs"])] != fresh["logprobs"]


# --- a server, and a receiver beside it -----------------------------------------------------------------------------


def sampling(num_tokens: int) -> dict:
    return {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}


def launch(checkpoint: Path, log: Path):
    from deltarefit.testing.server_process import ServerProcess, free_port
    from deltarefit.testing.sglang_cpu import server_arguments

    port = free_port()
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint),
        "--host", "127.0.0.1", "--port", str(port), "--skip-server-warmup",
        "--custom-weight-loader", "deltarefit.integrations.sglang.receive", *server_arguments(),
    ]  # fmt: skip
    return ServerProcess(command, log, url=f"http://127.0.0.1:{port}")


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> dict:
    """What the documented session showed."""
    from deltarefit.integrations.sglang import SglangEngine
    from deltarefit.testing.bare_sglang import write_sglang_checkpoint
    from deltarefit.testing.checkpoints import perturbed, tiny_model
    from deltarefit.testing.server_process import ServerProcess
    from deltarefit.testing.server_session import StreamedRequest, refit_twice

    work = tmp_path_factory.mktemp("session")
    write_sglang_checkpoint(work / "v0", "qwen3_moe")
    model = tiny_model("qwen3_moe")
    policies = [dict(model.state_dict())]
    for seed in (1, 2):
        policies.append(perturbed(policies[-1], 0.03, seed=seed))
    run = (work / "run").as_uri()
    with ExitStack() as stack:
        server = stack.enter_context(launch(work / "v0", work / "server.log"))
        server.wait_ready(200)
        beside = [str(Path(sysconfig.get_path("scripts"), "deltarefit")), "receiver", "--run", run, "--engine", server.url]
        beside += ["--name", "rollout-0", "--verify-writes"]
        receiver = stack.enter_context(ServerProcess(beside, work / "receiver.log"))
        body = {"input_ids": PROMPT, "sampling_params": sampling(NUM_TOKENS), "stream": True}
        running = StreamedRequest(server.url, "/generate", body)
        shown = {"running": running, "refitted": refit_twice(model, policies, run, running, receiver)}
        shown |= {"info": server.ask("/model_info"), "receiver_exit": receiver.stop()}
        shown["generated"] = server.ask("/generate", {"input_ids": PROMPT, "sampling_params": sampling(16)})
        driver = SglangEngine(server.url)
        (state,) = driver.raw_state()
        shown["held"] = {name: [raw.dtype, list(raw.shape), raw.sha256] for name, raw in state.items()}
        driver.close()
    return shown | {"fresh": bare_state(work, model)}


def bare_state(work: Path, model) -> dict:
    """SGLang's own load of the trainer's final weights."""
    model.save_pretrained(work / "v2")
    command = [sys.executable, str(Path(__file__).with_name("bare_state.py")), *map(str, (work / "v0", work / "v2", work))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_servers_weights_are_those_of_a_fresh_load_of_the_final_checkpoint(session) -> None:
    """But for tables of rotations, which an engine makes longer than a bare model does."""
    held, fresh = (
        {name: shown for name, shown in session[which].items() if "rotary" not in name} for which in ("held", "fresh")
    )
    assert held == fresh
    assert len(held) > 20


def test_the_policy_version_labels_the_server_and_its_answers(session) -> None:
    assert session["info"]["weight_version"] == "2"
    assert session["generated"]["meta_info"]["weight_version"] == "2"


def test_each_refit_took_one_attempt_and_was_proven(session) -> None:
    for number, report in enumerate(session["refitted"].reports, start=1):
        assert (report.policy_version, report.attempts, report.audited) == (number, 1, True)
        assert report.receivers == ("rollout-0",)
    assert session["refitted"].audit.is_clean, session["refitted"].audit.describe()
    assert session["refitted"].audit.receivers[0].engine.startswith("sglang ")


def test_the_request_in_flight_goes_on_under_the_new_weights(session) -> None:
    running = session["running"]
    assert running.error is None
    last = running.events[-1]
    assert len(last["output_ids"]) == NUM_TOKENS
    assert last["meta_info"]["finish_reason"]["type"] == "length"
    assert [span["version"] for span in last["meta_info"]["weight_versions"]] == ["1", "2"]


def test_the_receiver_command_ends_when_it_is_told_to(session) -> None:
    assert session["receiver_exit"] == 0
