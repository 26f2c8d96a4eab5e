"""Memory follows the setting, not the model; positions beyond 2^31 survive. Holes in the files cost no disk."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from deltarefit.offline.safetensors import build_header

PROGRAM = """
import re, sys
from pathlib import Path
from deltarefit.cli import main
try:
    main()
finally:
    # Not ru_maxrss: that also counts the process that started this one, up to the exec.
    sys.stderr.write("peak " + re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def sparse_file(path: Path, tensors: list[tuple[str, str, tuple[int, ...], int]], changes: dict[int, bytes]) -> Path:
    """A file whose tensors are zeros but for some bytes."""
    header = build_header(tensors)
    with path.open("wb") as file:
        file.write(header.prefix)
        file.truncate(header.file_nbytes)
        for byte_offset, data in changes.items():
            file.seek(header.data_offset + byte_offset)
            file.write(data)
    return path


def peak_nbytes(*arguments: object) -> int:
    """Peak resident memory of one command."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return int(done.stderr.rpartition("peak ")[2]) * 1024


@pytest.mark.process
def test_memory_is_bounded_by_the_setting(tmp_path):
    nbytes = 512 * 2**20
    tensors = [("w", "BF16", (nbytes // 2,), nbytes)]
    old = sparse_file(tmp_path / "old", tensors, {})
    # One unit is dense, one sparse, the others are unchanged.
    new = sparse_file(tmp_path / "new", tensors, {2**25: os.urandom(2**24), 2**28: b"\1\0" * 1000})
    # The interpreter with numpy takes about 50 MiB, and the budget is what comes on top.
    bound = (256 + 80) * 2**20
    assert peak_nbytes("diff", old, new, "-o", tmp_path / "d", "--memory", "256MiB") < bound < nbytes
    assert peak_nbytes("verify", old, tmp_path / "d", new, "--memory", "256MiB") < bound
    assert peak_nbytes("fold", tmp_path / "d", "-o", tmp_path / "f", "--memory", "256MiB") < bound


@pytest.mark.slow
@pytest.mark.process
def test_more_than_two_billion_elements(tmp_path):
    count = 2**31 + 8
    tensors = [("a", "BF16", (3,), 6), ("w", "U8", (count,), count)]
    old = sparse_file(tmp_path / "old", tensors, {})
    new = sparse_file(tmp_path / "new", tensors, {6 + 2147483655: b"\xff", 0: struct.pack("<3H", 1, 2, 3)})
    assert peak_nbytes("diff", old, new, "-o", tmp_path / "d") < 2**29
    assert (tmp_path / "d").stat().st_size < 4096
    assert peak_nbytes("apply", old, tmp_path / "d", "--in-place") < 2**29
    with old.open("rb") as left, new.open("rb") as right:
        while block := left.read(2**24):
            assert block == right.read(2**24)
        assert not right.read(1)
    # The words before the change were not written.
    assert old.stat().st_blocks * 512 < 2**28
