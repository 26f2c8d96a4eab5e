"""Rules that no linter knows: who may touch what, and which words do not belong in core code."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import deltarefit

ROOT = Path(deltarefit.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
# The demo, the benches and the tiny checkpoints train and name real architectures; that is what they are for.
MAY_NAME_MODELS = ("cli/demo", "cli/conformance", "testing")
# Adapters, and programs that train for real: the demo and the kill matrix.
MAY_USE_PROCESS_GROUPS = ("integrations/", "cli/demo", "testing/")
ARCHITECTURES = re.compile(r"qwen|llama|deepseek|nemotron|jamba|granite|gemma|mixtral|gpt_?oss", re.IGNORECASE)


def room(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def called_names(path: Path) -> set[str]:
    return {node.func.id for node in ast.walk(tree(path)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def words(path: Path) -> Iterator[str]:
    """Names and strings of the code; not its docstrings and comments, which may name what was measured."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value and " " not in node.value
        ):
            yield node.value


def test_the_rules_see_the_package():
    assert len(MODULES) > 100
    assert "numpy" in set(imports(ROOT / "canonical.py"))
    assert "Catalog" in set(words(ROOT / "canonical.py"))


def test_process_groups_only_where_training_is_known():
    bound = [path for path in MODULES if not room(path).startswith(MAY_USE_PROCESS_GROUPS)]
    assert [room(path) for path in bound if any(name.startswith("torch.distributed") for name in imports(path))] == []


def test_nothing_is_unpickled_or_evaluated():
    picklers = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
    assert [room(path) for path in MODULES if picklers & set(imports(path))] == []
    assert [room(path) for path in MODULES if {"eval", "exec"} & called_names(path)] == []


def test_core_code_names_no_model():
    bound = [path for path in MODULES if not room(path).startswith(MAY_NAME_MODELS)]
    assert {room(path): found for path in bound if (found := [w for w in words(path) if ARCHITECTURES.search(w)])} == {}


def test_outside_data_is_not_checked_by_assert():
    bound = [path for path in MODULES if not room(path).startswith("testing/")]  # conformance suites assert, as tests do
    assert [room(path) for path in bound if any(isinstance(node, ast.Assert) for node in ast.walk(tree(path)))] == []
