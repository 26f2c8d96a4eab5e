"""Documents name settings, fields, stages and metrics as the code has them, and their links lead somewhere."""

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
)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "src").rglob("*.md")])


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


def fields(kind: type) -> set[str]:
    return set(kind.__struct_fields__) | {name for name, value in vars(kind).items() if isinstance(value, property)}


def test_the_settings_that_the_page_speaks_of_exist():
    section = (DOCS / "delivery.md").read_text(encoding="utf-8").partition("## What bounds memory")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", section))
    assert len(named) > 8
    known = {
        name for kind in (PublisherSettings, ReceiverAgentSettings, RelayServiceSettings) for name in kind.__struct_fields__
    }
    assert named <= known


@pytest.mark.parametrize("name", ObservationSettings.__struct_fields__)
def test_every_setting_of_observation_is_explained(name):
    described = rows("observability.md", "setting")
    assert set(described) == set(ObservationSettings.__struct_fields__)
    value = getattr(ObservationSettings(), name)
    assert described[name] == {"": "–", False: "false"}[value]


def test_every_field_of_the_report_is_described():
    assert set(rows("observability.md", "field")) == fields(RefitReport)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """To a file that exists and, within the documents, to a heading that it has."""
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#: ]*)(?:#([^) ]*))?\)", text):
        goal = page.parent / target if target else page
        assert goal.exists(), target
        if anchor:
            assert anchor in anchors(goal), f"{target}#{anchor}"
    assert "MEASURED" not in text
    assert "CAPTION" not in text


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_file_that_a_document_names_exists():
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        rooms = (ROOT, ROOT / "src", ROOT / "src" / "deltarefit", page.parent)
        named = re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|pml|json|svg))`", text)
        missing += [(page.name, name) for name in named if not any((room / name).exists() for room in rooms)]
        missing += [(page.name, name) for name in re.findall(r"`(test_\w+)(?:\.py)?`", text) if name not in tests]
    assert missing == []


def test_code_names_only_documents_that_are_here():
    """A reader of a comment must be able to open what it points to."""
    known = {page.name for page in PAGES}
    code = [path for room in ("src", "tests", "tools", "benchmarks") for path in (ROOT / room).rglob("*")]
    read = [path for path in code if path.suffix in {".py", ".inc", ".h", ".cpp", ".pml"}]
    assert len(read) > 300
    missing = {
        (path.name, name)
        for path in read
        for name in re.findall(r"[\w./-]*?([\w-]+\.md)\b", path.read_text(encoding="utf-8"))
        if name not in known
    }
    assert missing == set()
