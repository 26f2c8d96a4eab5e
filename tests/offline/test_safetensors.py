"""The safetensors reader refuses what the format forbids, one test per refusal, and reads what the reference writes."""

import json
import os

import numpy as np
import pytest
import safetensors
from checkpoints import bf16, read_back, tensor, write_file
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from deltarefit.errors import RejectedError
from deltarefit.offline import safetensors as room
from deltarefit.offline.safetensors import build_header, parse_header, read_header


def header(document: object) -> bytes:
    return json.dumps(document).encode()


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def open_and_read(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd, str(path))
    finally:
        os.close(fd)


def test_reads_what_the_reference_writes(tmp_path):
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array(True), "e": np.zeros((0, 4), np.int64)}
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(tensors, metadata={"format": "np", "ünïcode": "✓"}))
    found = open_and_read(path)
    assert {(t.name, t.dtype, t.shape) for t in found.tensors} == {
        ("b", "F32", (2, 3)),
        ("a", "BOOL", ()),
        ("e", "I64", (0, 4)),
    }
    assert found.file_nbytes == path.stat().st_size
    assert path.read_bytes().startswith(found.prefix)


def test_reference_reads_what_we_write(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "w": bf16((3, 5), rng),
        "scalar": tensor("F64", (), rng.random(1)),
        "empty": ("F16", (0, 7), b""),
        "f8": tensor("F8_E4M3", (4,), rng.integers(0, 256, 4, dtype=np.uint8)),
        "f8b": tensor("F8_E5M2", (4,), rng.integers(0, 256, 4, dtype=np.uint8)),
        "ünï ✓": tensor("BOOL", (2,), np.array([True, False])),
    }
    path = write_file(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    assert read_back(path) == tensors
    assert open_and_read(path).data_offset % 8 == 0


@pytest.mark.parametrize(
    ("raw", "data_nbytes", "text"),
    [
        pytest.param(b"", 0, "expected '{'", id="empty"),
        pytest.param(b" {}", 0, "expected '{'", id="leading space"),
        pytest.param(b"[]", 0, "expected '{'", id="a list"),
        pytest.param(b"{\xff}", 0, "strict UTF-8 JSON", id="not UTF-8"),
        pytest.param(b'{"a": ', 0, "strict UTF-8 JSON", id="cut"),
        pytest.param(b"{}x", 0, "strict UTF-8 JSON", id="tail"),
        pytest.param(b'{"a":' + b"[" * 100_000, 0, "strict UTF-8 JSON", id="deep"),
        pytest.param(b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}', 8, "NaN is not JSON", id="NaN"),
        pytest.param(
            header({"a": entry()})[:-1] + b', "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
            8,
            "'a' stands twice",
            id="repeated tensor",
        ),
        pytest.param(
            b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
            8,
            "stands twice",
            id="repeated key",
        ),
        pytest.param(header({"__metadata__": {"a": 1}}), 0, "map text to text", id="metadata value"),
        pytest.param(header({"__metadata__": []}), 0, "map text to text", id="metadata list"),
        pytest.param(header({"": entry()}), 8, "name has 0 bytes", id="empty name"),
        pytest.param(header({"x" * 65536: entry()}), 8, "name has 65536 bytes", id="long name"),
        pytest.param(b'{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', 8, "not Unicode", id="surrogate"),
        pytest.param(header({"a": 1}), 0, "expected exactly dtype", id="entry is a number"),
        pytest.param(header({"a": {"dtype": "F32", "shape": [2]}}), 8, "expected exactly dtype", id="missing key"),
        pytest.param(header({"a": {**entry(), "extra": 1}}), 8, "expected exactly dtype", id="unknown key"),
        pytest.param(header({"a": entry(dtype=7)}), 8, "not a dtype's name", id="dtype is a number"),
        pytest.param(header({"a": entry(shape=(-2,))}), 8, "not a shape", id="negative dimension"),
        pytest.param(header({"a": entry(shape=(2.0,))}), 8, "not a shape", id="fractional dimension"),
        pytest.param(header({"a": entry(shape=(True, 2))}), 8, "not a shape", id="boolean dimension"),
        pytest.param(header({"a": entry(shape=(2**40, 2**40))}), 8, "not a shape", id="too many elements"),
        pytest.param(header({"a": entry(offsets=(8, 0))}), 8, "begin and an end", id="backwards"),
        pytest.param(header({"a": entry(offsets=(0, 4, 8))}), 8, "begin and an end", id="three offsets"),
        pytest.param(header({"a": entry(offsets=(-8, 0))}), 8, "begin and an end", id="negative offset"),
        pytest.param(header({"a": entry(offsets=(0, 4))}), 4, "expected 8 for F32", id="wrong size"),
        pytest.param(header({"a": entry(), "b": entry(offsets=(4, 12))}), 12, "overlaps", id="overlap"),
        pytest.param(header({"a": entry(), "b": entry()}), 8, "overlaps", id="same bytes"),
        pytest.param(header({"a": entry(), "b": entry(offsets=(12, 20))}), 20, "leaves a hole", id="hole"),
        pytest.param(header({"a": entry(offsets=(4, 12))}), 12, "leaves a hole", id="hole at the start"),
        pytest.param(header({"a": entry()}), 7, "cut short or has a tail", id="cut data"),
        pytest.param(header({"a": entry()}), 9, "cut short or has a tail", id="tail of data"),
        pytest.param(header({"a": entry("F4", (3,), (0, 2))}), 2, "no width", id="unknown dtype, half bits"),
        pytest.param(header({"a": entry("F4", (0,), (0, 2))}), 2, "no width", id="unknown dtype, bytes of nothing"),
        pytest.param(header({"a": entry("F4", (3,), (0, 0))}), 0, "no width", id="unknown dtype, no bytes"),
    ],
)
def test_refuses(raw, data_nbytes, text):
    with pytest.raises(RejectedError, match=text):
        parse_header(raw, data_nbytes, "x.safetensors")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "begins with 8 bytes"),
        (b"1234567", "begins with 8 bytes"),
        ((100).to_bytes(8, "little") + b"{}", "cut short"),
        ((2**63).to_bytes(8, "little") + b"{}", "at most 100000000"),
    ],
)
def test_refuses_file(tmp_path, content, text):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(RejectedError, match=text):
        open_and_read(path)


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes", "width"),
    [
        ("F4", (3, 4), 6, 1),
        ("F6_E2M3", (8,), 6, 1),
        ("C128", (2,), 32, 8),
        ("X24", (2,), 6, 1),
        ("X48", (2,), 12, 2),
        ("Y16", (3,), 6, 2),
        ("Y16", (0,), 0, 1),
        ("BF16", (3,), 6, 2),
        ("C64", (1,), 8, 8),
    ],
)
def test_width_follows_from_dtype_or_size(dtype, shape, nbytes, width):
    (found,) = build_header([("a", dtype, shape, nbytes)]).tensors
    assert found.word_nbytes == width
    assert found.num_words * width == nbytes


def test_two_hundred_thousand_names():
    names = [f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.down_proj.weight_scale_inv" for i in range(200_000)]
    built = build_header((name, "F32", (1,), 4) for name in names)
    assert len(built.tensors) == 200_000
    assert 8 + len(built.raw) == built.data_offset < room.MAX_HEADER_NBYTES


@given(st.binary(max_size=200), st.integers(0, 50))
def test_any_bytes_are_read_or_refused(raw, data_nbytes):
    try:
        parse_header(b"{" + raw, data_nbytes, "x")
    except RejectedError:
        return


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.one_of(
            st.none(),
            st.fixed_dictionaries(
                {
                    "dtype": st.sampled_from(["F32", "U8", "F4"]),
                    "shape": st.lists(st.integers(-1, 3), max_size=2),
                    "data_offsets": st.lists(st.integers(-1, 20), min_size=1, max_size=3),
                }
            ),
        ),
        max_size=3,
    ),
    st.integers(0, 20),
)
def test_never_laxer_than_the_reference(document, data_nbytes):
    raw = header(document)
    try:
        found = parse_header(raw, data_nbytes, "x")
    except RejectedError:
        return
    views = dict(safetensors.deserialize(found.prefix + bytes(data_nbytes)))
    if "F4" not in {t.dtype for t in found.tensors}:
        assert {name: tuple(view["shape"]) for name, view in views.items()} == {t.name: t.shape for t in found.tensors}
