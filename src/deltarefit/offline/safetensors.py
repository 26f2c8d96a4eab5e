"""The safetensors file format: reading a header with full validation, and building one.

A file is an 8-byte little-endian header length, a JSON object, and the tensors' bytes. Every rule of the format is checked
before any of the header's numbers is used: the reference reader's length cap, strict JSON without repeated keys, and offsets
that cover the data exactly, without holes or overlap. Nothing here holds tensor bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deltarefit.canonical import DTYPE_NBYTES
from deltarefit.errors import RejectedError

__all__ = ["MAX_HEADER_NBYTES", "Header", "StoredTensor", "build_header", "parse_header", "read_header"]

MAX_HEADER_NBYTES = 100_000_000
"""The reference implementation (safetensors 0.8, ``tensor.rs``) refuses longer headers; it fits about a million tensors."""
_MAX_NAME_NBYTES = 65535
_MAX_ELEMENTS = 2**62
_LENGTH_NBYTES = 8
_METADATA = "__metadata__"
_TENSOR_KEYS = frozenset(("dtype", "shape", "data_offsets"))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a file describes it."""

    name: str
    dtype: str
    """As the file spells it; may be a dtype that ``canonical.DTYPE_NBYTES`` does not know."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the start of the file's data section."""
    nbytes: int

    @property
    def word_nbytes(self) -> int:
        """Width of the unsigned words that its bytes are compared as: 1, 2, 4 or 8.

        One element's width where that is one of these; else the widest word that divides an element, and single bytes for
        elements of less than a byte.
        """
        return word_nbytes(self.dtype, self.shape, self.nbytes)

    @property
    def num_words(self) -> int:
        return self.nbytes // self.word_nbytes


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header."""

    raw: bytes
    """The JSON text as stored, padding included, without the length before it."""
    tensors: tuple[StoredTensor, ...]
    """In the order of their bytes."""
    data_nbytes: int

    @property
    def data_offset(self) -> int:
        """Position of the data section in the file."""
        return _LENGTH_NBYTES + len(self.raw)

    @property
    def file_nbytes(self) -> int:
        return self.data_offset + self.data_nbytes

    @property
    def prefix(self) -> bytes:
        """What stands before the data: length and JSON text."""
        return len(self.raw).to_bytes(_LENGTH_NBYTES, "little") + self.raw


def word_nbytes(dtype: str, shape: tuple[int, ...], nbytes: int) -> int:
    """See ``StoredTensor.word_nbytes``. Expects a tensor that passed ``parse_header``."""
    known = DTYPE_NBYTES.get(dtype)
    if known is not None:
        return known
    num_elements = math.prod(shape)
    if not num_elements or nbytes % num_elements:
        return 1
    return math.gcd(nbytes // num_elements, 8)


def read_header(fd: int, where: str) -> Header:
    """Read and validate the header of an open file.

    Raises:
        RejectedError: the file breaks a rule of the format; the text says which.
        OSError: it cannot be read.
    """
    file_nbytes = os.fstat(fd).st_size
    prefix = os.pread(fd, _LENGTH_NBYTES, 0)
    if len(prefix) < _LENGTH_NBYTES:
        raise RejectedError(f"{where}: {file_nbytes} bytes; expected a safetensors file, which begins with 8 bytes of length")
    header_nbytes = int.from_bytes(prefix, "little")
    if header_nbytes > MAX_HEADER_NBYTES:
        raise RejectedError(
            f"{where}: header of {header_nbytes} bytes; expected at most {MAX_HEADER_NBYTES}, else not safetensors"
        )
    if header_nbytes > file_nbytes - _LENGTH_NBYTES:
        raise RejectedError(f"{where}: header of {header_nbytes} bytes in a file of {file_nbytes}; the file is cut short")
    raw = os.pread(fd, header_nbytes, _LENGTH_NBYTES)
    if len(raw) != header_nbytes:
        raise RejectedError(f"{where}: read {len(raw)} of {header_nbytes} header bytes; the file is being changed")
    return parse_header(raw, file_nbytes - _LENGTH_NBYTES - header_nbytes, where)


def parse_header(raw: bytes, data_nbytes: int, where: str) -> Header:
    """Validate a header's JSON text for a data section of that many bytes.

    Raises:
        RejectedError: it breaks a rule of the format.
    """
    document = _strict_json(raw, where)
    _check_metadata(document.pop(_METADATA, None), where)
    tensors = sorted((_tensor(name, value, where) for name, value in document.items()), key=lambda t: (t.begin, t.nbytes))
    end = 0
    for tensor in tensors:
        if tensor.begin != end:
            kind = "overlaps the tensor before it" if tensor.begin < end else "leaves a hole before it"
            raise RejectedError(f"{where}: tensor {tensor.name} begins at byte {tensor.begin}, expected {end}: it {kind}")
        end += tensor.nbytes
    if end != data_nbytes:
        raise RejectedError(f"{where}: tensors cover {end} bytes, the file holds {data_nbytes}; it is cut short or has a tail")
    return Header(raw, tuple(tensors), data_nbytes)


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] | None = None) -> Header:
    """A header for tensors ``(name, dtype, shape, nbytes)`` stored back to back in this order, padded to 8 bytes.

    Raises:
        RejectedError: a tensor could not be read back.
    """
    document: dict[str, Any] = {} if metadata is None else {_METADATA: dict(metadata)}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        if name in document:
            raise RejectedError(f"tensor {name} is listed twice; expected one of each name")
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    raw = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    return parse_header(raw + b" " * (-len(raw) % 8), end, "new header")


def _strict_json(raw: bytes, where: str) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise RejectedError(f"{where}: header begins with {raw[:8]!r}; expected '{{'")
    try:
        # NaN and Infinity are Python's own additions to JSON.
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RejectedError(f"{where}: header is not strict UTF-8 JSON: {error}") from error
    if not isinstance(document, dict):
        raise RejectedError(f"{where}: header is a {type(document).__name__}; expected a JSON object")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} stands twice")
    return document


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _check_metadata(metadata: Any, where: str) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise RejectedError(f"{where}: {_METADATA} must map text to text")


def _tensor(name: str, value: Any, where: str) -> StoredTensor:
    try:
        nbytes_of_name = len(name.encode())
    except UnicodeEncodeError as error:
        raise RejectedError(f"{where}: tensor name {name!r} is not Unicode text") from error
    if not 0 < nbytes_of_name <= _MAX_NAME_NBYTES:
        raise RejectedError(f"{where}: a tensor name has {nbytes_of_name} bytes; expected 1 to {_MAX_NAME_NBYTES}")
    if not isinstance(value, dict) or value.keys() != _TENSOR_KEYS:
        raise RejectedError(f"{where}: tensor {name}: expected exactly dtype, shape and data_offsets, got {str(value)[:200]}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or not 0 < len(dtype) <= 32 or not dtype.isascii():
        raise RejectedError(f"{where}: tensor {name}: dtype {str(dtype)[:80]!r} is not a dtype's name")
    if not _naturals(shape) or math.prod(shape) > _MAX_ELEMENTS:
        raise RejectedError(f"{where}: tensor {name}: shape {str(shape)[:80]} is not a shape of at most 2^62 elements")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise RejectedError(f"{where}: tensor {name}: data_offsets {str(offsets)[:80]} are not a begin and an end")
    tensor = StoredTensor(name, dtype, tuple(shape), offsets[0], offsets[1] - offsets[0])
    check_nbytes(dtype, tensor.shape, tensor.nbytes, f"{where}: tensor {name}")
    return tensor


def check_nbytes(dtype: str, shape: tuple[int, ...], nbytes: int, where: str) -> None:
    """Refuse a size that the shape and dtype contradict. A dtype that is not known must spend whole bits on each element."""
    num_elements = math.prod(shape)
    known = DTYPE_NBYTES.get(dtype)
    if known is not None and nbytes != num_elements * known:
        raise RejectedError(f"{where}: {nbytes} bytes; expected {num_elements * known} for {dtype}{list(shape)}")
    if known is None and (nbytes * 8 % num_elements or not nbytes if num_elements else nbytes):
        raise RejectedError(f"{where}: {nbytes} bytes for {dtype}{list(shape)}: no width of that unknown dtype follows from it")


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)
