"""What an operator runs: status, abort, doctor; against real runs."""

from __future__ import annotations

import json

import msgspec
import pytest
from click.testing import CliRunner

import deltarefit
from deltarefit.cli.program import program
from deltarefit.runtime.clock import RandomIds, SystemClock
from deltarefit.runtime.doctor import examine
from deltarefit.testing.faults import CorruptingSender, FaultPlan

from .pair import SETTINGS, perturb

pytestmark = pytest.mark.torch


def run(*arguments: str):
    return CliRunner().invoke(program, arguments)


def test_status_shows_versions_and_who_lives(pair):
    publisher = pair.publisher()
    perturb(pair.policy, 0)
    publisher.refit()
    result = run("status", "--run", pair.run, "--json", "--look", "1.2")
    shown = json.loads(result.stdout)
    assert (shown["policy_version"], shown["attempt"], shown["num_attempts"], shown["activity"]) == (1, "", 0, "")
    assert shown["coordinator_is_alive"] is True
    (receiver,) = shown["receivers"]
    assert (receiver["policy_version"], receiver["is_alive"], receiver["is_serving"]) == (1, True, True)
    assert "policy version 1 is committed" in run("status", "--run", pair.run, "--look", "0.1").stdout


def test_abort_without_a_refit_is_refused_and_names_the_version(pair):
    pair.publisher()
    result = run("abort", "--run", pair.run, "--reason", "a test")
    assert result.exit_code == 1
    assert "no refit is under way" in result.stderr


def test_abort_of_a_refit_that_waits_for_a_person(pair):
    publisher = pair.publisher(
        settings=msgspec.structs.replace(SETTINGS, max_attempts=1),
        wrap_sender=lambda sender: CorruptingSender(sender, FaultPlan()),
    )
    perturb(pair.policy, 0)
    with pytest.raises(deltarefit.OperatorRequiredError, match="deltarefit abort"):
        publisher.refit()
    result = run("abort", "--run", pair.run, "--reason", "not worth it", "--wait", "0", "--json")
    shown = json.loads(result.stdout)
    assert (result.exit_code, shown["is_ended"], shown["policy_version"]) == (0, False, 0)
    assert run("abort", "--run", pair.run, "--reason", "", "--wait", "0").exit_code == 1
    assert publisher.refit().policy_version == 1
    pair.assert_equal()


def test_doctor_finds_a_good_place_good_and_leaves_nothing(tmp_path):
    place = tmp_path / "run"
    result = run("doctor", "--run", place.as_uri(), "--watch", "0.2", "--json")
    shown = json.loads(result.stdout)
    assert (result.exit_code, shown["ok"]) == (0, True)
    assert {check["name"]: check["status"] for check in shown["checks"]}["conditional writes"] == "ok"
    assert [path for path in place.rglob("*") if path.is_file()] == []


def test_doctor_names_what_is_missing(tmp_path):
    place = tmp_path / "run"
    place.mkdir()
    (place / "control").write_text("a file where the folder of the record belongs")
    found = examine(place.as_uri(), clock=SystemClock(), ids=RandomIds(), watch_s=0.1, shared=tmp_path / "no such directory")
    status = {check.name: check.status for check in found.checks}
    assert not found.ok
    assert (status["permissions"], status["conditional writes"], status["shared memory"]) == ("failed", "failed", "warning")
    assert run("doctor", "--run", place.as_uri(), "--watch", "0.1").exit_code == 1


def test_doctor_warns_of_a_clock_that_runs_too_fast(tmp_path):
    class Fast(SystemClock):
        def wall_s(self):
            return 1.5 * super().wall_s()

    found = examine((tmp_path / "run").as_uri(), clock=Fast(), ids=RandomIds(), watch_s=0.5)
    assert {check.name: check.status for check in found.checks}["clocks"] == "warning"
    assert found.ok
