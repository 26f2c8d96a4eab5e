"""Settings of a command: its options over the environment over a TOML file over the defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from deltarefit.runtime.settings import ReceiverAgentSettings, RelayServiceSettings

    SettingsT = TypeVar("SettingsT", ReceiverAgentSettings, RelayServiceSettings)

__all__ = ["gathered", "settings_option"]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def settings_option(table: str) -> Callable[[CommandT], CommandT]:
    """Add ``--settings``, a TOML file in which the command's settings are this table."""
    return click.option(
        "--settings",
        "settings_file",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        default=None,
        help=f"A TOML file with a table [{table}]. Variables {prefix_of(table)}<NAME> and options go before it.",
    )


def prefix_of(table: str) -> str:
    """What the names of the environment's variables begin with."""
    return f"DELTAREFIT_{table.upper()}_"


def gathered(kind: type[SettingsT], table: str, file: Path | None, options: Mapping[str, Any]) -> SettingsT:
    """The command's settings. Options that are None were not given.

    Raises:
        RejectedError: a setting is unknown or wrong, in whichever place; or the file has no such table.
    """
    from deltarefit.errors import RejectedError
    from deltarefit.runtime.settings import read_environment, read_toml

    values: dict[str, Any] = {}
    if file is not None:
        if table not in (found := read_toml(file)):
            raise RejectedError(f"{file}: expected a table [{table}], got {', '.join(found) or 'nothing'}")
        kind.from_toml(file, table)  # so that what is wrong is told with where it stands
        values |= found[table]
    prefix = prefix_of(table)
    kind.from_environment(os.environ, prefix)
    values |= read_environment(os.environ, prefix)
    values |= {name: value for name, value in options.items() if value is not None}
    return kind.from_mapping(values)
