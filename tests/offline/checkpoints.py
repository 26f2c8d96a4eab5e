"""Small checkpoints, written with the library's own header builder and read back by the safetensors package."""

import json
from pathlib import Path

import numpy as np
from safetensors import deserialize

from deltarefit.offline.safetensors import build_header

Tensor = tuple[str, tuple[int, ...], bytes]
"""dtype, shape, bytes"""


def tensor(dtype: str, shape: tuple[int, ...], words) -> Tensor:
    return dtype, shape, np.ascontiguousarray(words).tobytes()


def bf16(shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    return tensor("BF16", shape, rng.integers(0, 2**16, int(np.prod(shape)), dtype=np.uint16))


def nudged(old: Tensor, rng: np.random.Generator, rate: float, width: int = 2) -> Tensor:
    """The tensor with some words changed by one."""
    words = np.frombuffer(old[2], f"<u{width}").copy()
    changed = rng.random(words.size) < rate
    words[changed] += np.ones(1, words.dtype)
    return old[0], old[1], words.tobytes()


def write_file(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    header = build_header([(name, dtype, shape, len(data)) for name, (dtype, shape, data) in tensors.items()], metadata)
    path.write_bytes(header.prefix + b"".join(data for _, _, data in tensors.values()))
    return path


def write_sharded(
    directory: Path,
    shards: list[dict[str, Tensor]],
    *,
    companions: dict[str, bytes] | None = None,
    metadata: dict[str, str] | None = None,
) -> Path:
    directory.mkdir(parents=True)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(directory / name, shard, metadata or {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
    nbytes = sum(len(data) for shard in shards for _, _, data in shard.values())
    index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for name, content in (companions or {}).items():
        (directory / name).write_bytes(content)
    return directory


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, hidden ones included."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def read_back(path: Path) -> dict[str, Tensor]:
    """A file's tensors as the safetensors package reads them."""
    return {name: (view["dtype"], tuple(view["shape"]), bytes(view["data"])) for name, view in deserialize(path.read_bytes())}
