"""A reader of payloads written from FORMAT.md alone: nothing of deltarefit. For well-formed input."""

import hashlib
import struct

import zstandard

DTYPES = [
    *(None, "BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    *("U16", "I16", "F16", "BF16", "U32", "I32", "F32", "U64", "I64", "F64", "C64"),
]
WIDTHS = [0] + 8 * [1] + 4 * [2] + 3 * [4] + 4 * [8]
HEADER_NAMES = [
    *("magic", "version", "flags", "num_planes", "digest", "plan_digest", "attempt", "owner", "sequence", "base_version"),
    *("target_version", "payload_nbytes", "num_changed", "num_items", "table_nbytes", "table_frame_nbytes"),
]


def read(data, key=b""):
    """Header fields, and for each item its fields, positions and old-to-new words (differences as signed integers)."""
    header = dict(zip(HEADER_NAMES, struct.unpack_from("<8sHHI16s16s64sIIQQQQIII", data), strict=True))
    body = data[:16] + bytes(16) + data[32:]
    digest = hashlib.blake2b(body, digest_size=16, key=key, person=b"deltarefit/pay/1").digest()
    assert header["magic"] == b"\x89DRFP\r\n\x1a"
    assert header["version"] == 2
    assert header["digest"] == digest
    at = 164 + 20 * header["num_planes"]
    rows = list(struct.iter_unpack("<BBBBQQ", data[164:at]))
    table = zstandard.decompress(data[at : at + header["table_frame_nbytes"]])
    at += header["table_frame_nbytes"]
    planes = {}
    for stream, width, number, _, _, frame_nbytes in rows:
        planes[stream, width, number] = memoryview(zstandard.decompress(data[at : at + frame_nbytes]))
        at += frame_nbytes
    assert at == len(data) == header["payload_nbytes"]
    return header, [read_item(row, planes) for row in read_table(table, header["num_items"])]


def read_table(table, n):
    columns, at = [], 0
    for code in "HBBBBQQQ":
        columns.append(struct.unpack_from(f"<{n}{code}", table, at))
        at += struct.calcsize(f"<{n}{code}")
    name_at = at + 8 * sum(columns[2])
    for name_nbytes, dtype, rank, *rest in zip(*columns, strict=True):
        shape = struct.unpack_from(f"<{rank}Q", table, at)
        yield table[name_at : name_at + name_nbytes].decode(), dtype, shape, *rest
        at, name_at = at + 8 * rank, name_at + name_nbytes


def read_item(row, planes):
    name, dtype, shape, encoding, form, start, count, location_nbytes = row
    width = WIDTHS[dtype]

    def words(stream, word_width, nbytes):
        parts = []
        for number in range(word_width):
            plane = planes[stream, word_width, number]
            parts.append(plane[:nbytes])
            planes[stream, word_width, number] = plane[nbytes:]
        return [int.from_bytes(word, "little") for word in zip(*parts, strict=True)]

    word_width = {3: 1}.get(form, form)
    gaps = words(form, word_width, location_nbytes // word_width) if form else [0] * count
    positions, position = [], start - 1
    for gap in gaps:
        is_escape = gap == {1: 255, 3: 85}.get(form)
        position += gap + (not is_escape)
        if not is_escape:
            positions.append(position)
    values = words(16 + encoding, width, count)
    if encoding == 1:
        values = [(value >> 1) ^ -(value & 1) for value in values]
    return {"name": name, "dtype": DTYPES[dtype], "shape": list(shape), "encoding": encoding, "location_form": form,
            "positions": positions, "values": values}  # fmt: skip
