"""Shared helpers of the commands: sizes, tables, progress lines and exit codes."""

import io
import json
import sys

import click
import pytest
from click.testing import CliRunner

from deltarefit.cli import _output
from deltarefit.cli.program import program
from deltarefit.errors import BaseMismatchError


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**20, "1 MiB"), (1000 * 2**20, "1000 MiB"), (2**50, "1024 TiB")],
)
def test_format_nbytes(nbytes, text):
    assert _output.format_nbytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "0.25 s"), (2.3e-6, "0 s"), (12.4, "12 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_format_seconds(seconds, text):
    assert _output.format_seconds(seconds) == text


@click.command()
@_output.json_option
@click.option("--limit", type=_output.NBYTES, default="1MiB")
@click.option("--how", default="done")
@_output.guarded
def command(as_json, limit, how):
    if how == "refused":
        raise BaseMismatchError("tensor w: expected digest 1, got 2")
    if how == "missing":
        raise FileNotFoundError(2, "No such file", "x")
    _output.emit({"limit": limit}, as_json=as_json, human=lambda: click.echo(f"limit {limit}"))
    if how == "failed":
        _output.fail_check()


def test_exit_codes_and_streams():
    run = CliRunner().invoke
    assert run(command, []).exit_code == 0
    assert json.loads(run(command, ["--json", "--limit", "2KiB"]).stdout) == {"limit": 2048}
    refused = run(command, ["--how", "refused"])
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr == "error: tensor w: expected digest 1, got 2\n"
    as_json = run(command, ["--how", "refused", "--json"])
    assert json.loads(as_json.stdout)["error"]["kind"] == "BaseMismatchError"
    assert run(command, ["--how", "missing"]).exit_code == 1
    assert run(command, ["--how", "failed"]).exit_code == 1
    assert run(command, ["--limit", "3 apples"]).exit_code == 2
    assert run(command, ["--nonsense"]).exit_code == 2


def test_table_keeps_lines_whole_away_from_a_terminal(capsys):
    _output.print_table(("name", "bytes"), [("x" * 300, 1234567)])
    header, row = capsys.readouterr().out.splitlines()
    assert header.startswith("name")
    assert row.split() == ["x" * 300, "1,234,567"]


def test_plain_progress_prints_one_line_a_tenth(capsys):
    now_s = 0.0
    meter = _output._PlainMeter(lambda: now_s)
    meter.start("compare", 1000)
    for _ in range(100):
        now_s += 0.3
        meter.advance(10)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "compare: 1000 B"
    assert lines[1] == "compare: 10%, 27 s left"
    assert lines[-1] == "compare: 100%, 0 s left"
    assert len(lines) == 11


def test_plain_progress_of_short_work_is_one_line(capsys):
    meter = _output._PlainMeter(lambda: 0.0)
    meter.start("compare", 1000)
    for _ in range(100):
        meter.advance(10)
    assert capsys.readouterr().err == "compare: 1000 B\n"


def test_silent_progress_is_silent(capsys):
    with _output.progress(quiet=True) as meter:
        meter.start("compare", 10)
        meter.advance(10)
    assert capsys.readouterr() == ("", "")


def test_terminal_progress_shows_stage_and_bytes(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    with _output.progress() as meter:
        meter.advance(1)
        meter.start("compare", 2048)
        meter.advance(1024)
        meter.start("write", 10)
        meter.advance(10)
        shown = sys.stderr
    assert "compare" in shown.getvalue()
    assert "1.0/2.0 KiB" in shown.getvalue()
    assert "10/10 bytes" in shown.getvalue()


@pytest.mark.parametrize(
    "command",
    [["status"], ["status", "--watch", "--for", "1"], ["abort", "--reason", "why"]],
    ids=lambda words: " ".join(words),
)
def test_looking_at_a_run_that_is_not_there_makes_none(command, tmp_path):
    mistyped = tmp_path / "rnu7"
    result = CliRunner().invoke(program, [*command, "--run", f"file://{mistyped}"])
    assert result.exit_code != 0
    assert "there is no such directory; check the address, or start the trainer first" in result.output
    assert not mistyped.exists()
