"""``deltarefit receiver``: which kind of server it finds, and which modes it offers for it."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deltarefit.cli.receiver import _driver, _kind_of
from deltarefit.errors import AttemptFailedError, RejectedError

pytestmark = pytest.mark.torch


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path in self.server.routes
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(b'{"version": "1"}' if found else b"{}")

    def log_message(self, *args) -> None:
        """Quiet."""


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.routes = set()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url_of(server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize(("route", "kind"), [("/model_info", "sglang"), ("/version", "vllm")])
def test_the_server_is_asked_what_it_is(server, route: str, kind: str) -> None:
    server.routes.add(route)
    assert _kind_of(url_of(server)) == kind
    driver = _driver(url_of(server), "auto", None, {}, keep_drafts=False)
    assert (type(driver).__name__, driver.engine.lower()) == (f"{kind.capitalize()}Engine", kind)


@pytest.mark.parametrize(("kind", "mode"), [("sglang", "wait"), ("sglang", "keep"), ("vllm", "retract"), ("vllm", "in_place")])
def test_a_mode_of_the_other_engine_is_refused_with_those_that_it_has(kind: str, mode: str) -> None:
    with pytest.raises(RejectedError, match=rf"--in-flight {mode} with a {kind} server: expected one of .*abort"):
        _driver("http://127.0.0.1:9", kind, mode, {}, keep_drafts=False)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(AttemptFailedError, match="is the server running"):
        _kind_of("http://127.0.0.1:9")
