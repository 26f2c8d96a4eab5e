"""The Promela model holds in every interleaving, and finds every planted bug. Needs spin (Debian package) and a C compiler."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[2] / "tools" / "model" / "refit.pml"
COMPILER = shutil.which("cc") or shutil.which("gcc")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("spin") is None or COMPILER is None, reason="needs spin and a C compiler"),
]


def check(folder: Path, *defines: str) -> tuple[int, str]:
    """Errors found in the whole state space, and what was violated."""
    flags = [f"-D{name}" for name in ("NUM_ATTEMPTS=2", *defines)]
    subprocess.run(["spin", *flags, "-a", str(MODEL)], cwd=folder, check=True, capture_output=True, timeout=60)
    compiler = [str(COMPILER), "-w", "-O2", "-DSAFETY", "-o", "pan", "pan.c"]
    subprocess.run(compiler, cwd=folder, check=True, capture_output=True, timeout=120)
    output = subprocess.run(["./pan", "-m100000"], cwd=folder, check=True, capture_output=True, text=True, timeout=300).stdout
    assert "max search depth too small" not in output
    errors = re.search(r"errors: (\d+)", output)
    assert errors is not None, output
    violated = re.search(r"pan:1: (.*?) \(at depth", output)
    return int(errors[1]), violated[1] if violated else ""


def test_the_protocol_holds_in_every_interleaving(tmp_path: Path) -> None:
    assert check(tmp_path) == (0, "")


@pytest.mark.parametrize(
    ("defines", "invariant"),
    [
        (("NO_FENCE",), "!(answered[attempt])"),
        (("FENCE_IGNORED",), "!(answered[attempt])"),
        (("NO_STOP", "QUIET"), "r_completed"),
        (("EARLY_COMMIT",), "r_completed"),
        (("NO_EPOCH",), "bound_epoch==epoch"),
        (("MIXED_RETRY",), "r_bits"),
        (("STALE_PREPARE",), "r_completed"),
        (("BLIND_REOPEN",), "assertion violated 0"),
        (("CLAIM_FIRST_NEVER_COMMITS",), "epoch!=1"),
        (("CLAIM_SECOND_NEVER_COMMITS",), "epoch!=2"),
        (("CLAIM_NO_RETRY_COMMITS",), "attempt==1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_a_planted_bug_or_a_false_claim_is_found(tmp_path: Path, defines: tuple[str, ...], invariant: str) -> None:
    errors, violated = check(tmp_path, *defines)
    assert errors == 1
    assert invariant in violated
