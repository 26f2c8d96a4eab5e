"""``python -m deltarefit.cli.conformance``: ``run ENGINE FILE``, ``join DIRECTORY FILE...``, and ``group``, started by ``run``.

For ``make conformance``; people use ``deltarefit doctor --engine``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from deltarefit.cli.conformance.rows import Row, check_complete, columns_of, read_table, write_rows, write_table
from deltarefit.cli.conformance.run import ENGINES, judge_group, run_engine
from deltarefit.errors import RefitError


def main(arguments: Sequence[str]) -> int:
    """Exit status 1 if a model is neither exact nor refused, or could not be measured here."""
    try:
        return _main(arguments)
    except RefitError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _main(arguments: Sequence[str]) -> int:
    order, *rest = arguments
    if order == "group":
        engine, kernels, work, names = rest
        judge_group(engine, kernels, Path(work), names.split(","), sys.stdout.buffer)
        return 0
    if order == "run":
        engine, file = rest
        path = Path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        measured = run_engine(engine, _say)
        write_rows(path, measured)  # also where some are missing: ``join`` then refuses it, and takes no older file for it
        check_complete(path, measured)
        return 0 if measured.is_sound else 1
    if order == "join":
        directory, *files = rest
        rows = [row for file in files for row in read_table(Path(file))]
        write_table(Path(directory), rows)
        return 0 if all(row.is_sound for row in rows) else 1
    sys.stderr.write(f"expected run, join or group, got {order!r}; engines are {', '.join(ENGINES)}\n")
    return 2


def _say(row: Row) -> None:
    sys.stderr.write("  ".join(columns_of(row)) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
