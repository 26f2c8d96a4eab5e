"""``deltarefit receiver``: which kind of server it finds, and which modes it offers for it."""

from __future__ import annotations

import pytest

from deltarefit.cli.receiver import _driver, _kind_of
from deltarefit.errors import AttemptFailedError, RejectedError

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("route", "kind"), [("/model_info", "sglang"), ("/version", "vllm")])
def test_the_server_is_asked_what_it_is(canned_server, route: str, kind: str) -> None:
    canned_server.otherwise = (404, b"{}")
    canned_server.answers[route] = (200, b'{"version": "1"}')
    assert _kind_of(canned_server.url) == kind
    driver = _driver(canned_server.url, "auto", None, {}, keep_drafts=False)
    assert (type(driver).__name__, driver.engine.lower()) == (f"{kind.capitalize()}Engine", kind)


@pytest.mark.parametrize(("kind", "mode"), [("sglang", "wait"), ("sglang", "keep"), ("vllm", "retract"), ("vllm", "in_place")])
def test_a_mode_of_the_other_engine_is_refused_with_those_that_it_has(kind: str, mode: str) -> None:
    with pytest.raises(RejectedError, match=rf"--in-flight {mode} with a {kind} server: expected one of .*abort"):
        _driver("http://127.0.0.1:9", kind, mode, {}, keep_drafts=False)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(AttemptFailedError, match="is the server running"):
        _kind_of("http://127.0.0.1:9")
