"""diff, apply, fold, inspect and verify from the command line: exit codes, JSON, text, and no torch."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from deltarefit.cli import offline as commands
from deltarefit.offline.safetensors import build_header

BY_NAME = {command.name: command for command in commands.COMMANDS}


def run(*arguments: object):
    name, *rest = map(str, arguments)
    return CliRunner().invoke(BY_NAME[name], rest, prog_name=f"deltarefit {name}")


def write(path, words):
    path.mkdir(exist_ok=True)
    header = build_header([("w", "BF16", (words.size,), words.nbytes)], {"format": "pt"})
    (path / "model.safetensors").write_bytes(header.prefix + words.tobytes())
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def versions(tmp_path):
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**16, 5000, dtype=np.uint16)
    paths = []
    for number in range(3):
        paths.append(write(tmp_path / f"v{number}", words))
        words = words + (rng.random(5000) < 0.02).astype(np.uint16)
    return paths


def test_names():
    assert list(BY_NAME) == ["diff", "apply", "fold", "inspect", "verify"]


def test_whole_story(versions, tmp_path):
    for number in range(2):
        result = run("diff", versions[number], versions[number + 1], "-o", tmp_path / f"d{number}")
        assert result.exit_code == 0, result.output
        assert "1 changed" in result.stdout
    deltas = [tmp_path / "d0", tmp_path / "d1"]
    assert run("apply", versions[0], *deltas, "-o", tmp_path / "out").exit_code == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (versions[2] / name).read_bytes()
    assert run("fold", *deltas, "-o", tmp_path / "folded").exit_code == 0
    assert "equal" in run("verify", versions[0], tmp_path / "folded", versions[2]).stdout
    inspected = run("inspect", tmp_path / "folded")
    assert inspected.exit_code == 0
    assert "config.json" in inspected.stdout
    assert "from base" in inspected.stdout
    assert run("apply", versions[0], *deltas, "--in-place").exit_code == 0
    assert (versions[0] / "model.safetensors").read_bytes() == (versions[2] / "model.safetensors").read_bytes()
    assert "nothing to finish" in run("apply", versions[0], "--in-place", "--resume").stdout


def test_json_is_one_document_on_stdout(versions, tmp_path):
    def document(*arguments):
        result = run(*arguments, "--json")
        assert result.stderr == ""
        return json.loads(result.stdout)

    diffed = document("diff", versions[0], versions[1], "-o", tmp_path / "d")
    assert diffed["nbytes"] == (tmp_path / "d").stat().st_size
    assert diffed["kinds"]["changed"] == 1
    assert 0 < diffed["num_sent"] < diffed["num_words"] == 5000
    assert diffed["seconds"] >= 0
    applied = document("apply", versions[0], tmp_path / "d", "-o", tmp_path / "out")
    assert (applied["base"], applied["target"]) == (diffed["base"], diffed["target"])
    inspected = document("inspect", tmp_path / "d")
    assert inspected["summary"]["id"] == diffed["id"]
    assert inspected["policy_digest"] == applied["policy_digest"]
    assert inspected["tensors"][0]["name"] == "w"
    assert document("verify", versions[0], tmp_path / "d", versions[1])["ok"] is True
    assert document("fold", tmp_path / "d", "-o", tmp_path / "f")["target"] == diffed["target"]
    assert document("apply", versions[0], "--in-place", "--resume") == {"resumed": False}
    failed = run("diff", versions[0], versions[1], "-o", tmp_path / "d", "--json")
    assert json.loads(failed.stdout)["error"]["kind"] == "RejectedError"
    assert "exists" in failed.stderr


def test_failed_checks_exit_1(versions, tmp_path):
    run("diff", versions[0], versions[1], "-o", tmp_path / "d")
    wrong = run("verify", versions[0], tmp_path / "d", versions[2])
    assert (wrong.exit_code, "tensor w: element" in wrong.stdout) == (1, True)
    base = run("apply", versions[1], tmp_path / "d", "-o", tmp_path / "out")
    assert base.exit_code == 1
    assert "error: " in base.stderr
    assert "already is what the delta gives" in base.stderr
    assert not (tmp_path / "out").exists()
    (tmp_path / "d").write_bytes((tmp_path / "d").read_bytes()[:-1])
    assert "cut short" in run("inspect", tmp_path / "d").stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("diff", "v0"),
        ("diff", "v0", "v1"),
        ("diff", "v0", "nowhere", "-o", "d2"),
        ("diff", "v0", "v1", "-o", "d2", "--encoding", "magic"),
        ("diff", "v0", "v1", "-o", "d2", "--memory", "12 apples"),
        ("diff", "v0", "v1", "-o", "d2", "--memory", "1MiB"),
        ("apply", "v0", "-o", "out"),
        ("apply", "v0", "d"),
        ("apply", "v0", "d", "-o", "out", "--in-place"),
        ("apply", "v0", "d", "--in-place", "--force"),
        ("apply", "v0", "d", "--in-place", "--resume"),
        ("apply", "v0", "--resume", "-o", "out"),
        ("apply", "v0", "v1", "-o", "out"),
        ("fold", "-o", "x"),
        ("inspect",),
        ("verify", "v0", "v1"),
    ],
)
def test_wrong_usage_exits_2(versions, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    assert run("diff", "v0", "v1", "-o", "d").exit_code == 0
    before = sorted(path.name for path in tmp_path.iterdir())
    assert run(*arguments).exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.process
def test_program_never_imports_torch(versions, tmp_path):
    script = (
        "import sys; sys.modules['torch'] = None\n"  # any import of torch fails
        "from deltarefit.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert sys.modules['torch'] is None\n"
    )
    for arguments in (
        ("diff", versions[0], versions[1], "-o", tmp_path / "d"),
        ("apply", versions[0], tmp_path / "d", "-o", tmp_path / "out"),
    ):
        done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (
        "compare: "
        in subprocess.run(
            [sys.executable, "-c", script, "diff", *map(str, versions[:2]), "-o", str(tmp_path / "e")],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    )


@pytest.mark.process
def test_output_that_nobody_reads_is_no_error(versions, tmp_path):
    """As with ``| head``."""
    delta = tmp_path / "delta"
    assert run("diff", *versions[:2], "-o", delta).exit_code == 0
    command = [sys.executable, "-c", "from deltarefit.cli import main; main()", "inspect", str(delta)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        child.stdout.close()
        assert "error" not in child.stderr.read()


@pytest.mark.parametrize("flags", [["--all"], ["--json"]])
def test_names_and_paths_that_the_terminal_cannot_show_are_shown_all_the_same(tmp_path, flags):
    """A job's log is often ASCII, and file names are bytes."""
    name = "w\U0001f600\u00e9"
    header = build_header([(name, "U8", (4,), 4)], {})
    for number in (0, 1):
        (tmp_path / f"v{number}.safetensors").write_bytes(header.prefix + bytes([number] * 4))
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

    def shown(*arguments):
        program = [sys.executable, "-c", "from deltarefit.cli import main; main()", *arguments]
        return subprocess.run(program, env=environment, check=True, timeout=60, stdout=subprocess.PIPE).stdout

    delta = os.fsencode(tmp_path / "d") + b"\xff.delta"
    made = shown("diff", str(tmp_path / "v0.safetensors"), str(tmp_path / "v1.safetensors"), "-o", delta)
    assert b"tensors  1 changed" in made
    told = shown("inspect", delta, *flags)
    if "--json" in flags:
        assert name in json.dumps(json.loads(told), ensure_ascii=False)
    else:
        assert b"w\\U0001f600\\xe9" in told
