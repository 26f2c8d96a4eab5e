"""Plays many cases, several at a time, and makes a table of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec

from deltarefit.errors import RejectedError
from deltarefit.testing.kill_matrix.cases import Case
from deltarefit.testing.kill_matrix.director import Director
from deltarefit.testing.kill_matrix.outcome import CaseResult
from deltarefit.testing.kill_matrix.zygote import Zygote
from deltarefit.testing.s3_server import S3Server, running_s3_server

__all__ = ["MatrixResult", "run_matrix", "table"]


class MatrixResult(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints."""

    ok: bool
    cases: tuple[CaseResult, ...]
    kills: int
    stops: int
    replacements: int
    kept: str
    """Directory with the logs of the cases that failed; empty if none did."""


def run_matrix(
    cases: Sequence[Case],
    *,
    jobs: int = 4,
    lease_s: float = 2.0,
    server: S3Server | None = None,
    note: Callable[[CaseResult], None] = lambda _: None,
) -> MatrixResult:
    """Play cases.

    Args:
        cases: which; ``CASES`` or some of them.
        jobs: how many at a time; they mostly wait.
        lease_s: the run's lease, doubled on S3. Stops last two and a half times as long.
        server: for cases on S3; one is started if needed and none is given.
        note: called with each result as it comes in.

    Raises:
        RejectedError: no cases, or no S3 server can be had.
    """
    if not cases:
        raise RejectedError("kill matrix: no case chosen")
    home = Path(tempfile.mkdtemp(prefix="kill-matrix-"))
    with ExitStack() as stack:
        if server is None and any(case.store == "s3" for case in cases):
            server = stack.enter_context(running_s3_server())
        zygote = stack.enter_context(Zygote(home / "zygote.log"))
        pool = stack.enter_context(ThreadPoolExecutor(jobs, thread_name_prefix="case"))

        def play(numbered: tuple[int, Case]) -> CaseResult:
            number, case = numbered
            directory = home / f"case-{number}"
            run = (directory / "run").as_uri() if server is None or case.store == "file" else server.run_url(directory.name)
            environment = server.environment if server is not None and case.store == "s3" else {}
            lease = lease_s if case.store == "file" else 2 * lease_s  # a request to the server takes its time
            result = Director(case, directory, run, zygote=zygote, lease_s=lease, environment=environment).play()
            if result.ok:
                shutil.rmtree(directory, ignore_errors=True)
            note(result)
            return result

        results = tuple(pool.map(play, enumerate(cases)))
    ok = all(result.ok for result in results)
    if ok:
        shutil.rmtree(home, ignore_errors=True)
    return MatrixResult(
        ok=ok,
        cases=results,
        kills=_count(results, "kill"),
        stops=_count(results, "stop"),
        replacements=_count(results, "replace"),
        kept="" if ok else str(home),
    )


def _count(results: Iterable[CaseResult], action: str) -> int:
    return sum(result.case.action == action for result in results)


def table(results: Iterable[CaseResult]) -> str:
    """The results as text."""
    rows = [("store", "call", "victim", "action", "held at", "ends at", "attempts", "served", "seconds", "outcome")]
    for result in results:
        case = result.case
        rows.append(
            (
                case.store,
                f"{case.call} by relay" if case.is_relayed else case.call,
                case.victim,
                case.action,
                f"{case.point} ({case.count})",
                f"v{result.committed}",
                str(result.attempts),
                str(result.served),
                f"{result.seconds:.1f}",
                "bit-equal" if result.ok else f"FAILED: {'; '.join(result.problems)}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )
