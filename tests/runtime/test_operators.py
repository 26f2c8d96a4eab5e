"""What an operator runs: status, abort, doctor; against real runs."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch
from click.testing import CliRunner

import deltarefit
from deltarefit.cli.program import program
from deltarefit.errors import DeadlineError
from deltarefit.runtime.clock import RandomIds, SystemClock
from deltarefit.runtime.doctor import examine
from deltarefit.runtime.relay_service import RelayService
from deltarefit.runtime.settings import RelayServiceSettings
from deltarefit.testing.faults import CorruptingSender, FaultPlan
from deltarefit.transport import open_run

from .pair import SETTINGS, Policy, perturb

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


def test_doctor_tries_the_ports_of_relays(tmp_path):
    run_url = (tmp_path / "run").as_uri()
    (tmp_path / "shared").mkdir()
    settings = RelayServiceSettings(shared_directory=str(tmp_path / "shared"))

    def ports():
        found = examine(run_url, clock=SystemClock(), ids=RandomIds(), watch_s=0.1)
        assert found.ok
        return next(check for check in found.checks if check.name == "ports")

    assert (ports().status, ports().found) == ("ok", "none needed: no relay shows itself in this run")
    with RelayService(run_url, listen="127.0.0.1:0", settings=settings) as relay:
        assert (ports().status, ports().found) == ("ok", "1 relays take connections")
        relay._relay.close()  # its sign of life stays, as if a firewall stood between
        refused = ports()
        assert refused.status == "warning"
        assert f"{relay.name} at 127.0.0.1:{relay.peer.port}" in refused.found
        assert "--advertise" in refused.advice


def test_doctor_warns_of_a_clock_that_runs_too_fast(tmp_path):
    class Fast(SystemClock):
        def wall_s(self):
            return 1.5 * super().wall_s()

    found = examine((tmp_path / "run").as_uri(), clock=Fast(), ids=RandomIds(), watch_s=0.5)
    assert {check.name: check.status for check in found.checks}["clocks"] == "warning"
    assert found.ok


def test_a_receiver_is_restored_by_order_from_what_the_store_retains(pair):
    publisher = pair.publisher(settings=msgspec.structs.replace(SETTINGS, retained_versions=4, retained_nbytes=1 << 20))
    old = Policy()
    for seed in range(2):
        perturb(pair.policy, seed)
        publisher.refit()
    receiver, model = pair.receivers[0], pair.models[0]
    before = receiver._presence.shown.incarnation
    model.load_weights(old.state_dict().items())  # somebody loaded the first checkpoint into a serving engine
    result = run("receiver", "restore", "--run", pair.run, "--name", "rollout-0", "--json")
    shown = json.loads(result.stdout)
    assert (result.exit_code, shown["is_restored"], shown["policy_version"]) == (0, True, 2)
    assert receiver._presence.shown.incarnation != before
    pair.assert_equal()
    with receiver.serving(1.0):
        pass
    assert (
        "proved that it holds policy version 2" in run("receiver", "restore", "--run", pair.run, "--name", "rollout-0").stdout
    )
    perturb(pair.policy, 2)
    assert publisher.refit().receivers == ("rollout-0",)
    pair.assert_equal()
    assert open_run(pair.run, clock=SystemClock()).listing("mail") == []


def test_a_damaged_receiver_serves_nothing_after_the_order_and_the_next_refit_repairs_it(pair):
    publisher = pair.publisher()
    perturb(pair.policy, 0)
    publisher.refit()
    pair.models[0].fused.data.view(torch.uint8)[11] ^= 4
    result = run("receiver", "restore", "--run", pair.run, "--name", "rollout-0")
    assert result.exit_code == 1
    assert "next refit() sends it what it lacks" in result.stdout
    with pytest.raises(DeadlineError):
        pair.receivers[0].serving(0.2).__enter__()
    assert publisher.refit().attempts == 1
    pair.assert_equal()
    with pair.receivers[0].serving(1.0):
        assert pair.receivers[0].policy_version == 2


def test_an_order_that_reaches_nobody_says_what_to_do(pair):
    result = run("receiver", "restore", "--run", pair.run, "--name", "rollout-0")
    assert result.exit_code == 1
    assert "start the trainer first" in result.stderr
    pair.publisher()
    result = run("receiver", "restore", "--run", pair.run, "--name", "nobody")
    assert result.exit_code == 1
    assert "there are: rollout-0" in result.stderr
    pair.receivers[0]._stopping.set()
    pair.receivers[0]._thread.join()
    result = run("receiver", "restore", "--run", pair.run, "--name", "rollout-0", "--wait", "0.3", "--json")
    assert json.loads(result.stdout)["error"]["kind"] == "DeadlineError"
    assert run("receiver", "--run", pair.run).exit_code == 2
    assert run("receiver", "restore", "--run", pair.run).exit_code == 2
