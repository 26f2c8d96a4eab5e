"""The public surface, pinned: a new name is a decision, not an accident."""

from __future__ import annotations

import subprocess
import sys

import pytest

import deltarefit

PUBLIC = [
    "AttemptFailedError",
    "AuditReport",
    "CommitConflictError",
    "EncodingMode",
    "OperatorRequiredError",
    "Publisher",
    "PublisherSettings",
    "Receiver",
    "ReceiverAgentSettings",
    "RefitError",
    "RefitReport",
    "RejectedError",
    "RelayService",
    "RelayServiceSettings",
    "read_key",
]


def test_public_names_are_pinned():
    assert deltarefit.__all__ == PUBLIC


@pytest.mark.torch
@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves_and_is_documented(name):
    assert (getattr(deltarefit, name).__doc__ or "").strip()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Nothing"):
        _ = deltarefit.Nothing


def test_the_core_imports_without_torch():
    """Numpy, msgspec, zstandard and obstore are all that the core may need (checked in a fresh interpreter)."""
    program = (
        "import sys, deltarefit, deltarefit.payload, deltarefit.protocol, deltarefit.kernels, deltarefit.transport, "
        "deltarefit.control, deltarefit.offline\n"
        "heavy = {'torch', 'vllm', 'transformers', 'safetensors', 'click', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
