"""Published deltas stay applicable, by us and by a reader that shares no code with us, and we still make the same bytes."""

import importlib.util
import json
from pathlib import Path

import pytest
import zstandard
from checkpoints import files_of, read_back

from deltarefit import offline

HERE = Path(__file__).parent / "vectors"
PAYLOAD_READER = Path(__file__).parents[1] / "vectors" / "payload_reader.py"
ENDS = {
    "delta_v2_difference": ("v0", "v1"),
    "delta_v2_overwrite": ("v1", "v2"),
    "delta_v2_xor": ("v0", "v2"),
    "delta_v2_folded": ("v0", "v2"),
}


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def version(name, directory):
    """A vector's checkpoint as files on disk."""
    path = directory / name
    path.mkdir()
    for file, content in json.loads((HERE / f"{name}.json").read_text()).items():
        (path / file).write_bytes(bytes.fromhex(content))
    return path


def test_all_vectors_are_here():
    assert sorted(path.stem for path in HERE.glob("*.bin")) == sorted(ENDS)


def test_the_reader_is_independent():
    text = (HERE / "delta_reader.py").read_text()
    imports = [line for line in text.splitlines() if line.startswith(("import", "from"))]
    assert imports == ["import hashlib", "import json", "import struct", "import zstandard"]


@pytest.mark.parametrize("name", ENDS)
def test_vector_applies(tmp_path, name):
    base, target = (version(end, tmp_path) for end in ENDS[name])
    offline.apply_deltas(base, [HERE / f"{name}.bin"], tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(target)


@pytest.mark.parametrize("name", ENDS)
def test_independent_reader_applies_it(tmp_path, name):
    base, target = (version(end, tmp_path) for end in ENDS[name])
    tensors = {tensor: data for file in base.glob("*.safetensors") for tensor, (_, _, data) in read_back(file).items()}
    found = load(HERE / "delta_reader.py").apply(
        (HERE / f"{name}.bin").read_bytes(), tensors, files_of(base), load(PAYLOAD_READER).read
    )
    assert found == files_of(target)


@pytest.mark.skipif(zstandard.ZSTD_VERSION != (1, 5, 7), reason="other zstd libraries make other bytes of the same content")
def test_we_still_make_the_same_bytes(tmp_path):
    load(HERE / "make_vectors.py").make(tmp_path)
    for name in ENDS:
        assert (tmp_path / f"{name}.bin").read_bytes() == (HERE / f"{name}.bin").read_bytes(), name
