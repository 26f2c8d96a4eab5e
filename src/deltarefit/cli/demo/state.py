"""Raw bytes of a model's parameters and buffers, on disk, so that processes can be compared bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

__all__ = ["Difference", "compare", "read_state", "write_state"]


class Difference(msgspec.Struct, frozen=True):
    """How one dumped state differs from another."""

    tensors: int
    nbytes: int
    differing: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        return not self.differing and self.tensors > 0


def write_state(directory: Path, tensors: Iterable[tuple[str, bytes]]) -> None:
    """Write named raw bytes; one file of bytes and one index."""
    directory.mkdir(parents=True, exist_ok=True)
    index: dict[str, tuple[int, int]] = {}
    with (directory / "state.bin").open("wb") as out:
        for name, data in tensors:
            index[name] = (out.tell(), len(data))
            out.write(data)
    (directory / "state.json").write_bytes(msgspec.json.encode(index))


def read_state(directory: Path) -> dict[str, memoryview]:
    data = memoryview((directory / "state.bin").read_bytes())
    index = msgspec.json.decode((directory / "state.json").read_bytes(), type=dict[str, tuple[int, int]])
    return {name: data[start : start + nbytes] for name, (start, nbytes) in index.items()}


def compare(got: Mapping[str, memoryview], expected: Mapping[str, memoryview]) -> Difference:
    """Byte for byte, over the union of names."""
    differing = tuple(name for name in sorted(got.keys() | expected.keys()) if got.get(name) != expected.get(name))
    return Difference(len(expected), sum(len(data) for data in expected.values()), differing)
