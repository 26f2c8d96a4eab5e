"""The driver over HTTP, against a small server with vLLM's routes in front of the fake engine."""

from __future__ import annotations

import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.errors import AttemptFailedError, DeadlineError, LoaderContractError, OperatorRequiredError, RejectedError
from deltarefit.integrations.vllm import VllmEngine

pytestmark = pytest.mark.torch

CATALOG = Catalog([TensorSpec("w", "BF16", (4,))])


class Server(ThreadingHTTPServer):
    """``log`` holds the routes asked for; ``missing`` routes answer 404 and ``slow`` ones wait until the test ends."""

    def __init__(self, llm) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.llm = llm
        self.log: list[str] = []
        self.missing: set[str] = set()
        self.slow: set[str] = set()
        self.ended = threading.Event()

    def answer(self, route: str, body: dict) -> tuple[int, dict]:
        path = urllib.parse.urlsplit(route).path
        if path in self.missing:
            return 404, {"detail": "Not Found"}
        if path in self.slow:
            self.ended.wait(5.0)
        llm = self.llm
        actions = {
            "/version": lambda: {"version": "0.32.0"},
            "/init_weight_transfer_engine": lambda: llm.init_weight_transfer_engine(body),
            "/start_weight_update": llm.start_weight_update,
            "/update_weights": lambda: llm.update_weights(body),
            "/finish_weight_update": llm.finish_weight_update,
            "/update_weight_version": lambda: llm.update_weight_version(body["new_version"]),
            "/reset_prefix_cache": lambda: {"success": llm.reset_prefix_cache()},
            "/reset_encoder_cache": llm.reset_encoder_cache,
            "/pause": lambda: {"status": "paused"},
            "/resume": lambda: {"status": "resumed"},
        }
        try:
            return 200, actions[path]() or {}
        except Exception as error:
            return 500, {"error": {"message": str(error)}}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.log.append(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        code, answer = self.server.answer(self.path, json.loads(self.rfile.read(length) or b"{}"))
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, format: str, *args) -> None:  # noqa: A002
        """Quiet."""


@pytest.fixture
def server(fake_llm):
    server = Server(fake_llm)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def url(server) -> str:
    return f"http://127.0.0.1:{server.server_port}/"


@pytest.fixture
def engine(url, tmp_path):
    engine = VllmEngine(url, directory=tmp_path, in_flight="keep")
    yield engine
    engine.close()


def test_a_refit_uses_the_servers_routes(server, fake_llm, engine) -> None:
    assert engine.name == "vllm 0.32.0"
    assert len(engine.prewarm(CATALOG)) == 2
    server.log.clear()
    engine.close_gate(1.0)
    engine.synchronize()
    engine.drop_caches()
    engine.publish(7)
    engine.reopen_gate()
    assert server.log == [
        "/pause?mode=keep&clear_cache=false", "/start_weight_update", "/update_weights",
        "/reset_prefix_cache?reset_running_requests=true&reset_external=true", "/reset_encoder_cache",
        "/finish_weight_update", "/update_weight_version", "/resume",
    ]  # fmt: skip
    assert fake_llm.weight_version == "7"


def test_a_ranks_error_keeps_its_kind_over_http(fake_llm, engine) -> None:
    fake_llm.receivers[0].failing["digests"] = LoaderContractError("storage of w was moved")
    with pytest.raises(LoaderContractError, match="rank 0: storage of w was moved"):
        engine.digests()


def test_an_error_of_the_server_fails_the_attempt_with_its_text(fake_llm, engine) -> None:
    engine.digests()
    fake_llm.endpoints[0].forget()
    with pytest.raises(AttemptFailedError, match=r"answered 500.*nobody yet"):
        engine.digests()
    fake_llm.is_updating = False


def test_a_server_without_the_routes_is_told_how_to_start(server, engine) -> None:
    server.missing.add("/init_weight_transfer_engine")
    with pytest.raises(RejectedError, match="VLLM_SERVER_DEV_MODE=1"):
        engine.prewarm(CATALOG)


def test_requests_that_do_not_end_are_a_deadline(server, engine) -> None:
    server.slow.add("/pause")
    with pytest.raises(DeadlineError, match="/pause"):
        engine.close_gate(0.05)


@pytest.mark.parametrize("answer", [False, None, {"todo": "not supported"}, "unsupported"])
def test_a_cache_that_was_not_reset_is_an_error(fake_llm, engine, answer) -> None:
    fake_llm.can_reset = answer
    with pytest.raises(OperatorRequiredError):
        engine.drop_caches()
