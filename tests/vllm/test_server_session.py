"""The documented session with real processes: a vLLM server, ``deltarefit receiver`` beside it, a trainer that refits twice."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import sysconfig
from contextlib import ExitStack
from pathlib import Path

import pytest

from deltarefit.testing.server_process import ServerProcess, free_port

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None or importlib.util.find_spec("uvicorn") is None,
        reason="needs vLLM and what its server imports",
    ),
]

START_S = 300.0
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
GENERATE = "/inference/v1/generate"
NUM_RUNNING_TOKENS = 1200
"""Of the request that runs when a refit begins: enough to be still running when its gate closes."""
PROMPT = [5 + (7 * i) % 240 for i in range(32)]


class Server(ServerProcess):
    """``python -m vllm.entrypoints.openai.api_server`` with the deltarefit backend."""

    def __init__(self, checkpoint: Path, log: Path) -> None:
        port = free_port()
        self.checkpoint = str(checkpoint)
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.checkpoint,
            "--weight-transfer-config", '{"backend": "deltarefit"}', "--host", "127.0.0.1", "--port", str(port),
            "--skip-tokenizer-init", "--enforce-eager", "--hf-overrides", '{"max_position_embeddings": 2048}',
            "--max-model-len", "1280", "--max-num-seqs", "4", "--dtype", "bfloat16",
            "--gpu-memory-utilization", "0.05", "--enable-scale-out",
        ]  # fmt: skip
        super().__init__(command, log, environment=ENVIRONMENT, url=f"http://127.0.0.1:{port}")

    def checksums(self) -> dict[str, str]:
        return self.ask("/weight_checker", {"action": "checksum"})["checksums"]

    def complete(self, num_tokens: int = 16) -> dict:
        """A greedy completion, by token."""
        return self.ask(GENERATE, self.order(num_tokens))

    def order(self, num_tokens: int, **more: object) -> dict:
        params = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "detokenize": False}
        return {"model": self.checkpoint, "token_ids": PROMPT, "sampling_params": params, **more}


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> list[dict]:
    """The state of the trainer's model at versions 0, 1 and 2."""
    from deltarefit.testing.checkpoints import perturbed, tiny_model

    found = [dict(tiny_model("qwen3_moe").state_dict())]
    for seed in (1, 2):
        found.append(perturbed(found[-1], 0.03, seed=seed))
    return found


@pytest.fixture(scope="module")
def session(tmp_path_factory, policies) -> dict:
    """What the session showed."""
    from deltarefit.testing.checkpoints import tiny_model
    from deltarefit.testing.server_session import StreamedRequest, refit_twice

    work = tmp_path_factory.mktemp("session")
    model = tiny_model("qwen3_moe")
    model.save_pretrained(work / "v0")
    run = (work / "run").as_uri()
    with ExitStack() as stack:
        server = stack.enter_context(Server(work / "v0", work / "server.log"))
        server.wait_ready(START_S)
        program = str(Path(sysconfig.get_path("scripts"), "deltarefit"))
        beside = [program, "receiver", "--run", run, "--engine", server.url, "--in-flight", "keep", "--name", "rollout-0"]
        beside.append("--verify-writes")
        receiver = stack.enter_context(ServerProcess(beside, work / "receiver.log"))
        shown = {"before": server.checksums()}
        running = StreamedRequest(server.url, GENERATE, server.order(NUM_RUNNING_TOKENS, stream=True))
        shown |= {"running": running, "refitted": refit_twice(model, policies, run, running, receiver)}
        status = subprocess.run([program, "status", "--run", run, "--json"], capture_output=True, check=True, timeout=60)
        shown |= {
            "status": json.loads(status.stdout),
            "after": server.checksums(),
            "generated": server.complete()["choices"][0],
            "info": server.ask("/weight_info"),
            "receiver_exit": receiver.stop(),
        }
    model.save_pretrained(work / "v2")
    bare = Path(__file__).with_name("bare_checksums.py")
    fresh = subprocess.run(
        [sys.executable, str(bare), str(work / "v2"), str(work)], capture_output=True, timeout=200, check=True
    )
    return shown | {"fresh": json.loads(fresh.stdout.splitlines()[-1])}


def test_weights_are_those_of_a_fresh_load_of_the_final_checkpoint(session):
    assert session["after"] == session["fresh"]
    assert len(session["after"]) > 20
    assert all(session["after"][name] != digest for name, digest in session["before"].items() if "norm" in name)


def test_the_policy_version_labels_the_server_and_its_answers(session):
    assert session["info"]["weight_version"] == "2"
    assert session["generated"]["weight_versions"] == [{"version": "2", "start": 0, "end": 16}]


def test_each_refit_took_one_attempt_and_was_proven(session):
    for number, report in enumerate(session["refitted"].reports, start=1):
        assert (report.policy_version, report.attempts, report.audited) == (number, 1, True)
        assert report.receivers == ("rollout-0",)
        assert 0 < report.changed_fraction < 0.1


def test_an_audit_on_demand_finds_nothing(session):
    assert session["refitted"].audit.is_clean, session["refitted"].audit.describe()
    assert session["refitted"].audit.receivers[0].engine.startswith("vllm ")


def test_the_request_in_flight_goes_on_under_the_new_weights(session):
    running = session["running"]
    assert running.error is None
    choices = [choice for line in running.events for choice in line["choices"]]
    assert sum(len(choice["token_ids"] or []) for choice in choices) == NUM_RUNNING_TOKENS
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    (spans,) = [choice["weight_versions"] for choice in choices if choice["weight_versions"]]
    assert [span["version"] for span in spans] == ["1", "2"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], NUM_RUNNING_TOKENS)


def test_status_shows_the_session(session):
    assert session["status"]["policy_version"] == 2
    (receiver,) = session["status"]["receivers"]
    assert (receiver["receiver"], receiver["is_serving"], receiver["policy_version"]) == ("rollout-0", True, 2)


def test_the_receiver_command_ends_when_it_is_told_to(session):
    assert session["receiver_exit"] == 0
