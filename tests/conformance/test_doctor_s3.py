"""The doctor's checks against a real S3 server, and against one that refuses us."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from deltarefit.cli.program import program
from deltarefit.runtime.clock import SystemClock
from deltarefit.transport import open_run

pytestmark = pytest.mark.process


def doctor(run: str) -> tuple[int, dict]:
    result = CliRunner().invoke(program, ["doctor", "--run", run, "--watch", "1.5", "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_a_real_server_is_found_good_and_left_clean(s3_server, monkeypatch):
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    code, shown = doctor(s3_server.run_url("doctor"))
    assert (code, shown["ok"]) == (0, True), shown
    assert {check["name"]: check["found"] for check in shown["checks"]}["conditional writes"].startswith("If-None-Match")
    store = open_run(s3_server.run_url("doctor"), clock=SystemClock(), options=s3_server.options)
    assert store.listing("control") == []


def test_a_wrong_key_is_named(s3_server, monkeypatch):
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not the secret")
    code, shown = doctor(s3_server.run_url("doctor"))
    assert (code, shown["ok"]) == (1, False)
    assert "credentials" in next(check["found"] for check in shown["checks"] if check["name"] == "permissions")
