"""A reader of delta files written from FORMAT.md alone: nothing of deltarefit. For well-formed input."""

import hashlib
import json
import struct

import zstandard

WIDTHS = {"BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4}
WIDTHS |= {"U64": 8, "I64": 8, "F64": 8, "C64": 8}
SLICE = 4194304


def digest(data):
    return hashlib.blake2b(data, digest_size=16, person=b"deltarefit/off/1").hexdigest()


def width_of(state):
    dtype, shape, nbytes, _ = state
    elements = 1
    for length in shape:
        elements *= length
    if dtype in WIDTHS or dtype.startswith("F8"):
        return WIDTHS.get(dtype, 1)
    return next(w for w in (8, 4, 2, 1) if w == 1 or (elements and nbytes % (elements * w) == 0))


def read(data):
    """The manifest, and the bytes of its payloads and blobs."""
    magic, version, flags, zero, offset, frame_nbytes, nbytes, manifest, head = struct.unpack_from("<8sHHIQQQ16s16s", data)
    assert (magic, version, flags, zero) == (b"\x89DRFD\r\n\x1a", 2, 0, 0)
    assert digest(data[:56]) == head.hex()
    assert offset + frame_nbytes == len(data)
    assert digest(data[offset:]) == manifest.hex()
    text = zstandard.decompress(data[offset:])
    assert len(text) == nbytes
    document = json.loads(text)
    parts, at = [], 72
    for row in document["payloads"] + document["blobs"]:
        parts.append(data[at : at + row[0]])
        assert digest(parts[-1]) == row[1]
        at += row[0]
    assert at == offset
    return document, parts


def apply(data, base, companions, read_payload):
    """The target's files by name. ``base``: bytes of each tensor; ``companions``: bytes of each file beside them."""
    document, parts = read(data)
    targets = {name: target for name, _, target, _, _ in document["tensors"] if target}
    tensors, slices = {}, []
    for name, _, target, is_carried, _ in document["tensors"]:
        if target:
            image = base[name] if is_carried else b""
            tensors[name] = bytearray((image + bytes(target[2]))[: target[2]])
            slices += [(name, first) for first in range(0, target[2], SLICE)]
    for (_, _, first, end), part in zip(document["payloads"], parts, strict=False):
        header, items = read_payload(part)
        assert (header["sequence"], header["plan_digest"].hex()) == (first, document["plan"])
        for item in items:
            assert first <= int(item["name"]) < end
            name, start = slices[int(item["name"])]
            width = width_of(targets[name])
            for position, value in zip(item["positions"], item["values"], strict=True):
                at = start + position * width
                old = int.from_bytes(tensors[name][at : at + width], "little")
                new = (value, old + value, old ^ value)[item["encoding"]] % 256**width
                tensors[name][at : at + width] = new.to_bytes(width, "little")
    files = {}
    for name, holds_tensors, nbytes, file_digest, blob in document["files"]:
        content = companions[name] if blob is None else zstandard.decompress(parts[len(document["payloads"]) + blob])
        assert digest(content) == file_digest
        if holds_tensors:
            places = json.loads(content)
            places.pop("__metadata__", None)
            order = sorted(places, key=lambda tensor: places[tensor]["data_offsets"])
            content = struct.pack("<Q", len(content)) + content + b"".join(tensors[tensor] for tensor in order)
        assert len(content) == nbytes
        files[name] = content
    return files
