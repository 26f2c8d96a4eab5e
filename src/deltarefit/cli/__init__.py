"""The command line: thin commands over the public API.

May import every room. Commands are imported only when they are asked for, so that
``deltarefit inspect`` does not wait for torch.
"""

from __future__ import annotations

import io
import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``deltarefit`` program."""
    try:
        from deltarefit.cli.program import program
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.stderr.write("error: the command line needs click and rich: pip install 'deltarefit[cli]'\n")
        sys.exit(1)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names and paths may hold what a terminal cannot show
    program()
