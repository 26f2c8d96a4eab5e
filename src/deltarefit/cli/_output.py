"""What every command shares: results as tables or JSON, sizes, progress, exit codes.

Exit codes: 0 done; 1 the check failed or the work did; 2 wrong usage (click's own). Results go to stdout, everything else to
stderr, so that ``--json`` output can be piped while progress is still shown.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import click
import msgspec

from deltarefit.errors import RefitError, RejectedError
from deltarefit.units import parse_nbytes

__all__ = [
    "EXIT_FAILED",
    "NBYTES",
    "Meter",
    "NbytesType",
    "emit",
    "fail_check",
    "format_nbytes",
    "format_seconds",
    "guarded",
    "json_option",
    "key_file_option",
    "now_s",
    "print_table",
    "progress",
]

EXIT_FAILED = 1
"""The check failed or the work did."""

_PLAIN_LINES = 10
"""Most lines per stage where no terminal shows a bar."""
_PLAIN_PAUSE_S = 2.0
"""Least time between two of them."""

_QUANTITY = re.compile(r"-|[-+]?[0-9][0-9.,]*(e[-+]?[0-9]+)?( ?(%|x|B|KiB|MiB|GiB|TiB|s|ms))?")

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


class NbytesType(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """A command line parameter that is a number of bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_nbytes(value)
        except RejectedError as error:
            self.fail(str(error), param, ctx)


NBYTES = NbytesType()


def format_nbytes(nbytes: float) -> str:
    """``1.5 MiB``: binary units, three significant digits."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} TiB" if size < 999.5 else f"{size:.0f} TiB"


def format_seconds(seconds: float) -> str:
    """``0.25 s``, ``12 s``, ``3 min 20 s`` or ``2 h 05 min``."""
    if seconds < 60:
        return f"{round(seconds, 3):.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def now_s() -> float:
    """Seconds on the clock that the progress display uses; only differences mean anything."""
    from rich import get_console

    return get_console().get_time()


def json_option(command: CommandT) -> CommandT:
    """Add ``--json``, which reaches the command as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")(command)


def key_file_option(command: CommandT) -> CommandT:
    """Add ``--key-file``, a path."""
    kind = click.Path(path_type=Path, exists=True, dir_okay=False)
    return click.option("--key-file", type=kind, default=None, help="A file with the run's secret, if it has one.")(command)


def _as_json(value: Any) -> bytes:
    """In UTF-8, whatever the terminal takes."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # there is a path in it that is no UTF-8
        return json.dumps(msgspec.to_builtins(value)).encode()


def emit(result: Any, *, as_json: bool, human: Callable[[], None]) -> None:
    """Print a result: a mapping, a msgspec struct or a dataclass as one line of JSON, or whatever ``human`` prints."""
    if as_json:
        click.echo(_as_json(result))
    else:
        human()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None) -> None:
    """A table on stdout. Columns whose cells are all quantities are right-aligned."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for position, column in enumerate(columns):
        numeric = bool(rows) and all(_is_quantity(row[position]) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in row))
    # Away from a terminal a table keeps its lines whole, so that grep and cut work on it.
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 10_000, highlight=False).print(table)


def _is_quantity(cell: object) -> bool:
    return isinstance(cell, int | float) or (isinstance(cell, str) and _QUANTITY.fullmatch(cell) is not None)


def guarded(command: CommandT) -> CommandT:
    """Translate errors raised on purpose, and the operating system's, into a message on stderr and exit code 1.

    Under ``--json`` stdout then holds ``{"error": {"kind", "message"}}``, so that a script always finds one document.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except RefitError as error:
            _fail(type(error).__name__, str(error), as_json=bool(kwargs.get("as_json")))
        except BrokenPipeError:
            raise  # whoever read the output has seen enough; click ends quietly
        except OSError as error:
            _fail(type(error).__name__, str(error), as_json=bool(kwargs.get("as_json")))

    return run  # type: ignore[return-value]


def fail_check() -> NoReturn:
    """End with the exit code of a check that failed, after its result was printed."""
    raise click.exceptions.Exit(EXIT_FAILED)


def _fail(kind: str, message: str, *, as_json: bool) -> NoReturn:
    if as_json:
        click.echo(_as_json({"error": {"kind": kind, "message": message}}))
    click.echo(f"error: {message}", err=True)
    raise click.exceptions.Exit(EXIT_FAILED)


class Meter(Protocol):
    """Where work says how far it is. Called from one thread."""

    def start(self, stage: str, total: int) -> None:
        """A stage begins, of ``total`` bytes (or other units)."""

    def advance(self, amount: int) -> None:
        """So many more of them are done."""


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Meter]:
    """A meter on stderr: bars with an ETA on a terminal, plain lines elsewhere, nothing if ``quiet``."""
    if quiet:
        yield _SilentMeter()
    elif sys.stderr.isatty():
        with _bars() as meter:
            yield meter
    else:
        yield _PlainMeter()


class _SilentMeter:
    def start(self, stage: str, total: int) -> None: ...

    def advance(self, amount: int) -> None: ...


class _PlainMeter:
    """One line per stage and, while it lasts, per tenth of it, with the time that the rest will take at the pace so far."""

    def __init__(self, clock_s: Callable[[], float] = now_s) -> None:
        self._clock_s = clock_s
        self._stage, self._total, self._done, self._printed, self._began_s, self._printed_s = "", 0, 0, 0, 0.0, 0.0

    def start(self, stage: str, total: int) -> None:
        self._stage, self._total, self._done, self._printed = stage, total, 0, 0
        self._began_s = self._printed_s = self._clock_s()
        click.echo(f"{stage}: {format_nbytes(total)}", err=True)

    def advance(self, amount: int) -> None:
        self._done += amount
        lines_due = _PLAIN_LINES * self._done // self._total if self._total else _PLAIN_LINES
        now_s = self._clock_s() if lines_due > self._printed else self._printed_s
        if now_s < self._printed_s + _PLAIN_PAUSE_S:
            return
        self._printed, self._printed_s = lines_due, now_s
        elapsed_s = now_s - self._began_s
        left_s = elapsed_s * (self._total - self._done) / self._done if self._done else 0.0
        click.echo(f"{self._stage}: {100 * lines_due // _PLAIN_LINES}%, {format_seconds(max(0.0, left_s))} left", err=True)


@contextmanager
def _bars() -> Iterator[Meter]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, console=Console(stderr=True))

    class RichMeter:
        def __init__(self) -> None:
            self._task: TaskID | None = None

        def start(self, stage: str, total: int) -> None:
            self._task = bars.add_task(stage, total=total)

        def advance(self, amount: int) -> None:
            if self._task is not None:
                bars.advance(self._task, amount)

    with bars:
        yield RichMeter()
