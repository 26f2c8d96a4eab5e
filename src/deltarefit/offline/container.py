"""The delta file: head, payloads, blobs, manifest. ``FORMAT.md`` is normative; a test holds it and these constants equal.

Nothing is believed before its digest was compared: the head's digest covers the head, the head's the manifest, the manifest's
every payload and blob. So the manifest's digest names the whole file (``Delta.id``).
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import msgspec
import zstandard

from deltarefit.canonical import Catalog
from deltarefit.errors import PayloadInvalidError, RejectedError
from deltarefit.ids import AttemptId, OwnerId, PolicyVersion
from deltarefit.offline.files import DISK, Disk, read_exact
from deltarefit.offline.grid import Grid
from deltarefit.offline.manifest import BlobRow, FileRow, Manifest, PayloadRow, TensorRow, check
from deltarefit.offline.safetensors import Header, parse_header
from deltarefit.payload import Limits, decode, encode
from deltarefit.payload.frames import could_hold
from deltarefit.records import CodedItem

__all__ = ["FORMAT_VERSION", "HEAD", "MAGIC", "MAX_MANIFEST_NBYTES", "Delta", "DeltaWriter", "blob_digest", "encode_items"]

MAGIC = b"\x89DRFD\r\n\x1a"
"""As for payloads: a transfer that took the file for text shows in its first eight bytes."""
FORMAT_VERSION = 2
"""Raised with the format of payloads too, which deltas are made of: an older build could open such a file, and not read it."""
HEAD_FIELDS = (
    ("magic", "8s"),
    ("format_version", "H"),
    ("flags", "H"),
    ("zero", "I"),
    ("manifest_offset", "Q"),
    ("manifest_frame_nbytes", "Q"),
    ("manifest_nbytes", "Q"),
    ("manifest_digest", "16s"),
    ("head_digest", "16s"),
)
HEAD = struct.Struct("<" + "".join(code for _, code in HEAD_FIELDS))
DIGEST_NBYTES = 16
_HEAD_DIGEST_OFFSET = HEAD.size - DIGEST_NBYTES
DIGEST_PERSON = b"deltarefit/off/1"
MAX_MANIFEST_NBYTES = 2**30
"""Decompressed. A tensor takes about 200 bytes: enough for some five million."""
MANIFEST_LEVEL = 3
BLOB_LEVEL = 9
"""Header texts, tokenizers and configuration: text, and little of it."""
_ATTEMPT = AttemptId("offline")
_OWNER = OwnerId(0)
_BASE, _TARGET = PolicyVersion(0), PolicyVersion(1)
_PAYLOAD_LIMITS = Limits(payload_nbytes=2**28, decompressed_nbytes=2**28, items=3 * 4096, name_nbytes=2**20)
"""A payload covers one unit: at most 4,096 slices of 16 MiB together, each element at most once, with its location."""


def digest_of(data: bytes | memoryview) -> str:
    """BLAKE2b-128, personalised for delta files, as 32 hex digits."""
    return hashlib.blake2b(data, digest_size=DIGEST_NBYTES, person=DIGEST_PERSON).hexdigest()


blob_digest = digest_of


def encode_items(items: list[CodedItem], *, first_slice: int, plan: str) -> bytes:
    """The payload of one unit; its sequence number is the ordinal of the unit's first slice."""
    return encode(
        items,
        attempt=_ATTEMPT,
        owner=_OWNER,
        sequence=first_slice,
        base_version=_BASE,
        target_version=_TARGET,
        plan_digest=plan,
        limits=_PAYLOAD_LIMITS,
    )


class DeltaWriter:
    """Writes a delta into an open file: payloads, then blobs, then ``finish``. Until then the file is no delta."""

    def __init__(self, fd: int, disk: Disk = DISK) -> None:
        self._fd = fd
        self._disk = disk
        self._end = HEAD.size
        self.payloads: list[PayloadRow] = []
        self.blobs: list[BlobRow] = []

    def add_payload(self, data: bytes, first_slice: int, end_slice: int) -> None:
        self._append(data)
        self.payloads.append(PayloadRow(len(data), digest_of(data), first_slice, end_slice))

    def add_blob(self, content: bytes) -> int:
        """Store a header text or a companion; gives the blob's number."""
        frame = zstandard.ZstdCompressor(level=BLOB_LEVEL).compress(content)
        return self.add_frame(frame, len(content))

    def add_frame(self, frame: bytes, content_nbytes: int) -> int:
        """Store a blob that is compressed already, as it is in another delta."""
        self._append(frame)
        self.blobs.append(BlobRow(len(frame), digest_of(frame), content_nbytes))
        return len(self.blobs) - 1

    def finish(self, manifest: Manifest) -> tuple[str, int]:
        """Write manifest and head. Gives the delta's id and the file's bytes."""
        check(manifest, "new delta")
        text = msgspec.json.encode(manifest)
        if len(text) > MAX_MANIFEST_NBYTES:
            raise RejectedError(f"manifest of {len(text)} bytes, at most {MAX_MANIFEST_NBYTES} are allowed: too many tensors")
        frame = zstandard.ZstdCompressor(level=MANIFEST_LEVEL).compress(text)
        manifest_offset = self._end
        self._append(frame)
        fields = (MAGIC, FORMAT_VERSION, 0, 0, manifest_offset, len(frame), len(text), bytes.fromhex(digest_of(frame)))
        head = HEAD.pack(*fields, bytes(DIGEST_NBYTES))[:_HEAD_DIGEST_OFFSET]
        self._disk.write(self._fd, head + bytes.fromhex(digest_of(head)), 0)
        return digest_of(frame), self._end

    def _append(self, data: bytes) -> None:
        self._disk.write(self._fd, data, self._end)
        self._end += len(data)


@dataclass(frozen=True, slots=True)
class _Head:
    manifest_offset: int
    manifest_frame_nbytes: int
    manifest_nbytes: int
    manifest_digest: str


class Delta:
    """An open delta whose head and manifest were checked. Payloads and blobs are checked as they are read.

    Use as a context manager; reading is safe from several threads.

    Raises:
        PayloadInvalidError: the file is no delta, was cut, altered or contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise RejectedError(f"{path}: not a regular file; expected a delta made by 'deltarefit diff'")
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.nbytes = os.fstat(self._fd).st_size
            head = _read_head(self._fd, self.nbytes, path)
            self.id = head.manifest_digest
            self.manifest = _read_manifest(self._fd, head, path)
            self._section_offsets = self._find_sections(head.manifest_offset)
            self.grid = Grid(self.manifest.target_states())
            self._rows = {row.name: row for row in self.manifest.tensors}
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._fd)

    def _find_sections(self, manifest_offset: int) -> list[int]:
        offsets = [HEAD.size]
        for nbytes, _ in self.manifest.sections():
            offsets.append(offsets[-1] + nbytes)
        if offsets[-1] != manifest_offset:
            _refuse(self.path, f"its parts end at byte {offsets[-1]}, its manifest begins at {manifest_offset}")
        return offsets[:-1]

    def row(self, tensor: str) -> TensorRow | None:
        """What the delta does to a tensor; None if neither side holds it."""
        return self._rows.get(tensor)

    def section(self, number: int) -> bytes:
        """The bytes of a payload, or of a blob counted after all payloads, compared with their digest.

        Raises:
            PayloadInvalidError: they were altered since the delta was made.
        """
        nbytes, digest = self._section_row(number)
        data = read_exact(self._fd, nbytes, self._section_offsets[number], str(self.path))
        if digest_of(data) != digest:
            _refuse(
                self.path, f"part {number} ({nbytes} bytes) has digest {digest_of(data)}, expected {digest}: it was altered"
            )
        return data

    def _section_row(self, number: int) -> tuple[int, str]:
        rows = self.manifest.payloads
        row = rows[number] if number < len(rows) else self.manifest.blobs[number - len(rows)]
        return row.nbytes, row.digest

    def frame(self, blob: int) -> bytes:
        """A blob as stored."""
        return self.section(len(self.manifest.payloads) + blob)

    def content(self, file: FileRow) -> bytes:
        """The header text or companion that the delta carries for a file.

        Raises:
            PayloadInvalidError: it is not what the manifest says.
        """
        if file.blob is None:
            raise RejectedError(f"{self.path}: does not carry {file.name}")
        content = _open_frame(self.frame(file.blob), self.manifest.blobs[file.blob].content_nbytes, self.path, file.name)
        if digest_of(content) != file.digest:
            _refuse(self.path, f"{file.name} has digest {digest_of(content)}, expected {file.digest}")
        return content

    def header(self, file: FileRow) -> Header:
        """The validated safetensors header of a tensor file of the target.

        Raises:
            PayloadInvalidError: it contradicts the format or the manifest's file size.
        """
        raw = self.content(file)
        try:
            return parse_header(raw, file.nbytes - len(raw) - 8, f"{self.path}: {file.name}")
        except RejectedError as error:
            raise PayloadInvalidError(str(error)) from error

    def payload_numbers(self, first_slice: int, end_slice: int) -> Iterator[int]:
        """The payloads that may hold items for slices ``first_slice <= ordinal < end_slice``."""
        rows = self.manifest.payloads
        low, high = 0, len(rows)
        while low < high:
            middle = (low + high) // 2
            if rows[middle].end_slice <= first_slice:
                low = middle + 1
            else:
                high = middle
        while low < len(rows) and rows[low].first_slice < end_slice:
            yield low
            low += 1

    def items(self, number: int) -> dict[int, list[CodedItem]]:
        """The items of one payload by slice ordinal, every location checked against its slice.

        Raises:
            PayloadInvalidError: the payload is invalid or belongs to another delta.
        """
        row = self.manifest.payloads[number]
        catalog = Catalog(piece.spec for piece in self.grid.range(row.first_slice, row.end_slice))
        opened = decode(self.section(number), catalog=catalog, limits=_PAYLOAD_LIMITS)
        header = opened.header
        found = (header.attempt, header.owner, header.sequence, header.plan_digest)
        expected = (_ATTEMPT, _OWNER, row.first_slice, self.manifest.plan)
        if found != expected:
            _refuse(self.path, f"payload {number} says {found}, expected {expected}: it belongs to another delta")
        by_slice: dict[int, list[CodedItem]] = {}
        for item in opened.items:
            by_slice.setdefault(int(item.spec.name), []).append(item)
        return by_slice


def _refuse(path: Path, what: str) -> NoReturn:
    raise PayloadInvalidError(f"{path}: {what}; nothing was applied")


def _read_head(fd: int, nbytes: int, path: Path) -> _Head:
    if nbytes < HEAD.size:
        _refuse(path, f"{nbytes} bytes, expected at least the {HEAD.size} of a delta's head: cut short, or no delta")
    raw = read_exact(fd, HEAD.size, 0, str(path))
    magic, format_version, flags, zero, offset, frame_nbytes, manifest_nbytes, digest, head_digest = HEAD.unpack(raw)
    if magic != MAGIC:
        _refuse(path, f"starts with {magic.hex()}, expected {MAGIC.hex()}: this is no delta, or one that was never finished")
    if format_version != FORMAT_VERSION:
        older = "make it again with 'deltarefit diff', or apply it with the build that made it"
        advice = older if format_version < FORMAT_VERSION else "upgrade this build"
        _refuse(path, f"a delta of format version {format_version}, this build reads {FORMAT_VERSION}: {advice}")
    if digest_of(raw[:_HEAD_DIGEST_OFFSET]) != head_digest.hex() or flags or zero:
        _refuse(path, "its head was altered")
    if offset + frame_nbytes != nbytes:
        _refuse(path, f"{nbytes} bytes, its head says {offset + frame_nbytes}: cut short, or something follows it")
    if offset < HEAD.size or not 0 < manifest_nbytes <= MAX_MANIFEST_NBYTES:
        _refuse(path, f"a manifest of {manifest_nbytes} bytes at byte {offset}, at most {MAX_MANIFEST_NBYTES} are allowed")
    return _Head(offset, frame_nbytes, manifest_nbytes, digest.hex())


def _read_manifest(fd: int, head: _Head, path: Path) -> Manifest:
    if head.manifest_frame_nbytes > MAX_MANIFEST_NBYTES:
        _refuse(path, f"a manifest of {head.manifest_frame_nbytes} bytes compressed, at most {MAX_MANIFEST_NBYTES} are allowed")
    frame = read_exact(fd, head.manifest_frame_nbytes, head.manifest_offset, str(path))
    if digest_of(frame) != head.manifest_digest:
        _refuse(path, f"its manifest has digest {digest_of(frame)}, expected {head.manifest_digest}: it was altered")
    text = _open_frame(frame, head.manifest_nbytes, path, "manifest")
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PayloadInvalidError(f"{path}: its manifest is invalid: {error}; nothing was applied") from error
    return check(manifest, str(path))


def _open_frame(frame: bytes, nbytes: int, path: Path, what: str) -> bytes:
    """Decompress one whole frame of a stated size, which is compared with the frame's own, if it has one, before anything is
    allocated. Frames of streaming encoders have none and are decompressed under that limit."""
    try:
        stated = zstandard.get_frame_parameters(frame).content_size
        if stated not in (nbytes, zstandard.CONTENTSIZE_UNKNOWN):
            _refuse(path, f"{what}: its zstd frame states {stated} bytes, expected {nbytes}")
        if not could_hold(len(frame), nbytes):
            _refuse(path, f"{what}: {len(frame)} bytes of zstd cannot hold {nbytes}")
        # The binding takes 0 for "no limit given".
        reader = zstandard.ZstdDecompressor()
        content: bytes = reader.decompress(frame, max_output_size=max(1, nbytes), allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PayloadInvalidError(f"{path}: {what}: not one whole zstd frame: {error}; nothing was applied") from error
    if len(content) != nbytes:
        _refuse(path, f"{what}: {len(content)} bytes decompressed, expected {nbytes}")
    return content
