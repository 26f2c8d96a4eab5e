"""Items and payloads for the tests of this room: coded plainly, without the kernels, and taken apart into editable parts."""

import hashlib
import struct
from dataclasses import dataclass, field

import numpy as np
import zstandard
from hypothesis import strategies as st

from deltarefit import kernels
from deltarefit.canonical import DTYPE_NBYTES, TensorSpec
from deltarefit.errors import PayloadInvalidError
from deltarefit.payload import Limits, decode, encode
from deltarefit.payload.layout import (
    DIGEST_PERSON,
    FLAG_KEYED,
    HEADER,
    HEADER_FIELDS,
    ITEM_COLUMNS,
    PLANE,
)
from deltarefit.records import CodedItem, Encoding, LocationForm

ID = {
    "attempt": "v000007-a1-k3j9",
    "owner": 3,
    "sequence": 12,
    "base_version": 6,
    "target_version": 7,
    "plan_digest": "00112233445566778899aabbccddeeff",
}
KEY = bytes(range(32))
SMALL = Limits(payload_nbytes=2**20, decompressed_nbytes=2**22, items=200, name_nbytes=2**12)
"""So that no altered size costs a test more than a few megabytes."""


def planes_of(words, nbytes):
    table = np.ascontiguousarray(words).view(np.uint8).reshape(-1, nbytes)
    return tuple(np.ascontiguousarray(table[:, number]) for number in range(nbytes))


def zigzag(words, nbytes):
    signed = words.view(f"<i{nbytes}")
    return ((words << words.dtype.type(1)) ^ (signed >> signed.dtype.type(8 * nbytes - 1)).view(words.dtype)).astype(
        words.dtype
    )


def item(spec, positions, words, encoding=Encoding.OVERWRITE, form=LocationForm.GAPS):
    """``words``: new bits, differences modulo 2^w, or masks."""
    nbytes = spec.element_nbytes
    positions = np.asarray(positions, np.int64)
    words = np.asarray(words, dtype=spec.word_dtype)
    values = planes_of(zigzag(words, nbytes) if encoding is Encoding.DIFFERENCE else words, nbytes)
    start = int(positions[0])
    gaps = np.diff(positions, prepend=start - 1) - 1
    escape = {LocationForm.GAPS: 255, LocationForm.SHORT_GAPS: 85}.get(form)
    if form is LocationForm.RUN:
        locations = ()
        assert np.array_equal(positions, np.arange(start, start + positions.size))
    elif escape:
        coded = b"".join(bytes([escape]) * (gap // escape) + bytes([gap % escape]) for gap in gaps.tolist())
        locations = (np.frombuffer(coded, np.uint8),)
    else:
        width = form.width
        assert width == 8 or gaps.max() < 2 ** (8 * width)
        locations = planes_of(gaps.astype(f"<u{width}"), width)
    return CodedItem(spec, encoding, form, start, positions.size, locations, values)


def as_plain(coded):
    """Everything that an item says, comparable with ==."""
    return (
        coded.spec,
        coded.encoding,
        coded.location_form,
        coded.start,
        coded.count,
        tuple(plane.tobytes() for plane in coded.location_planes),
        tuple(plane.tobytes() for plane in coded.value_planes),
    )


def sample_items():
    """Every encoding, five location forms, widths 1, 2, 4 and 8, rank 0 and two interleaving shards of one tensor."""
    embed = TensorSpec("model.embed.weight", "BF16", (64, 32))
    return [
        item(embed, [2, 5, 8, 600, 2047], [1, 0xFFFF, 3, 0x8000, 7], Encoding.DIFFERENCE),
        item(embed, [3, 4, 700], [2, 2, 2], Encoding.DIFFERENCE, LocationForm.SHORT_GAPS),
        item(
            TensorSpec("model.norm.weight", "F32", (16,)),
            range(3, 9),
            [0x7FC00001, 0x80000000, 1, 2, 3, 4],
            form=LocationForm.RUN,
        ),
        item(TensorSpec("model.bias", "I64", (70000,)), [0, 65535, 69999], [2**63, 5, 1], Encoding.XOR, LocationForm.WIDE4),
        item(TensorSpec("model.scale", "F8_E4M3", (9, 100)), [255, 899], [0x7F, 0x80], form=LocationForm.WIDE2),
        item(TensorSpec("model.flag", "BOOL", ()), [0], [1], form=LocationForm.RUN),
    ]


def sample(key=None):
    return encode(sample_items(), key=key, **ID)


@dataclass
class Draft:
    """A payload in parts. ``build`` puts them together; lengths and digest fit unless ``overrides`` says otherwise."""

    fields: dict
    rows: list
    columns: dict
    dimensions: list
    names: list
    frames: list
    table: bytes | None = None
    table_frame: bytes | None = None
    overrides: dict = field(default_factory=dict)

    @classmethod
    def of(cls, data):
        names = [name for name, _ in HEADER_FIELDS]
        fields = dict(zip(names, HEADER.unpack_from(data), strict=True))
        at = HEADER.size + fields["num_planes"] * PLANE.size
        rows = [list(row) for row in PLANE.iter_unpack(data[HEADER.size : at])]
        table = zstandard.decompress(data[at : at + fields["table_frame_nbytes"]])
        at += fields["table_frame_nbytes"]
        frames = []
        for row in rows:
            frames.append(data[at : at + row[5]])
            at += row[5]
        columns, position = {}, 0
        for name, code in ITEM_COLUMNS:
            values = np.frombuffer(table, code, fields["num_items"], position)
            columns[name] = values.tolist()
            position += values.nbytes
        dimensions = np.frombuffer(table, "<u8", sum(columns["rank"]), position).tolist()
        position += 8 * len(dimensions)
        tensor_names = []
        for nbytes in columns["name_nbytes"]:
            tensor_names.append(table[position : position + nbytes])
            position += nbytes
        return cls(fields, rows, columns, dimensions, tensor_names, frames)

    def plane(self, *plane_key):
        """Row number of a plane."""
        return next(number for number, row in enumerate(self.rows) if tuple(row[:3]) == plane_key)

    def replace_plane(self, number, content):
        self.frames[number] = zstandard.compress(content, 1)
        self.rows[number][4] = len(content)

    def edit_plane(self, number, edit):
        content = bytearray(zstandard.decompress(self.frames[number]))
        edit(content)
        self.replace_plane(number, bytes(content))

    def table_bytes(self):
        if self.table is not None:
            return self.table
        columns = [np.array(self.columns[name], code).tobytes() for name, code in ITEM_COLUMNS]
        return b"".join((*columns, np.array(self.dimensions, "<u8").tobytes(), *self.names))

    def build(self, key=None):
        table = self.table_bytes()
        table_frame = zstandard.compress(table, 3) if self.table_frame is None else self.table_frame
        rows = b"".join(PLANE.pack(*row[:5], self.overrides.get("frame_nbytes", {}).get(number, len(frame)))
                        for number, (row, frame) in enumerate(zip(self.rows, self.frames, strict=True)))  # fmt: skip
        body = b"".join((rows, table_frame, *self.frames))
        fields = self.fields | {
            "num_planes": len(self.rows),
            "payload_nbytes": HEADER.size + len(body),
            "table_nbytes": len(table),
            "table_frame_nbytes": len(table_frame),
            "digest": bytes(16),
            "flags": FLAG_KEYED if key else 0,
        }
        fields |= {name: value for name, value in self.overrides.items() if name in fields}
        return sealed(HEADER.pack(*fields.values()) + body, key)


def sealed(data, key=None):
    """The same bytes with the digest that they ought to have."""
    blank = data[:16] + bytes(16) + data[32:]
    digest = hashlib.blake2b(blank, digest_size=16, key=key or b"", person=DIGEST_PERSON).digest()
    return blank[:16] + digest + blank[32:]


def set_field(data, name, value):
    """Overwrite one header field and seal again."""
    names = [field_name for field_name, _ in HEADER_FIELDS]
    values = list(HEADER.unpack_from(data))
    values[names.index(name)] = value
    return sealed(struct.pack(HEADER.format, *values) + data[HEADER.size :])


def decode_soundly(data, key=None):
    """Decode or refuse; whatever comes out must be safe to apply. Checked element by element, as ``apply`` relies on it."""
    try:
        payload = decode(data, key=key, limits=SMALL)
    except PayloadInvalidError:
        return
    seen = {}
    for item in payload.items:
        assert len(item.value_planes) == item.spec.element_nbytes
        assert all(plane.size == item.count for plane in item.value_planes)
        assert isinstance(item.encoding, Encoding)
        positions = kernels.decode_positions(item)
        assert positions.size == item.count
        assert (np.diff(positions) > 0).all()
        assert 0 <= positions[0] <= positions[-1] < item.spec.num_elements
        before = seen.setdefault(item.spec.name, set())
        assert before.isdisjoint(positions.tolist())
        before.update(positions.tolist())


# Strategies

_NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@st.composite
def specs(draw):
    shape = tuple(draw(st.lists(st.integers(1, 12), max_size=4)))
    if draw(st.integers(0, 5)) == 0:
        shape = (draw(st.integers(1, 2**40)), *shape)
    return TensorSpec(draw(_NAMES), draw(st.sampled_from(sorted(DTYPE_NBYTES))), shape)


@st.composite
def items(draw, max_items=6):
    """Items of different tensors; positions anywhere, also beyond 2^31."""
    drawn = draw(st.lists(specs(), min_size=1, max_size=max_items, unique_by=lambda spec: spec.name))
    return [draw(items_of(spec)) for spec in drawn]


@st.composite
def items_of(draw, spec):
    last = spec.num_elements - 1
    positions = sorted(draw(st.sets(st.integers(0, last), min_size=1, max_size=30)))
    encoding = draw(st.sampled_from(list(Encoding)))
    gaps = np.diff(positions, prepend=positions[0] - 1) - 1
    forms = [LocationForm.WIDE8]
    if gaps.max() < 10_000:
        forms += [LocationForm.GAPS, LocationForm.SHORT_GAPS]
    forms += [form for form, bits in ((LocationForm.WIDE2, 16), (LocationForm.WIDE4, 32)) if gaps.max() < 2**bits]
    if draw(st.booleans()):
        start = draw(st.integers(0, last))
        positions, forms = range(start, min(last + 1, start + draw(st.integers(1, 300)))), [LocationForm.RUN]
    words = draw(st.lists(st.integers(0, 2 ** (8 * spec.element_nbytes) - 1), min_size=len(positions), max_size=len(positions)))
    return item(spec, list(positions), words, encoding, draw(st.sampled_from(forms)))
