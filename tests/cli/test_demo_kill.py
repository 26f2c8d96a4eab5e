"""``deltarefit demo --kill``: an engine dies in the middle of a refit, is restarted, and ends bit-equal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deltarefit.cli.demo.run import ENGINES, DemoOptions


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.torch
def test_an_engine_killed_in_the_middle_of_a_refit_comes_back_bit_equal():
    command = [sys.executable, "-c", "from deltarefit.cli import main; main()", "demo", "--json", "--kill"]
    done = subprocess.run(
        [*command, "--engine", "torch", "--steps", "3"], capture_output=True, text=True, check=False, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert (result["bit_equal"], result["kills"], result["rejoins"]) == (True, 1, 1)
    first, struck, last = result["refits"]
    assert (first["killed"], first["receivers"]) == ("", ["engine-0", "engine-1"])
    assert struck["killed"] == "engine-0"
    assert struck["attempts"] >= 2
    assert struck["rejoined"] + last["rejoined"] == ["engine-0"]
    assert last["receivers"] == ["engine-0", "engine-1"]


def test_one_engine_after_the_other_dies_in_every_other_refit_but_never_in_the_last():
    options = DemoOptions(engine="torch", steps=8, learning_rate=1e-6, directory=Path("unused"), kill=True)
    assert [options.victim(step) for step in range(1, 9)] == [None, 0, None, 1, None, 0, None, None]
    assert ENGINES == 2
    quiet = DemoOptions(engine="torch", steps=8, learning_rate=1e-6, directory=Path("unused"))
    assert not any(quiet.victim(step) is not None for step in range(1, 9))
