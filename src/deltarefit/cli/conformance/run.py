"""Runs an engine's cases, each group in a process of its own, and collects the rows."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from deltarefit.cli.conformance.judge import GroupLeftOutError, judge
from deltarefit.cli.conformance.rows import LeftOut, Measured, Row
from deltarefit.errors import AttemptFailedError, DeadlineError, RejectedError

__all__ = ["ENGINES", "installed_engine", "judge_group", "run_engine"]

ENGINES: Mapping[str, str] = {"vllm": "vllm", "sglang": "sglang", "torch": "transformers"}
"""Engines, and the package that each needs; the first that is installed is the one at hand."""
_GROUP_TIMEOUT_S = 900.0
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_MARK = b"conformance row: "
_LEFT_OUT = b"conformance left out: "
_LOG_CHARACTERS = 3000


def installed_engine() -> str:
    """The engine at hand.

    Raises:
        RejectedError: there is none.
    """
    for engine, package in ENGINES.items():
        if importlib.util.find_spec(package) is not None:
            return engine
    raise RejectedError(
        f"no engine is installed in this environment: expected one of {', '.join(ENGINES.values())}; run this where one serves"
    )


def run_engine(engine: str, say: Callable[[Row], None], only: Sequence[str] = ()) -> Measured:
    """All rows of an engine that can be measured here, told to ``say``. ``only``: names of models; all without.

    Raises:
        RejectedError: the engine is not installed here.
        DeadlineError: a group's process does not end; as in the next, the text has the end of what it wrote.
        AttemptFailedError: a group's process failed.
    """
    if importlib.util.find_spec(ENGINES[engine]) is None:
        raise RejectedError(
            f"engine {engine}: the package {ENGINES[engine]} is not installed in this environment; run this where it serves"
        )
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    with tempfile.TemporaryDirectory(prefix="deltarefit-conformance-") as work:
        for number, (kernels, names) in enumerate(_cases(engine).GROUPS):
            chosen = [name for name in names if not only or name in only]
            if chosen:
                found = _run_group(engine, kernels, Path(work, str(number)), chosen, say)
                rows += found.rows
                left_out += found.left_out
    return Measured(tuple(rows), tuple(left_out))


def _run_group(engine: str, kernels: str, work: Path, names: Sequence[str], say: Callable[[Row], None]) -> Measured:
    work.mkdir()
    command = [sys.executable, "-m", "deltarefit.cli.conformance", "group", engine, kernels, str(work), ",".join(names)]
    environment = {**os.environ, **_ENVIRONMENT, **_engine_environment(engine)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_GROUP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(
            f"conformance of {engine}, {', '.join(names)}: not done after {_GROUP_TIMEOUT_S:.0f} s:\n{_end_of(error.stderr)}"
        ) from error
    for line in done.stdout.splitlines():
        if done.returncode == 0 and line.startswith(_LEFT_OUT):
            reason = line.removeprefix(_LEFT_OUT).decode(errors="replace")
            return Measured((), (LeftOut(engine=engine, kernels=kernels, models=tuple(names), reason=reason),))
    lines = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    rows = [msgspec.json.decode(line, type=Row) for line in lines]
    for row in rows:
        say(row)
    if done.returncode != 0 or len(rows) != len(names):
        name = names[len(rows)] if len(rows) < len(names) else ""
        raise AttemptFailedError(f"conformance of {engine}, {name}:\n{_end_of(done.stderr)}")
    return Measured(tuple(rows))


def _end_of(log: bytes | None) -> str:
    return (log or b"").decode(errors="replace")[-_LOG_CHARACTERS:]


def _engine_environment(engine: str) -> Mapping[str, str]:
    if engine != "vllm":
        return {}
    from deltarefit.testing.bare_vllm import ENVIRONMENT

    return ENVIRONMENT


def judge_group(engine: str, kernels: str, work: Path, names: Sequence[str], out: BinaryIO) -> None:
    """What the process of a group does: one line a row, as it comes."""
    try:
        for subject in _cases(engine).subjects(kernels, names, work):
            out.write(b"\n" + _MARK + msgspec.json.encode(judge(subject)) + b"\n")
            out.flush()
    except GroupLeftOutError as error:
        out.write(b"\n" + _LEFT_OUT + str(error).encode() + b"\n")


def _cases(engine: str) -> Any:
    return importlib.import_module(f"deltarefit.cli.conformance.{engine}_cases")
