"""``--settings``, the environment and options of the commands that stay: which goes before which, and what is refused."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import deltarefit
from deltarefit.cli import receiver as receiver_command
from deltarefit.cli.program import program
from deltarefit.errors import RejectedError
from deltarefit.runtime import relay_service

FILE = """
[receiver]
lease_s = 3
shared_directory = "/file"
staging_nbytes = "1 GiB"
event_directory = "/events"

[relay]
lease_s = 3
shared_directory = "/file"
max_nbytes = "2GiB"
"""
RECEIVER = ("receiver", "--run", "memory://r", "--engine", "http://127.0.0.1:9", "--kind", "vllm")
RELAY = ("relay", "--run", "memory://r")


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Run a command as far as its settings; returns these, or the error's text."""
    taken = []

    def keep(run, driver, engine, name, settings):
        taken.append(settings)

    class Service:
        def __init__(self, run, *, settings, **options):
            taken.append(settings)
            raise RejectedError("enough was seen")

    monkeypatch.setattr(receiver_command, "_keep", keep)
    monkeypatch.setattr(receiver_command, "_driver", lambda *args, **more: None)
    monkeypatch.setattr(relay_service, "RelayService", Service)
    (tmp_path / "refit.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path)

    def run(*arguments, **environment):
        taken.clear()
        result = CliRunner(env=environment).invoke(program, arguments)
        return taken[0] if taken else result.stderr

    return run


def test_without_any_the_defaults_hold(call):
    assert call(*RECEIVER) == deltarefit.ReceiverAgentSettings()
    assert call(*RELAY) == deltarefit.RelayServiceSettings()


def test_a_file_gives_any_setting(call):
    assert call(*RECEIVER, "--settings", "refit.toml") == deltarefit.ReceiverAgentSettings(
        lease_s=3, shared_directory="/file", staging_nbytes=2**30, event_directory="/events"
    )
    assert call(*RELAY, "--settings", "refit.toml") == deltarefit.RelayServiceSettings(
        lease_s=3, shared_directory="/file", max_nbytes=2**31
    )


def test_the_environment_goes_before_the_file_and_options_before_both(call):
    environment = {"DELTAREFIT_RECEIVER_LEASE_S": "4", "DELTAREFIT_RECEIVER_SHARED_DIRECTORY": "/environment"}
    found = call(*RECEIVER, "--settings", "refit.toml", **environment)
    assert (found.lease_s, found.shared_directory, found.event_directory) == (4.0, "/environment", "/events")
    found = call(*RECEIVER, "--settings", "refit.toml", "--shared-directory", "/option", **environment)
    assert (found.lease_s, found.shared_directory, found.event_directory) == (4.0, "/option", "/events")
    found = call(*RELAY, "--max-size", "1MiB", DELTAREFIT_RELAY_MAX_NBYTES="2MiB", DELTAREFIT_RELAY_LEASE_S="4")
    assert (found.max_nbytes, found.lease_s) == (2**20, 4.0)


def test_every_option_reaches_its_setting(call):
    options = ("--lease", "2", "--shared-directory", "/s", "--request-timeout", "7", "--event-directory", "/e")
    assert call(*RECEIVER, *options, "--metrics-address", "127.0.0.1:0") == deltarefit.ReceiverAgentSettings(
        lease_s=2, shared_directory="/s", request_timeout_s=7, event_directory="/e", metrics_address="127.0.0.1:0"
    )
    tls = ("--tls-authority", "refit.toml", "--tls-certificate", "refit.toml", "--tls-key", "refit.toml")
    assert call(*RELAY, "--lease", "2", "--shared-directory", "/s", *tls) == deltarefit.RelayServiceSettings(
        lease_s=2,
        shared_directory="/s",
        relay_tls_authority="refit.toml",
        relay_tls_certificate="refit.toml",
        relay_tls_key="refit.toml",
    )


@pytest.mark.parametrize("command", [RECEIVER, RELAY])
def test_what_is_wrong_is_told_with_where_it_stands(call, tmp_path, command):
    table = command[0]
    (tmp_path / "bad.toml").write_text(f"[{table}]\nlease_s = -1\n")
    assert f"bad.toml, table [{table}]: " in (text := call(*command, "--settings", "bad.toml"))
    assert "lease_s: expected a number from 0.01" in text
    (tmp_path / "bad.toml").write_text("[recever]\nlease_s = 1\n")
    assert f"bad.toml: expected a table [{table}], got recever" in call(*command, "--settings", "bad.toml")
    prefix = f"DELTAREFIT_{table.upper()}_"
    assert f"environment, {prefix}...: " in (text := call(*command, **{f"{prefix}LEASES": "1"}))
    assert "'leases': no such setting" in text
    assert "lease_s: expected a number from 0.01" in call(*command, "--lease", "nan")
