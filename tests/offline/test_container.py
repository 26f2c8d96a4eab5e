"""The delta file: its format is what FORMAT.md says, and no cut, altered or contradictory file is taken for a delta."""

import re
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard
from checkpoints import bf16, nudged, write_file
from hypothesis import given, settings
from hypothesis import strategies as st

from deltarefit import offline, payload
from deltarefit.errors import PayloadInvalidError, RefitError, RejectedError
from deltarefit.offline import container, grid
from deltarefit.offline.container import HEAD, Delta, DeltaWriter, digest_of
from deltarefit.offline.grid import Grid
from deltarefit.offline.manifest import FileRow, Manifest, TensorState, check
from deltarefit.offline.safetensors import build_header


@pytest.fixture
def delta(tmp_path):
    rng = np.random.default_rng(0)
    old = {"a": bf16((60,), rng), "b": bf16((9,), rng), "gone": bf16((5,), rng)}
    new = {"a": nudged(old["a"], rng, 0.5), "b": old["b"], "new": bf16((5,), rng)}
    write_file(tmp_path / "old", old)
    write_file(tmp_path / "new", new)
    offline.diff_checkpoints(tmp_path / "old", tmp_path / "new", tmp_path / "delta")
    return tmp_path / "delta"


def refused(path: Path) -> str:
    with pytest.raises(RefitError) as error:
        offline.inspect_delta(path)
    return str(error.value)


def test_every_cut_is_refused(delta):
    data = delta.read_bytes()
    for end in (*range(100), *range(100, len(data), 23), len(data) - 1):
        delta.write_bytes(data[:end])
        assert re.search("cut short|never finished", refused(delta)), end
    delta.write_bytes(data + b"x")
    assert "something follows it" in refused(delta)


@pytest.mark.parametrize(
    ("version", "advice"),
    [(1, "make it again with 'deltarefit diff', or apply it with the build that made it"), (3, "upgrade this build")],
)
def test_a_delta_of_another_version_is_refused_with_what_to_do(delta, tmp_path, version, advice):
    """Version 1 has payloads of another format within."""
    data = bytearray(delta.read_bytes())
    struct.pack_into("<H", data, 8, version)
    delta.write_bytes(data)
    said = f"{delta}: a delta of format version {version}, this build reads 2: {advice}; nothing was applied"
    assert refused(delta) == said
    with pytest.raises(PayloadInvalidError, match=re.escape(said)):
        offline.apply_deltas(tmp_path / "old", [delta], tmp_path / "out")


def test_every_altered_byte_is_refused_before_anything_is_written(delta, tmp_path):
    data = delta.read_bytes()
    for at in range(0, len(data), 3):
        delta.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(PayloadInvalidError):
            offline.apply_deltas(tmp_path / "old", [delta], tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new", "delta"}


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.delta"
    for content in (data, container.MAGIC + data):
        path.write_bytes(content)
        refused(path)


def streamed(content: bytes) -> bytes:
    writer = zstandard.ZstdCompressor().compressobj()
    return writer.compress(content) + writer.flush()


def rewritten(delta: Path, change, *, text=None, compress=zstandard.compress, claims=0) -> Path:
    """The delta with another manifest under digests that fit it: what only a hostile hand would make."""
    data = delta.read_bytes()
    offset = struct.unpack_from("<Q", data, 16)[0]
    document = msgspec.json.decode(zstandard.ZstdDecompressor().decompress(data[offset:], max_output_size=2**20))
    change(document)
    text = msgspec.json.encode(document) if text is None else text
    frame = compress(text)
    raw_nbytes = len(text) + claims
    fields = (container.MAGIC, container.FORMAT_VERSION, 0, 0, offset, len(frame), raw_nbytes, bytes.fromhex(digest_of(frame)))
    head = HEAD.pack(*fields, bytes(16))[:-16]
    delta.write_bytes(head + bytes.fromhex(digest_of(head)) + data[HEAD.size : offset] + frame)
    return delta


def set_at(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(document):
        for key in keys:
            document = document[key]
        document[last] = value

    return change


def test_rewriting_without_a_change_is_accepted(delta):
    offline.inspect_delta(rewritten(delta, lambda _: None))


def test_a_manifest_that_a_streaming_encoder_compressed_is_read_under_the_same_limit(delta):
    shown = offline.inspect_delta(delta)
    assert offline.inspect_delta(rewritten(delta, lambda _: None, compress=streamed)).files == shown.files
    assert "bytes decompressed, expected" in refused(rewritten(delta, lambda _: None, compress=streamed, claims=1))
    assert "not one whole zstd frame" in refused(rewritten(delta, lambda _: None, compress=streamed, claims=-1))
    assert "cannot hold" in refused(rewritten(delta, lambda _: None, compress=streamed, claims=2**29))


NAME, BASE, TARGET, CARRIED, SENT = range(5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param(set_at("base", "0" * 32), "base is 0", id="base"),
        pytest.param(set_at("target", "x"), "target is x", id="target"),
        pytest.param(set_at("layout", "heap"), "heap", id="layout"),
        pytest.param(set_at("surprise", 1), "surprise", id="unknown field"),
        pytest.param(set_at("plan", "zz"), "plan: digest 'zz'", id="plan"),
        pytest.param(lambda d: d["tensors"].reverse(), "name order", id="order"),
        pytest.param(lambda d: d["tensors"].append(d["tensors"][-1]), "name order", id="twice"),
        pytest.param(set_at("tensors", 0, SENT, -1), "negative count", id="negative"),
        pytest.param(set_at("tensors", 0, SENT, 61), "sends 61 of 60", id="too many"),
        pytest.param(set_at("tensors", 0, BASE, None), "is carried", id="carried from nothing"),
        pytest.param(lambda d: d["tensors"][0].__setitem__(slice(1, 3), [None, None]), "on neither side", id="neither"),
        pytest.param(set_at("tensors", 0, TARGET, 2, 118), "118 bytes", id="wrong size"),
        pytest.param(set_at("tensors", 0, TARGET, 3, "xyz"), "not 32 hex digits", id="digest"),
        pytest.param(set_at("tensors", 0, TARGET, 1, [-60]), "no such dtype or shape", id="negative shape"),
        pytest.param(set_at("tensors", 0, TARGET, 0, "F16"), "carried", id="carried over dtypes"),
        pytest.param(set_at("files", 0, 0, "../x"), "plain visible name", id="escaping name"),
        pytest.param(set_at("files", 0, 0, "a/b"), "plain visible name", id="name with directory"),
        pytest.param(set_at("files", 0, 0, ".hidden"), "plain visible name", id="hidden name"),
        pytest.param(set_at("files", 0, 1, False), "no file holds tensors", id="no tensors"),
        pytest.param(set_at("files", 0, 4, 3), "blob 3 of 1", id="blob out of range"),
        pytest.param(set_at("files", 0, 4, None), "no header", id="no header"),
        pytest.param(set_at("files", []), "a single file, but 0", id="no files"),
        pytest.param(set_at("files", 0, 3, "0" * 32), "expected 0{32}", id="file digest"),
        pytest.param(set_at("files", 0, 2, 5), "covers? ", id="file size"),
        pytest.param(set_at("blobs", 0, 2, 10**9), "at most 100000000", id="blob too large"),
        pytest.param(set_at("blobs", 0, 2, 5), "expected 5", id="blob of another size"),
        pytest.param(set_at("blobs", 0, 0, 0), "section of 0 bytes", id="empty section"),
        pytest.param(set_at("payloads", 0, 0, 10), "its parts end at byte", id="parts do not add up"),
        pytest.param(set_at("payloads", 0, 3, 99), "within 3 expected", id="slices past the end"),
        pytest.param(set_at("payloads", 0, 2, 1), "no such tensor among|belongs to another", id="slices left out"),
        pytest.param(set_at("payloads", 0, 3, 0), "payload for slices 0 to 0", id="no slices"),
    ],
)
def test_contradictions_are_refused(delta, tmp_path, change, text):
    rewritten(delta, change)
    with pytest.raises(PayloadInvalidError, match=text):
        offline.apply_deltas(tmp_path / "old", [delta], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b"{}", b"[" * 10_000])
def test_manifest_that_is_none(delta, text):
    rewritten(delta, lambda _: None, text=text or b" ")
    assert "manifest is invalid" in refused(delta)


def test_lying_sizes_are_refused_before_anything_is_allocated(delta):
    data = bytearray(delta.read_bytes())
    for position, value in ((16, 2**63), (24, 2**63), (32, 2**40), (32, 0)):
        changed = data.copy()
        struct.pack_into("<Q", changed, position, value)
        head = bytes(changed[: HEAD.size - 16])
        changed[HEAD.size - 16 : HEAD.size] = bytes.fromhex(digest_of(head))
        delta.write_bytes(changed)
        assert "nothing was applied" in refused(delta)


def test_frame_that_states_another_size_is_refused(delta):
    def change(document):
        document["tensors"] = document["tensors"]

    rewritten(delta, change)
    data = bytearray(delta.read_bytes())
    struct.pack_into("<Q", data, 32, struct.unpack_from("<Q", data, 32)[0] + 1)
    head = bytes(data[: HEAD.size - 16])
    data[HEAD.size - 16 : HEAD.size] = bytes.fromhex(digest_of(head))
    delta.write_bytes(data)
    assert "zstd frame states" in refused(delta)


def test_payload_of_another_delta_is_refused(tmp_path):
    """Same layout of slices, other tensors' names: only the plan digest tells them apart."""
    rng = np.random.default_rng(0)
    for name in "xy":
        write_file(tmp_path / f"old{name}", {name: bf16((60,), rng)})
        write_file(tmp_path / f"new{name}", {name: bf16((60,), rng)})
        offline.diff_checkpoints(tmp_path / f"old{name}", tmp_path / f"new{name}", tmp_path / name)
    with Delta(tmp_path / "x") as x, Delta(tmp_path / "y") as y, (tmp_path / "z").open("wb") as file:
        writer = DeltaWriter(file.fileno())
        writer.add_payload(y.section(0), 0, 1)
        writer.add_frame(x.frame(0), x.manifest.blobs[0].content_nbytes)
        writer.finish(msgspec.structs.replace(x.manifest, payloads=tuple(writer.payloads), blobs=tuple(writer.blobs)))
    with pytest.raises(PayloadInvalidError, match="belongs to another delta"):
        offline.apply_deltas(tmp_path / "oldx", [tmp_path / "z"], tmp_path / "out")


def test_huge_claims_cost_nothing():
    """A grid is arithmetic: a manifest that claims 2^61 bytes does not allocate for them."""
    state = TensorState("F64", (2**58,), 2**61, "0" * 32)
    tensors = Grid({"a": state, "b": state})
    assert len(tensors) == 2 * 2**61 // grid.SLICE_NBYTES
    last = tensors.slice(len(tensors) - 1)
    assert (last.name, last.first_word + last.num_words) == ("b", 2**58)


def test_grid_skips_empty_tensors():
    empty, full = TensorState("F32", (0,), 0, ""), TensorState("BF16", (3,), 6, "")
    tensors = Grid({"a": empty, "b": full, "c": empty, "d": full, "e": empty})
    assert [piece.name for piece in tensors.range(0, len(tensors))] == ["b", "d"]
    assert [list(tensors.of(name)) != [] for name in "abcde"] == [False, True, False, True, False]


FORMAT = Path(container.__file__).with_name("FORMAT.md").read_text()


def test_format_document_holds_the_constants():
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", FORMAT, re.MULTILINE)
    offset = 0
    expected = []
    for name, code in container.HEAD_FIELDS:
        nbytes = struct.calcsize("<" + code)
        expected.append((str(offset), str(nbytes), name))
        offset += nbytes
    assert rows == expected
    assert offset == HEAD.size
    for name, value in (
        ("format version", container.FORMAT_VERSION),
        ("payload format version", payload.FORMAT_VERSION),
        ("magic", container.MAGIC.hex(" ")),
        ("personalisation", container.DIGEST_PERSON.decode()),
        ("slice bytes", grid.SLICE_NBYTES),
        ("largest manifest", container.MAX_MANIFEST_NBYTES),
    ):
        assert f"| {name} | `{value}` |" in FORMAT, name
    for struct_type in (
        Manifest,
        TensorState,
        *(getattr(container, name) for name in ("PayloadRow", "BlobRow", "FileRow", "TensorRow")),
    ):
        for field in struct_type.__struct_fields__:
            assert f"`{field}`" in FORMAT, (struct_type, field)


def test_names_are_checked_in_a_new_manifest_too(delta):
    with Delta(delta) as opened:
        broken = msgspec.structs.replace(opened.manifest, plan="x")
    with pytest.raises(PayloadInvalidError):
        check(broken, "new delta")


def test_not_a_file(tmp_path):
    with pytest.raises(RejectedError, match="not a regular file"):
        Delta(tmp_path)


def with_header(delta: Path, raw: bytes, nbytes: int) -> Path:
    """The delta with another header text for its tensor file, under digests that fit it."""
    copy = delta.with_name("copy")
    with Delta(delta) as opened, copy.open("wb") as file:
        writer = DeltaWriter(file.fileno())
        for number, row in enumerate(opened.manifest.payloads):
            writer.add_payload(opened.section(number), row.first_slice, row.end_slice)
        blob = writer.add_blob(raw)
        row = FileRow("model.safetensors", True, nbytes, digest_of(raw), blob)
        changed = msgspec.structs.replace(
            opened.manifest, files=(row,), payloads=tuple(writer.payloads), blobs=tuple(writer.blobs)
        )
        writer.finish(changed)
    return copy


def test_header_and_manifest_must_agree(delta, tmp_path):
    specs = [("a", "BF16", (60,), 120), ("b", "BF16", (9,), 18), ("new", "BF16", (5,), 10)]
    same = build_header(specs)
    offline.inspect_delta(with_header(delta, same.raw, same.file_nbytes))
    for wrong in (
        [*specs, ("more", "BF16", (1,), 2)],
        specs[:2],
        [("a", "F16", (60,), 120), *specs[1:]],
        [("a", "BF16", (6, 10), 120), *specs[1:]],
    ):
        header = build_header(wrong)
        with pytest.raises(PayloadInvalidError, match="in a header"):
            offline.apply_deltas(tmp_path / "old", [with_header(delta, header.raw, header.file_nbytes)], tmp_path / "out")
    with pytest.raises(PayloadInvalidError, match="strict UTF-8 JSON"):
        offline.apply_deltas(tmp_path / "old", [with_header(delta, b"{", same.file_nbytes)], tmp_path / "out")


def test_a_tensor_in_two_files_is_refused(delta, tmp_path):
    raw = build_header([("a", "BF16", (60,), 120), ("b", "BF16", (9,), 18), ("new", "BF16", (5,), 10)]).raw
    with Delta(delta) as opened, (tmp_path / "copy").open("wb") as file:
        writer = DeltaWriter(file.fileno())
        rows = tuple(FileRow(f"{n}.safetensors", True, 8 + len(raw) + 148, digest_of(raw), writer.add_blob(raw)) for n in "xy")
        changed = msgspec.structs.replace(
            opened.manifest, layout="directory", files=rows, payloads=(), blobs=tuple(writer.blobs)
        )
        writer.finish(changed)
    with pytest.raises(PayloadInvalidError, match="in two files"):
        offline.inspect_delta(tmp_path / "copy")
