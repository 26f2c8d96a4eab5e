"""Rules that no linter knows: who may touch what, and which words do not belong in core code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import deltarefit

ROOT = Path(deltarefit.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
# The demo and the tiny checkpoints train and name real architectures; that is what they are for.
NAMES_MODELS = {"cli/demo", "testing"}
ARCHITECTURES = re.compile(r"qwen|llama|deepseek|nemotron|jamba|granite|gemma|mixtral|gpt_?oss", re.IGNORECASE)
GROUPS = {"integrations/torch", "integrations/fsdp", "integrations/megatron", "cli/demo"}


def room(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def code_words(path: Path) -> str:
    """The module without comments and docstrings: what it does, not what it says."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [
                item
                for item in body
                if not (
                    isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)
                )
            ] or [ast.Pass()]
    return ast.unparse(tree)


@pytest.mark.parametrize("path", MODULES, ids=room)
def test_process_groups_only_in_integrations(path):
    if any(room(path).startswith(allowed) for allowed in GROUPS):
        return
    assert not [name for name in imports(path) if name.startswith("torch.distributed")]


@pytest.mark.parametrize("path", MODULES, ids=room)
def test_nothing_is_unpickled_or_evaluated(path):
    names = set(imports(path))
    assert not names & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"eval", "exec"}


@pytest.mark.parametrize("path", MODULES, ids=room)
def test_core_code_names_no_model(path):
    if any(room(path).startswith(allowed) for allowed in NAMES_MODELS):
        return
    assert not ARCHITECTURES.findall(code_words(path))


@pytest.mark.parametrize("path", MODULES, ids=room)
def test_outside_data_is_not_checked_by_assert(path):
    if room(path).startswith("testing"):
        return  # conformance suites assert, as tests do
    asserts = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
    assert not asserts
