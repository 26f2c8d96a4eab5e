"""docs/delivery.md and docs/observability.md name settings, fields, stages and metrics as the code has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deltarefit.runtime.events import STAGES
from deltarefit.runtime.jsonlines import Line
from deltarefit.runtime.prometheus import RefitMetrics
from deltarefit.runtime.report import RefitReport
from deltarefit.runtime.settings import (
    ObservationSettings,
    PublisherSettings,
    ReceiverAgentSettings,
    RelayServiceSettings,
    parse_nbytes,
)

DOCS = Path(__file__).parents[2] / "docs"
TABLES = {
    "publisher": PublisherSettings,
    "receiver": ReceiverAgentSettings,
    "relay": RelayServiceSettings,
    "setting": ObservationSettings,
}
NOT_ABOUT_DELIVERY = {
    "publisher": {"min_receivers", "join_timeout_s", "reply_timeout_s", "group_timeout_s", "lease_s", "max_attempts"}
    | {"retry_pause_s", "request_timeout_s", "control"},
    "receiver": {"join_timeout_s", "lease_s", "poll_s"},
    "relay": {"lease_s", "relay_tls_authority", "relay_tls_certificate", "relay_tls_key"},
    "setting": set(),
}
"""Described in the operations guide, or with the publisher's."""


def rows(document: str, head: str) -> dict[str, str]:
    """Second column by first, of the table whose first heading is ``head``; names stand in backquotes."""
    lines = iter((DOCS / document).read_text(encoding="utf-8").splitlines())
    assert any(line.startswith(f"| {head} |") for line in lines), f"{document}: no table of {head}"
    found: dict[str, str] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if name := re.fullmatch(r"`([a-z_A-Z0-9]+)`", cells[0]):
            found[name[1]] = cells[1]
    return found


def shown(value: object) -> str:
    if value == "":
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize("table", TABLES)
def test_every_setting_is_named_with_its_default(table):
    document = "observability.md" if table == "setting" else "delivery.md"
    described = rows(document, table)
    kind = TABLES[table]
    own = set(kind.__struct_fields__) - NOT_ABOUT_DELIVERY[table]
    if kind is not ObservationSettings:
        own -= set(ObservationSettings.__struct_fields__)
    assert set(described) == own
    defaults = kind()
    for name, text in described.items():
        value = getattr(defaults, name)
        if name.endswith("nbytes"):
            assert parse_nbytes(text) == value, name
        else:
            assert text == shown(value), name


def test_every_field_of_the_report_is_described():
    assert set(rows("observability.md", "field")) == set(RefitReport.__struct_fields__)


def test_stages_are_described_in_their_order():
    assert tuple(rows("observability.md", "stage")) == STAGES


def test_every_metric_is_named_with_its_kind():
    described = rows("observability.md", "name")
    assert described == {family.name: family._kind for family in RefitMetrics()._families()}


def test_every_kind_of_line_is_named():
    text = (DOCS / "observability.md").read_text(encoding="utf-8")
    kinds = [kind.__struct_config__.tag for kind in Line.__args__]
    assert len(kinds) >= 5
    for kind in kinds:
        assert f"`{kind}`" in text


@pytest.mark.parametrize("document", ["delivery.md", "observability.md"])
def test_links_lead_somewhere(document):
    text = (DOCS / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (DOCS / target).exists(), target
    assert "MEASURED" not in text
    assert "CAPTION" not in text
