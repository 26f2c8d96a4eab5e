"""Published payloads stay readable, by us and by a reader that shares no code with us, and we still make the same bytes."""

import importlib.util
import json
from pathlib import Path

import pytest
import zstandard

from deltarefit import kernels
from deltarefit.payload import decode, encode
from deltarefit.records import Encoding

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("payload_*.bin"))


def _load(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _vector(name):
    facts = json.loads((HERE / f"{name}.json").read_text())
    return (HERE / f"{name}.bin").read_bytes(), facts, bytes.fromhex(facts["key"] or "")


def test_all_vectors_are_here():
    assert [f"payload_v2_{name}" for name in ("dtypes", "figure", "keyed", "large", "short", "start")] == NAMES


def test_the_reader_is_independent_and_short():
    text = (HERE / "payload_reader.py").read_text()
    imports = [line for line in text.splitlines() if line.startswith(("import", "from"))]
    assert imports == ["import hashlib", "import struct", "import zstandard"]
    assert len(text.splitlines()) <= 80


@pytest.mark.parametrize("name", NAMES)
def test_independent_reader_finds_what_is_documented(name):
    data, facts, key = _vector(name)
    header, items = _load("payload_reader").read(data, key)
    stated = facts["header"]
    assert header["attempt"].rstrip(b"\0").decode() == stated["attempt"]
    assert header["plan_digest"].hex() == stated["plan_digest"]
    assert all(header[field] == stated[field] for field in ("owner", "sequence", "base_version", "target_version"))
    assert header["num_changed"] == sum(len(item["positions"]) for item in facts["items"])
    assert items == facts["items"]


@pytest.mark.parametrize("name", NAMES)
def test_vector_decodes_to_documented_values(name):
    data, facts, key = _vector(name)
    payload = decode(data, key=key or None)
    assert {field: getattr(payload.header, field) for field in facts["header"]} == facts["header"]
    for item, stated in zip(payload.items, facts["items"], strict=True):
        assert (item.spec.name, item.spec.dtype, list(item.spec.shape)) == (stated["name"], stated["dtype"], stated["shape"])
        assert (item.encoding, item.location_form) == (stated["encoding"], stated["location_form"])
        assert kernels.decode_positions(item).tolist() == stated["positions"]
        words = kernels.decode_values(item)
        if item.encoding is Encoding.DIFFERENCE:
            words = words.view(f"<i{item.spec.element_nbytes}")
        assert words.tolist() == stated["values"]


@pytest.mark.parametrize("name", NAMES)
def test_encoder_still_makes_the_same_bytes(name):
    data, facts, key = _vector(name)
    if list(zstandard.ZSTD_VERSION) != facts["zstd_version"]:
        pytest.skip(f"bytes of frames are pinned for zstd {facts['zstd_version']}, this is {zstandard.ZSTD_VERSION}")
    assert encode(decode(data, key=key or None).items, key=key or None, **facts["header"]) == data
