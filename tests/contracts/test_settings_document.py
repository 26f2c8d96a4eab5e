"""docs/settings.md names every setting of every class, with the default that the code has."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from enum import Enum
from pathlib import Path

import pytest

from deltarefit.runtime.settings import (
    ObservationSettings,
    PublisherSettings,
    ReceiverAgentSettings,
    RelayServiceSettings,
)
from deltarefit.source import SourceSettings
from deltarefit.units import parse_nbytes

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "settings.md").read_text(encoding="utf-8")
NONE_HAS = "–"


def rows(head: str) -> dict[str, tuple[str, str, str]]:
    """(default, unit, meaning) by name, of the table whose first heading is ``head``."""
    _, _, table = TEXT.partition(f"\n| {head} | default | unit | meaning |\n")
    assert table, f"no table of {head}"
    lines = table.splitlines()[1:]
    found: dict[str, tuple[str, str, str]] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        name, default, unit, meaning = (cell.strip() for cell in line.strip("|").split("|"))
        assert name[1:-1] not in found, f"{head}: {name} twice"
        found[name.strip("`")] = default, unit, meaning
    return found


def shown(value: object) -> str:
    if value in ("", ()):
        return NONE_HAS
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool | None):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def hold(table: str, defaults: object, names: tuple[str, ...]) -> None:
    described = rows(table)
    assert sorted(described) == sorted(names)
    for name, (default, unit, meaning) in described.items():
        value = getattr(defaults, name)
        if name.endswith("_nbytes"):
            assert parse_nbytes(default) == value, name
            assert unit == "bytes", name
        else:
            assert default == shown(value), name
        assert meaning, name
        if name.endswith("_s"):
            assert unit == "s", name


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        ("publisher", PublisherSettings),
        ("receiver", ReceiverAgentSettings),
        ("relay", RelayServiceSettings),
        ("observation", ObservationSettings),
    ],
)
def test_every_setting_is_named_with_its_default(table, kind):
    shared = () if kind is ObservationSettings else ObservationSettings.__struct_fields__
    hold(table, kind(), tuple(name for name in kind.__struct_fields__ if name not in shared))


def test_every_setting_of_a_source_is_named_with_its_default():
    hold("source", SourceSettings(), tuple(field.name for field in dataclasses.fields(SourceSettings)))


@pytest.mark.torch
def test_every_setting_of_a_rank_is_named_with_its_default():
    settings = pytest.importorskip("deltarefit.receiver").ReceiverSettings
    hold("rank", settings(), tuple(field.name for field in dataclasses.fields(settings)))


def test_the_file_shown_is_one_that_is_taken(tmp_path):
    (shown_file,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    path = tmp_path / "refit.toml"
    path.write_text(shown_file, encoding="utf-8")
    assert set(tomllib.loads(shown_file)) == {"publisher", "receiver", "relay"}
    publisher = PublisherSettings.from_toml(path, "publisher")
    assert publisher == PublisherSettings(min_receivers=4, retained_nbytes=20 * 2**30)
    receiver = ReceiverAgentSettings.from_toml(path, "receiver")
    assert receiver == ReceiverAgentSettings(shared_directory="/dev/shm", metrics_address="127.0.0.1:9464")
    assert RelayServiceSettings.from_toml(path, "relay") == RelayServiceSettings(max_nbytes=16 * 2**30)


def test_the_commands_variables_shown_are_ones_that_are_taken():
    shown = re.findall(r"`DELTAREFIT_(RECEIVER|RELAY)_([A-Z_]+)=(\w+)`", TEXT)
    assert len(shown) == 2
    for command, name, value in shown:
        kind = ReceiverAgentSettings if command == "RECEIVER" else RelayServiceSettings
        settings = kind.from_environment({f"X_{name}": value}, "X_")
        assert getattr(settings, name.lower()) == parse_nbytes(value)


def test_the_variable_shown_is_one_that_is_taken():
    (name, value) = re.findall(r"`(REFIT_PUBLISHER_[A-Z_]+)=(\d+)`", TEXT)[0]
    settings = PublisherSettings.from_environment({name: value, "PATH": "/bin"}, "REFIT_PUBLISHER_")
    assert settings == PublisherSettings(min_receivers=4)


def test_every_class_has_a_section():
    named = re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\)", TEXT, re.MULTILINE)
    assert len(named) == 6
    for name, anchor in named:
        assert anchor == name.lower()
        assert f"\n## {name}\n" in TEXT


def test_the_options_named_are_those_that_the_commands_have():
    click = pytest.importorskip("click")
    pytest.importorskip("rich")
    from deltarefit.cli.program import program

    section = TEXT.partition("### On the command line")[2].partition("\n## ")[0]
    relay, receiver = (part.partition("```")[0] for part in section.split("`deltarefit receiver`"))

    def options(name):
        command = program.get_command(click.Context(program), name)
        return {option for parameter in command.params for option in parameter.opts}

    told = set(re.findall(r"`(--[a-z-]+)`", relay))
    assert len(told) == len(RelayServiceSettings.__struct_fields__)
    assert options("relay") - told == {"--run", "--listen", "--advertise", "--key-file", "--settings"}
    told = set(re.findall(r"`(--[a-z-]+)`", receiver))
    assert told < options("receiver")
    assert options("receiver") - told == {"--run", "--engine", "--name", "--settings"}


def test_every_setting_that_a_message_names_exists():
    kinds = (PublisherSettings, ReceiverAgentSettings, RelayServiceSettings)
    known = {name for kind in kinds for name in kind.__struct_fields__}
    told: dict[str, str] = {}
    for path in (DOCS.parent / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for pattern in (r"\b([a-z]+(?:_[a-z]+)+) setting\b", r"\b(?:set|raise|lower|another) ([a-z]+(?:_[a-z]+)+)\b(?! from)"):
            told |= {name: str(path) for name in re.findall(pattern, text)}
    assert len(told) > 5
    assert {name: path for name, path in told.items() if name not in known} == {}
