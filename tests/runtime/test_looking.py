"""Commands that only look give up on a store that is out of reach while a person can still wait for it."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest
from click.testing import CliRunner

from deltarefit.cli.program import program
from deltarefit.errors import TransportError
from deltarefit.runtime.clock import Deadline, RandomIds, SystemClock
from deltarefit.runtime.looking import control_to_look, open_to_look
from deltarefit.runtime.progress_view import RunView

WITHIN_S = 60.0
"""Far more than the twelve seconds that are promised, and less than the 75 that the settings of refits would take."""


@contextlib.contextmanager
def silent_server():
    """Takes connections (the kernel does), and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield server.getsockname()[1]


@contextlib.contextmanager
def refusing_port():
    with socket.socket() as bound:  # bound and not listening: nobody else gets the port, and connections are refused
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture(params=[silent_server, refusing_port])
def run_url(request, monkeypatch):
    with request.param() as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        yield "s3://bucket/run"


@pytest.fixture
def in_time():
    deadline = Deadline(SystemClock(), WITHIN_S)
    yield
    assert not deadline.expired


@pytest.mark.usefixtures("in_time")
def test_status_says_that_the_store_is_out_of_reach(run_url):
    result = CliRunner().invoke(program, ["status", "--run", run_url])
    assert result.exit_code == 1
    assert "s3://bucket/run/control/record: out of reach after 2 tries" in result.stderr


@pytest.mark.usefixtures("in_time")
def test_a_view_says_that_the_store_is_out_of_reach(run_url):
    with pytest.raises(TransportError, match="s3://bucket/run/control/record: out of reach"):
        RunView(run_url, clock=SystemClock(), ids=RandomIds()).look()


@pytest.mark.usefixtures("in_time")
def test_doctor_asks_no_further_once_the_store_did_not_answer(run_url):
    result = CliRunner().invoke(program, ["doctor", "--run", run_url, "--json"])
    assert result.exit_code == 1
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks["permissions"]["found"].startswith("write control/doctor-"), "the first that failed, not the clearing up"
    not_tried = {name for name, check in checks.items() if check["found"].startswith("not tried")}
    assert not_tried == {"conditional writes", "control record", "latency", "clocks", "ports"}
    assert all(checks[name]["status"] == "failed" for name in not_tried)
    assert checks["shared memory"]["status"] != "failed"


def test_the_tries_of_a_look_come_to_a_quarter_of_a_minute_at_most():
    store = open_to_look("memory://waits", clock=SystemClock())
    control = control_to_look(store, SystemClock(), RandomIds())
    requests = control._settings.max_tries * store.settings.retry.attempts * (1 + store.settings.request_retries)
    assert requests * max(store.settings.read_timeout_s, store.settings.connect_timeout_s) <= 15
