"""The ``deltarefit`` program and its list of commands."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click

import deltarefit

__all__ = ["COMMANDS", "program"]

COMMANDS: Mapping[str, tuple[str, str]] = {
    "demo": ("deltarefit.cli.demo.command", "demo"),
    "diff": ("deltarefit.cli.offline", "diff"),
    "apply": ("deltarefit.cli.offline", "apply"),
    "fold": ("deltarefit.cli.offline", "fold"),
    "inspect": ("deltarefit.cli.offline", "inspect"),
    "verify": ("deltarefit.cli.offline", "verify"),
    "publish": ("deltarefit.cli.publish", "publish"),
    "coverage": ("deltarefit.cli.coverage", "coverage"),
    "receiver": ("deltarefit.cli.receiver", "receiver"),
    "relay": ("deltarefit.cli.relay", "relay"),
    "status": ("deltarefit.cli.status", "status"),
    "trace": ("deltarefit.cli.trace", "trace"),
    "abort": ("deltarefit.cli.abort", "abort"),
    "doctor": ("deltarefit.cli.doctor", "doctor"),
    "bench": ("deltarefit.cli.bench", "bench"),
}
"""Name to module and attribute. Order is the order of ``--help``."""


class LazyGroup(click.Group):
    """Imports a command's module when the command is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        return command if isinstance(command, click.Command) else None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(deltarefit.__version__, "-V", "--version", prog_name="deltarefit")
def program() -> None:
    """A policy's new weights into every rollout server, exactly and fast: only the bits that changed travel."""
