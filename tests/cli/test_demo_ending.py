"""A demo that is told to end leaves no process and no directory that nobody asked for."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deltarefit.cli.demo.ending import EndedBySignal, Ending, workplace
from deltarefit.runtime.clock import Deadline, SystemClock


def wait_until(condition, process):
    """What ``condition`` gives once that is something."""
    clock = SystemClock()
    deadline = Deadline(clock, 200.0)
    while not (found := condition()):
        assert process.poll() is None, "it ended by itself"
        assert not deadline.expired
        clock.sleep(0.05)
    return found


def children_of(process):
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize(("num_children", "is_named"), [(1, False), (5, False), (5, True)])
def test_sigterm_ends_the_children_and_removes_the_temporary_directory(tmp_path, num_children, is_named):
    temporary, named = tmp_path / "temporary", tmp_path / "named"
    temporary.mkdir()
    command = [sys.executable, "-c", "from deltarefit.cli import main; main()", "demo", "--engine", "torch"]
    process = subprocess.Popen(
        [*command, *(["--directory", str(named)] if is_named else [])],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        children = wait_until(lambda: len(found := children_of(process)) == num_children and found, process)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 143, said.decode()
    assert b"Traceback" not in said
    assert [pid for pid in children if is_running(pid)] == []
    assert list(temporary.glob("deltarefit-*")) == []  # torch keeps a cache there, for all programs
    assert named.is_dir() == is_named
    assert (f"everything is kept in {named}" in said.decode()) == is_named


def test_a_second_signal_does_not_break_off_the_clearing_up():
    cleared = []

    def work():
        with Ending():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)
                cleared.append("up")

    with pytest.raises(EndedBySignal) as ended:
        work()
    assert cleared
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_end_is_put_off_until_a_process_that_was_started_is_held():
    held = []

    def start():
        with Ending() as ending, ending.put_off():
            signal.raise_signal(signal.SIGTERM)
            held.append("process")

    with pytest.raises(EndedBySignal):
        start()
    assert held


def test_a_failure_keeps_the_logs_and_says_where(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ZeroDivisionError), workplace(None) as home:
        raise ZeroDivisionError
    assert capsys.readouterr().err == f"everything is kept in {home}\n"
    assert list(tmp_path.iterdir()) == [home]
    with workplace(None) as other:
        (other / "log").write_text("x")
    assert list(tmp_path.iterdir()) == [home]
