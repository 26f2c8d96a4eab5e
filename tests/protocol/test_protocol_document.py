"""PROTOCOL.md says what the tables say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import deltarefit.protocol
from deltarefit.protocol import NEXT_STATE, ReceptionSettings, Signal, TransitionState, Verdict
from deltarefit.protocol.lease import DRIFT
from deltarefit.protocol.record import CONTROL_FORMAT, RECENT_NONCES

ROOT = Path(__file__).parents[2]
DOCUMENT = Path(deltarefit.protocol.__file__).with_name("PROTOCOL.md")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_protocol", ROOT / "tools" / "draw_protocol.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_drawn_parts_are_current(tool: ModuleType) -> None:
    assert tool.main(["--check"]) == 0, "run: python tools/draw_protocol.py"


def test_a_changed_table_would_be_noticed(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {state: dict(edges) for state, edges in NEXT_STATE.items()}
    changed[TransitionState.RUNNING][Signal.FAILED] = TransitionState.PREPARING
    monkeypatch.setattr(tool, "NEXT_STATE", changed)
    assert tool.main(["--check"]) == 1


def test_the_document_names_every_verdict_and_the_constants_it_states() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for verdict in Verdict:
        assert verdict.name in text
    assert f"Format {CONTROL_FORMAT} of the control record" in text
    assert RECENT_NONCES == 16, "the document says: the last sixteen"
    assert DRIFT == 0.1, "the document says: 10 %, and 0.9 lease_s"
    assert ReceptionSettings().queue_slots == 32 * 8 + 8


def test_every_name_of_code_in_the_document_exists() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for module, name in re.findall(r"`(commit|record)\.(\w+)`", text):
        if name != "py":
            assert hasattr(importlib.import_module(f"deltarefit.protocol.{module}"), name), f"{module}.{name}"
    for owner, name in re.findall(r"`(Reception|OwnerMachine|Resident)\.(\w+)`", text):
        assert hasattr(getattr(deltarefit.protocol, owner), name), f"{owner}.{name}"
    for file in re.findall(r"`(\w+\.py)`", text):
        places = (DOCUMENT.parent, ROOT / "tests" / "protocol", ROOT / "tests" / "conformance", ROOT / "tools")
        assert any((place / file).exists() for place in places), file
