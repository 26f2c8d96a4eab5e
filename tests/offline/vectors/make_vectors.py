"""Write the delta vectors: ``python tests/offline/vectors/make_vectors.py``. For a new format version only.

The bytes of published vectors never change: a tool that no longer applies one has broken the format.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from checkpoints import bf16, files_of, nudged, tensor, write_sharded  # noqa: E402

from deltarefit import offline  # noqa: E402
from deltarefit.records import Encoding  # noqa: E402


def make(directory: Path) -> None:
    """Three versions, the two deltas between them and their fold."""
    rng = np.random.default_rng(2026)
    first = {
        "a.weight": bf16((40, 30), rng),
        "b.scale": tensor("F32", (7,), rng.random(7, np.float32)),
        "c.packed": tensor("F4", (9, 6), rng.integers(0, 256, 27, dtype=np.uint8)),
        "d.gone": tensor("I64", (3,), np.arange(3)),
        "e.ä": tensor("F8_E4M3", (11,), rng.integers(0, 256, 11, dtype=np.uint8)),
    }
    second = {
        **first,
        "a.weight": nudged(first["a.weight"], rng, 0.1),
        "c.packed": nudged(first["c.packed"], rng, 0.5, width=1),
    }
    del second["d.gone"]
    second["f.new"] = bf16((5, 5), rng)
    third = {**second, "a.weight": nudged(second["a.weight"], rng, 0.1), "b.scale": tensor("F64", (7,), rng.random(7))}
    third["f.new"] = ("BF16", (7, 5), second["f.new"][2] + rng.bytes(20))
    companions = {"config.json": b'{"x": 1}', "tokenizer.json": b"t" * 40}
    versions = [directory / f"v{number}" for number in range(3)]
    write_sharded(versions[0], [first], companions=companions)
    write_sharded(
        versions[1],
        [{n: second[n] for n in sorted(second)[:2]}, {n: second[n] for n in sorted(second)[2:]}],
        companions=companions,
    )
    write_sharded(versions[2], [third], companions={**companions, "config.json": b'{"x": 2}'}, metadata={"step": "2"})
    offline.diff_checkpoints(versions[0], versions[1], directory / "delta_v2_difference.bin")
    offline.diff_checkpoints(versions[1], versions[2], directory / "delta_v2_overwrite.bin", encoding=Encoding.OVERWRITE)
    offline.diff_checkpoints(versions[0], versions[2], directory / "delta_v2_xor.bin", encoding=Encoding.XOR)
    chain = [directory / "delta_v2_difference.bin", directory / "delta_v2_overwrite.bin"]
    offline.fold_deltas(chain, directory / "delta_v2_folded.bin")
    for version in versions:
        content = {name: data.hex() for name, data in files_of(version).items()}
        (directory / f"{version.name}.json").write_text(json.dumps(content, indent=1) + "\n")
        shutil.rmtree(version)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        make(Path(temporary))
        for made in Path(temporary).iterdir():
            shutil.copy(made, HERE / made.name)
