"""Names, widths and limits of the payload format, version 2. ``FORMAT.md`` is normative; a test holds the two equal."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import NamedTuple

from deltarefit.canonical import WORDS
from deltarefit.errors import RejectedError
from deltarefit.records import Encoding, LocationForm

__all__ = [
    "ATTEMPT_NBYTES",
    "DEFAULT_LIMITS",
    "DIGEST_NBYTES",
    "DIGEST_OFFSET",
    "DIGEST_PERSON",
    "DTYPE_CODES",
    "DTYPE_NAMES",
    "FLAG_KEYED",
    "FORMAT_VERSION",
    "HEADER",
    "HEADER_FIELDS",
    "ITEM_COLUMNS",
    "ITEM_NBYTES",
    "MAGIC",
    "MAX_PLANES",
    "MAX_RANK",
    "PLANE",
    "PLANE_FIELDS",
    "VALUE_STREAM",
    "Limits",
    "PlaneKey",
    "is_plane_key",
    "location_keys",
    "value_keys",
]

MAGIC = b"\x89DRFP\r\n\x1a"
"""A byte above 127 and both kinds of line end: a transfer that took the payload for text shows in the first eight bytes."""
FORMAT_VERSION = 2
FLAG_KEYED = 1
DIGEST_NBYTES = 16
DIGEST_PERSON = b"deltarefit/pay/1"
"""BLAKE2b personalisation: the run's key signs other things too, and none of them may pass for a payload."""
ATTEMPT_NBYTES = 64
"""The longest attempt id (``deltarefit.ids``)."""
MAX_RANK = 64
"""Dimensions of a tensor: what numpy can hold."""

HEADER_FIELDS = (
    ("magic", "8s"),
    ("format_version", "H"),
    ("flags", "H"),
    ("num_planes", "I"),
    ("digest", "16s"),
    ("plan_digest", "16s"),
    ("attempt", "64s"),
    ("owner", "I"),
    ("sequence", "I"),
    ("base_version", "Q"),
    ("target_version", "Q"),
    ("payload_nbytes", "Q"),
    ("num_changed", "Q"),
    ("num_items", "I"),
    ("table_nbytes", "I"),
    ("table_frame_nbytes", "I"),
)
HEADER = struct.Struct("<" + "".join(code for _, code in HEADER_FIELDS))
DIGEST_OFFSET = 16

PLANE_FIELDS = (
    ("stream", "B"),
    ("element_nbytes", "B"),
    ("byte_number", "B"),
    ("zero", "B"),
    ("nbytes", "Q"),
    ("frame_nbytes", "Q"),
)
PLANE = struct.Struct("<" + "".join(code for _, code in PLANE_FIELDS))

ITEM_COLUMNS = (
    ("name_nbytes", "<u2"),
    ("dtype", "u1"),
    ("rank", "u1"),
    ("encoding", "u1"),
    ("location_form", "u1"),
    ("start", "<u8"),
    ("count", "<u8"),
    ("location_nbytes", "<u8"),
)
ITEM_NBYTES = sum(int(code[-1]) for _, code in ITEM_COLUMNS)
"""Bytes of one item in the table, without its dimensions and its name."""

DTYPE_CODES: Mapping[str, int] = {
    "BOOL": 1, "U8": 2, "I8": 3, "F8_E4M3": 4, "F8_E5M2": 5, "F8_E8M0": 6, "F8_E4M3FNUZ": 7, "F8_E5M2FNUZ": 8,
    "U16": 9, "I16": 10, "F16": 11, "BF16": 12,
    "U32": 13, "I32": 14, "F32": 15,
    "U64": 16, "I64": 17, "F64": 18, "C64": 19,
}  # fmt: skip
DTYPE_NAMES: Mapping[int, str] = {code: name for name, code in DTYPE_CODES.items()}

VALUE_STREAM = 16
"""A value stream's code is this plus its ``Encoding``; a location stream's is its ``LocationForm``, and RUN has no stream."""
MAX_PLANES = sum(form.width for form in LocationForm) + len(Encoding) * (1 + 2 + 4 + 8)


class PlaneKey(NamedTuple):
    """What the bytes of one plane have in common; planes stand in ascending order of their keys."""

    stream: int
    element_nbytes: int
    byte_number: int
    """0 is the low byte."""

    def __str__(self) -> str:
        if self.stream >= VALUE_STREAM:
            kind = f"{Encoding(self.stream - VALUE_STREAM).name} values"
        else:
            kind = f"{LocationForm(self.stream).name} locations"
        return f"{kind}, {self.element_nbytes} bytes wide, byte {self.byte_number}"


@cache
def location_keys(form: LocationForm) -> tuple[PlaneKey, ...]:
    """The planes that hold the locations of items of this form, low byte first."""
    return tuple(PlaneKey(form, form.width, number) for number in range(form.width))


@cache
def value_keys(encoding: Encoding, element_nbytes: int) -> tuple[PlaneKey, ...]:
    """The planes that hold the values of items of this encoding and width, low byte first."""
    return tuple(PlaneKey(VALUE_STREAM + encoding, element_nbytes, number) for number in range(element_nbytes))


_PLANE_KEYS = frozenset(
    itertools.chain(
        *(location_keys(form) for form in LocationForm),
        *(value_keys(encoding, element_nbytes) for encoding in Encoding for element_nbytes in WORDS),
    )
)


def is_plane_key(key: PlaneKey) -> bool:
    """Whether any item can have a part of this plane."""
    return key in _PLANE_KEYS


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a decoder accepts and an encoder makes. Both sides of a run should use the same.

    Raises:
        RejectedError: a limit is below 1.
    """

    payload_nbytes: int = 16 * 2**30
    """Bytes of one payload. Tensors are never split (paper C), so this must exceed the largest shard that one owner has; the
    largest published tensor, a stack of experts, is about 21 GB before it is sharded."""
    decompressed_nbytes: int = 16 * 2**30
    """Bytes of all planes of one payload together."""
    items: int = 2**17
    """Items of one payload: the largest published mixture of experts has about 70,000 tensors in all. One item costs the
    decoder up to 1 KB."""
    name_nbytes: int = 16 * 2**20
    """Bytes of all tensor names of one payload together."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise RejectedError(f"limits: {field.name} is {getattr(self, field.name)}, expected at least 1")


DEFAULT_LIMITS = Limits()
