"""One way to provoke each refusal of FORMAT.md, by the name that it has there, in the order in which it stands there.

Each entry gives the bytes, what else ``decode`` is called with, and what its text must say. Where the digest is not the
subject the bytes carry the digest that fits them, so that the check behind it is reached.
"""

import struct

import numpy as np
import zstandard
from payload_cases import ID, KEY, Draft, item, sample, sample_items, sealed, set_field

from deltarefit.canonical import Catalog, TensorSpec
from deltarefit.payload import Limits, encode
from deltarefit.payload.frames import MAX_FRAME_RATIO
from deltarefit.payload.layout import HEADER, PLANE
from deltarefit.records import Encoding, LocationForm

CATALOG = Catalog({coded.spec.name: coded.spec for coded in sample_items()}.values())
_SMALL = TensorSpec("w", "BF16", (1000,))


def _draft():
    return Draft.of(sample())


def _one(positions=(2, 500), form=LocationForm.GAPS):
    """A payload of a single small item."""
    return Draft.of(encode([item(_SMALL, positions, range(len(positions)), Encoding.XOR, form)], **ID))


def _edited(edit, draft=None):
    draft = draft or _draft()
    edit(draft)
    return draft.build()


def _column(name, number, value):
    return _edited(lambda draft: draft.columns[name].__setitem__(number, value))


def _row(number, column, value):
    return _edited(lambda draft: draft.rows[number].__setitem__(column, value))


def _frame(content_to_frame):
    """Replace the frame of the last plane, which holds 3 bytes."""
    draft = _draft()
    draft.frames[-1] = content_to_frame(zstandard.decompress(draft.frames[-1]))
    return draft.build()


def streamed(content):
    """A frame as an encoder writes it that does not know how much is still to come."""
    writer = zstandard.ZstdCompressor().compressobj()
    return writer.compress(content) + writer.flush()


def _with_dictionary(content):
    # Frame header descriptor with a one-byte dictionary id (1), single segment, one-byte content size; then a raw last block.
    return b"\x28\xb5\x2f\xfd\x21\x01" + bytes([len(content)]) + struct.pack("<I", len(content) << 3 | 1)[:3] + content


def _wide_window(content):
    # Not a single segment, 2-byte content size field would start at 256; so 8 bytes of it, and a window of 2^31 bytes.
    window = (31 - 10) << 3
    block = struct.pack("<I", len(content) << 3 | 1)[:3] + content
    return b"\x28\xb5\x2f\xfd\xc0" + bytes([window]) + struct.pack("<Q", len(content)) + block


def _names(draft, names):
    draft.names = names
    draft.columns["name_nbytes"] = [len(name) for name in names]


def _twice():
    first = item(TensorSpec("w", "BF16", (1000,)), [2, 500], [1, 1], Encoding.XOR)
    return [first, item(TensorSpec("w", "BF16", (10, 100)), [3], [1], Encoding.XOR)]


def _huge_table(draft):
    draft.table = bytes(draft.table_bytes())
    draft.overrides["table_nbytes"] = 2 * 2**20
    draft.table_frame = _lying(2 * 2**20, 13)


def _lying(nbytes, frame_nbytes):
    """A frame that states ``nbytes`` and is only so long."""
    head = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", nbytes)
    return head + bytes(frame_nbytes - len(head))


def _cut_rows(data):
    """A header that claims more planes than there are bytes."""
    return set_field(data, "num_planes", 60)


REFUSALS = {
    "too-large": lambda: (sample(), {"limits": Limits(payload_nbytes=1000)}, "Limits.payload_nbytes"),
    "too-short": lambda: (sample()[: HEADER.size - 1], {}, "163 bytes, expected at least the 164"),
    "magic": lambda: (sealed(b"PK\x03\x04" + sample()[4:]), {}, "this is no payload"),
    "format-version": lambda: (set_field(sample(), "format_version", 1), {}, "format version 1, this build reads 2"),
    "flags": lambda: (set_field(sample(), "flags", 2), {}, "flags 0x0002"),
    "attempt": lambda: (set_field(sample(), "attempt", b"a\0b"), {}, "expected an attempt id"),
    "versions": lambda: (set_field(sample(), "base_version", 8), {}, "base version 8 is above target version 7"),
    "length": lambda: (sealed(sample()[:-1]), {}, "cut off, or something follows"),
    "num-items": lambda: (set_field(sample(), "num_items", 0), {}, "0 items, expected 1 to 131072"),
    "num-planes": lambda: (set_field(sample(), "num_planes", 62), {}, "62 planes, expected 1 to 61"),
    "table-size": lambda: (set_field(sample(), "table_nbytes", 6 * 30 - 1), {}, "an item table of 179 bytes for 6 items"),
    "layout": lambda: (_cut_rows(sample()), {}, "plane table and item table end at byte"),
    "plane-unknown": lambda: (_row(0, 0, 5), {}, "no such plane"),
    "plane-order": lambda: (_edited(lambda draft: draft.rows.insert(1, draft.rows.pop(0))), {}, "does not ascend"),
    "plane-empty": lambda: (_row(0, 4, 0), {}, "no bytes"),
    "plane-ratio": lambda: (_row(0, 4, 2**30), {}, "bytes of zstd cannot hold 1073741824"),
    "decompressed-size": lambda: (sample(), {"limits": Limits(decompressed_nbytes=50)}, "Limits.decompressed_nbytes"),
    "key-missing": lambda: (sample(KEY), {}, "signed with a run key and this side has none"),
    "key-unexpected": lambda: (sample(), {"key": KEY}, "not signed although this run has a key"),
    "digest": lambda: (sample(KEY), {"key": bytes(32)}, "altered, or the two sides have different run keys"),
    "frame-magic": lambda: (_frame(lambda content: b"\x50\x2a\x4d\x18\x04\0\0\0" + content), {}, "expected a zstd frame"),
    "frame-header": lambda: (_frame(lambda _: b"\x28\xb5\x2f\xfd\xff"), {}, "no valid zstd frame header"),
    "frame-streamed": lambda: (_frame(lambda content: streamed(content[:-1])), {}, "2 bytes decompressed, expected 3"),
    "frame-size": lambda: (_frame(lambda content: zstandard.compress(content + b"\0")), {}, "states 4 bytes, expected 3"),
    "frame-dictionary": lambda: (_frame(_with_dictionary), {}, "needs dictionary 1, expected none"),
    "frame-window": lambda: (_frame(_wide_window), {}, "needs a window of 2147483648 bytes, at most 8388608"),
    "frame-ratio": lambda: (_edited(_huge_table), {}, "item table: 13 bytes of zstd cannot hold 2097152"),
    "frame-corrupt": lambda: (_frame(lambda content: zstandard.compress(content)[:-1]), {}, "is corrupt"),
    "frame-trailing": lambda: (_frame(lambda content: 2 * zstandard.compress(content)), {}, "does not end where it should"),
    "table-length": lambda: (_edited(lambda draft: draft.names.append(b"x")), {}, "its ranks and names add up to 328"),
    "names-size": lambda: (sample(), {"limits": Limits(name_nbytes=83)}, "84 bytes of names, at most 83"),
    "rank": lambda: (
        _edited(lambda draft: (draft.columns["rank"].__setitem__(5, 65), draft.dimensions.extend([1] * 65))),
        {},
        "rank 65",
    ),
    "dtype": lambda: (_column("dtype", 1, 20), {}, r"item 1 .*: dtype code 20, expected 1 to 19"),
    "tensor": lambda: (_edited(lambda draft: _names(draft, [b"\xff", *draft.names[1:]])), {}, "item 0 .*: no valid tensor"),
    "catalog-name": lambda: (sample(), {"catalog": Catalog([_SMALL])}, "item 0 .*: no such tensor among the 1 of the catalog"),
    "catalog-spec": lambda: (
        _column("dtype", 2, 14),
        {"catalog": CATALOG},
        r"got model.norm.weight I32\[16\], the catalog has",
    ),
    "encoding": lambda: (_column("encoding", 0, 3), {}, r"encoding code 3, expected one of \[0, 1, 2\]"),
    "location-form": lambda: (_column("location_form", 0, 5), {}, r"form code 5, expected one of \[0, 1, 2, 3, 4, 8\]"),
    "count": lambda: (_column("count", 5, 0), {}, "item 5 .*: 0 changed elements, expected 1 to 1"),
    "start": lambda: (_column("start", 0, 2044), {}, "item 0 .*: 5 elements from 2044 on, the tensor has 2048"),
    "location-size": lambda: (_column("location_nbytes", 3, 11), {}, "item 3 .*: 11 bytes of WIDE4 locations, expected 12"),
    "num-changed": lambda: (set_field(sample(), "num_changed", 21), {}, "items hold 20 elements, the header says 21"),
    "plane-mismatch": lambda: (_without_locations(), {}, "plane GAPS locations, 1 bytes wide, byte 0: 0 bytes stated"),
    "gap-byte": lambda: (
        _edited(lambda d: d.replace_plane(0, b"\0\x56\x0c"), _one((2, 100), LocationForm.SHORT_GAPS)),
        {},
        "a gap byte of 86, expected at most 85",
    ),
    "gap-count": lambda: (
        _edited(lambda d: d.replace_plane(0, b"\xff\xff\x05"), _one()),
        {},
        "gaps give 1 positions, expected 2",
    ),
    "gap-escape": lambda: (
        _edited(lambda d: d.replace_plane(0, b"\0\x05\xff"), _one()),
        {},
        "end in the middle of an escape",
    ),
    "gap-first": lambda: (
        _edited(lambda d: d.replace_plane(0, b"\x01\xff\x05"), _one()),
        {},
        "first gap is not 0, expected its first element at 2",
    ),
    "past-end": lambda: (_edited(lambda d: d.replace_plane(1, b"\0\4"), _one(form=LocationForm.WIDE2)), {}, "lead to element "),
    "tensor-twice": lambda: (encode(_twice(), **ID), {}, "tensor w: its items differ in dtype or shape"),
    "element-twice": lambda: (_duplicate(), {}, "tensor w: element 500 is addressed twice"),
}


def _without_locations():
    draft = _draft()
    del draft.rows[0], draft.frames[0]
    return draft.build()


def _duplicate():
    return encode([item(_SMALL, positions, [1, 1], Encoding.XOR) for positions in ([2, 500], [3, 500])], **ID)


def _plane_cases():
    """Further ways in which planes and items disagree."""
    yield "missing", _without_locations(), "plane GAPS locations, 1 bytes wide, byte 0: 0 bytes stated, the items need 12"
    extra = _one()
    extra.rows.append([18, 4, 0, 0, 2, 0])
    extra.frames.append(zstandard.compress(b"ab"))
    yield "extra", extra.build(), "plane XOR values, 4 bytes wide, byte 0: 2 bytes stated, the items need 0"
    longer = _one()
    longer.replace_plane(1, b"abc")
    yield "longer", longer.build(), "plane XOR values, 2 bytes wide, byte 0: 3 bytes stated, the items need 2"
    fewer = _one()
    fewer.columns["count"] = [1]
    fewer.columns["location_nbytes"] = [1]
    fewer.fields["num_changed"] = 1
    yield "fewer", fewer.build(), "3 bytes stated, the items need 1"


def _table_cases():
    def with_spec(edit):
        draft = _draft()
        edit(draft)
        return draft.build()

    yield "empty name", with_spec(lambda d: _names(d, [*d.names[:5], b""])), "item 5 .*: no valid tensor"
    yield "too many elements", with_spec(lambda d: d.dimensions.__setitem__(0, 2**62)), "item 0 .*: no valid tensor"
    yield "no elements", with_spec(lambda d: d.dimensions.__setitem__(0, 0)), "item 0 .*: 5 changed elements, expected 1 to 0"
    yield (
        "count beyond the tensor",
        with_spec(lambda d: d.columns["count"].__setitem__(5, 2)),
        "2 changed elements, expected 1 to 1",
    )
    yield "count of 2^64 - 1", with_spec(lambda d: d.columns["count"].__setitem__(5, 2**64 - 1)), "expected 1 to 1"
    for number, count in enumerate((5, 3, 6, 3, 2, 1)):  # every form; the second is a start that a sum of 64 bits wraps to 0
        for start in (2**64 - 1, 2**64 - count, 2**63, 2**63 - 1):
            data = with_spec(lambda d, number=number, start=start: d.columns["start"].__setitem__(number, start))
            yield f"start of {start} in item {number}", data, f"item {number} .*: {count} elements from {start} on"
    after_end = with_spec(lambda d: d.columns["start"].__setitem__(2, 11))
    yield "a run beyond the end", after_end, "item 2 .*: 6 elements from 11 on, the tensor has 16"
    yield (
        "locations of a run",
        with_spec(lambda d: d.columns["location_nbytes"].__setitem__(2, 1)),
        "1 bytes of RUN locations, expected 0",
    )
    few = with_spec(lambda d: d.columns["location_nbytes"].__setitem__(0, 4))
    yield "too few gap bytes", few, "4 bytes of GAPS locations, expected 5 to 13"
    many = with_spec(lambda d: d.columns["location_nbytes"].__setitem__(0, 14))
    yield "more escapes than the tensor has elements for", many, "14 bytes of GAPS locations, expected 5 to 13"
    short = with_spec(lambda d: d.columns["location_nbytes"].__setitem__(1, 28))
    yield "more short escapes than it has", short, "28 bytes of SHORT_GAPS locations, expected 3 to 27"
    later = with_spec(lambda d: (d.columns["start"].__setitem__(1, 2000), d.columns["location_nbytes"].__setitem__(1, 4)))
    yield "more than it has from start on", later, "4 bytes of SHORT_GAPS locations, expected 3"
    huge = _one(form=LocationForm.WIDE8)
    huge.dimensions = [2**60]
    huge.columns |= {"start": [0], "count": [2**60], "location_nbytes": [2**63]}
    huge.fields["num_changed"] = 2**60
    yield "more than 64 signed bits hold", huge.build(), f"{2**63} bytes of WIDE8 locations, expected fewer than {2**63}"
    yield "table cut", with_spec(lambda d: setattr(d, "table", d.table_bytes()[:-1])), "item table of 327 bytes"


def _header_cases():
    yield "nothing", b"", "0 bytes, expected at least the 164"
    yield "items beyond the limit", set_field(sample(), "num_items", 131073), "131073 items, expected 1 to 131072"
    yield "no planes", set_field(sample(), "num_planes", 0), "0 planes, expected 1 to 61"
    yield "table beyond the limit", set_field(sample(), "table_nbytes", 2**32 - 1), "an item table of 4294967295 bytes"
    yield "something behind", sealed(sample() + b"\0"), "cut off, or something follows"
    yield "item table beyond the end", set_field(sample(), "table_frame_nbytes", 2**32 - 1), "the payload has 1102"
    longer = _draft()
    longer.overrides["frame_nbytes"] = {3: 2**64 - 1}
    yield "planes beyond the end", longer.build(), "its parts end at byte"
    shorter = _draft()
    shorter.overrides["frame_nbytes"] = {3: 12}
    shorter.frames[3] += b"\0\0"
    yield "a gap between planes", shorter.build(), "its parts end at byte"
    yield "an attempt that is empty", set_field(sample(), "attempt", b""), "expected an attempt id"
    yield "an attempt with a slash", set_field(sample(), "attempt", b"../../etc"), "expected an attempt id"


def _plane_table_cases():
    draft = _draft()
    draft.rows[1], draft.frames[1] = draft.rows[0], draft.frames[0]
    yield "a plane twice", draft.build(), "does not ascend"
    for name, column, value in (
        ("width", 1, 3),
        ("byte number", 2, 1),
        ("zero byte", 3, 1),
        ("stream 0", 0, 0),
        ("stream 5", 0, 5),
        ("stream 19", 0, 19),
    ):
        yield name, _row(0, column, value), "no such plane"
    yield "gaps of two bytes", _row(0, 1, 2), "no such plane"


def _frame_cases():
    for version in range(1, 8):
        old = bytes([0x20 + version, 0xB5, 0x2F, 0xFD]) if version > 1 else b"\xfd\x2f\xb5\x1e"
        yield f"format 0.{version}", _frame(lambda content, old=old: old + content), "expected a zstd frame"
    yield "empty content", _frame(lambda _: zstandard.compress(b"")), "states 0 bytes, expected 3"
    yield "no bytes at all", _no_frame(), "cannot hold"
    yield "a byte behind", _frame(lambda content: zstandard.compress(content) + b"\0"), "does not end where it should"
    checked = zstandard.ZstdCompressor(write_checksum=True)
    yield "wrong checksum", _frame(lambda content: checked.compress(content)[:-1] + b"\0"), "is corrupt"
    yield "fewer bytes than stated", _frame(lambda content: _short(content)), "is corrupt|bytes decompressed"


def _short(content):
    """States len(content), holds one byte less."""
    held = content[:-1]
    return b"\x28\xb5\x2f\xfd\x20" + bytes([len(content)]) + struct.pack("<I", len(held) << 3 | 1)[:3] + held


def _no_frame():
    draft = _draft()
    draft.frames[-1] = b""
    return draft.build()


def _location_cases():
    def gaps(content, positions=(2, 500), form=LocationForm.GAPS):
        draft = _one(positions, form)
        draft.replace_plane(0, content)
        return draft.build()

    short = LocationForm.SHORT_GAPS
    past = "lead to element 1000, the tensor has 1000"
    yield "one past the end", gaps(b"\0" + b"\xff" * 3 + b"\xe8", (2, 999)), past
    yield "one past the end, short", gaps(b"\0" + b"\x55" * 11 + b"\x3e", (2, 999), short), past
    yield "one past the end, from start on", _edited(lambda d: d.columns["start"].__setitem__(0, 502), _one()), past
    yield "byte of 255 in short gaps", gaps(b"\0\xff\x0c", (2, 100), short), "a gap byte of 255, expected at most 85"
    yield "escape of GAPS in short gaps alone", gaps(b"\0\x55\xff", (2, 100), short), "a gap byte of 255, expected at most 85"
    yield "short gaps of another number", gaps(b"\x55\x55\x05", (2, 100), short), "gaps give 1 positions, expected 2"
    yield "short gaps end in an escape", gaps(b"\0\x05\x55", (2, 100), short), "end in the middle of an escape"
    yield "first short gap", gaps(b"\x54\x55\x05", (2, 100), short), "first gap is not 0"
    first = _one(form=LocationForm.WIDE2)
    first.replace_plane(1, b"\1\1")
    yield "first wide gap", first.build(), "first gap is not 0, expected its first element at 2"
    wide = Draft.of(encode([item(TensorSpec("w", "U8", (2**40,)), [5, 2**40 - 1], [1, 2], form=LocationForm.WIDE8)], **ID))
    for number in range(8):
        wide.replace_plane(wide.plane(8, 8, number), b"\0\xff")
    yield "sums beyond 64 bits", wide.build(), f"lead to element {2**64 + 5}"

    def pair(first, second):
        return encode([first, second], **ID)

    run = item(_SMALL, range(400, 600), range(200), form=LocationForm.RUN)
    inside = item(_SMALL, [2, 400, 900], range(3))
    yield "a run over a gap", pair(run, inside), "element 400 is addressed twice"
    yield "a gap at a run's last", pair(item(_SMALL, [1, 599, 601], range(3)), run), "element 599 is addressed twice"
    yield "run over run", pair(run, item(_SMALL, range(599, 700), range(101), form=LocationForm.RUN)), "element 599"
    yield "run inside run", pair(run, item(_SMALL, range(450, 452), range(2), form=LocationForm.RUN)), "element 450"
    wide2 = item(_SMALL, [5, 600], [1, 1], form=LocationForm.WIDE2)
    yield "between forms", pair(wide2, item(_SMALL, [600, 999], [1, 1])), "element 600 is addressed twice"
    yield "the same item again", pair(inside, inside), "element 2 is addressed twice"
    late = item(_SMALL, [900, 950], [1, 1])
    yield (
        "the first of one and the last of another",
        pair(item(_SMALL, [0, 900], [1, 1]), late),
        "element 900 is addressed twice",
    )
    shortened = item(_SMALL, [1, 200, 950], range(3), form=short)
    yield "between gaps of two escapes", pair(shortened, late), "element 950 is addressed twice"


FURTHER = [
    (f"{kind}: {name}", data, text)
    for kind, cases in (
        ("header", _header_cases()),
        ("plane table", _plane_table_cases()),
        ("frame", _frame_cases()),
        ("table", _table_cases()),
        ("planes", _plane_cases()),
        ("locations", _location_cases()),
    )
    for name, data, text in cases
]

assert MAX_FRAME_RATIO == 32768
assert PLANE.size == 20
assert np.little_endian
