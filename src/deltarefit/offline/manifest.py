"""The delta's manifest: which checkpoint it needs, which one it gives, and where its bytes are. ``FORMAT.md`` is normative.

Values are checked when they are read (``check``): past that, no number of a manifest is doubted again.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from deltarefit.canonical import TensorDigest, digest_of_digests
from deltarefit.errors import PayloadInvalidError, RejectedError
from deltarefit.offline.checkpoint import MAX_COMPANION_NBYTES
from deltarefit.offline.files import check_file_name
from deltarefit.offline.grid import Grid
from deltarefit.offline.safetensors import MAX_HEADER_NBYTES, check_nbytes, word_nbytes

__all__ = [
    "BlobRow",
    "FileRow",
    "Manifest",
    "PayloadRow",
    "TensorRow",
    "TensorState",
    "check",
    "identity_of",
    "policy_digest_of",
]

_HEX_DIGEST = re.compile(r"[0-9a-f]{32}")


class TensorState(msgspec.Struct, frozen=True, array_like=True):
    """What one tensor is in one checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str
    """``TensorDigest.hex()`` over its words, keyed by flat word index: for a known dtype, the digest that receivers report."""

    @property
    def word_nbytes(self) -> int:
        return word_nbytes(self.dtype, self.shape, self.nbytes)

    @property
    def num_words(self) -> int:
        return self.nbytes // self.word_nbytes

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class TensorRow(msgspec.Struct, frozen=True, array_like=True):
    """One tensor on both sides."""

    name: str
    base: TensorState | None
    """None: the base does not hold it."""
    target: TensorState | None
    """None: removed."""
    is_carried: bool
    """The items apply to the base's words, cut or continued with zeros to the target's length; else to zeros alone."""
    num_sent: int
    """Words in the items of this tensor."""

    @property
    def kind(self) -> Literal["same", "changed", "reshaped", "retyped", "added", "removed"]:
        if self.base is None:
            return "added"
        if self.target is None:
            return "removed"
        if self.base.dtype != self.target.dtype:
            return "retyped"
        if self.base.shape != self.target.shape:
            return "reshaped"
        return "same" if self.base.digest == self.target.digest else "changed"


class FileRow(msgspec.Struct, frozen=True, array_like=True):
    """One file of the target checkpoint."""

    name: str
    holds_tensors: bool
    nbytes: int
    """Of the whole file."""
    digest: str
    """BLAKE2b-128 of a companion's bytes, or of a tensor file's header text."""
    blob: int | None
    """Which blob holds the header text or the companion's bytes; None: the base has this very companion."""


class PayloadRow(msgspec.Struct, frozen=True, array_like=True):
    """One payload: items for the slices ``first_slice <= ordinal < end_slice`` of the target's grid."""

    nbytes: int
    digest: str
    """BLAKE2b-128 of its bytes."""
    first_slice: int
    end_slice: int


class BlobRow(msgspec.Struct, frozen=True, array_like=True):
    """One zstd frame that holds a header text or a companion."""

    nbytes: int
    """As stored."""
    digest: str
    """BLAKE2b-128 of the stored bytes."""
    content_nbytes: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything about a delta but its items."""

    base: str
    """Identity of the checkpoint that it needs."""
    target: str
    """Identity of the checkpoint that it gives."""
    layout: Literal["file", "directory"]
    tensors_only: bool
    """Of the companions, it knows the index alone."""
    encoding: str
    """What changed elements of carried tensors were encoded as; ``folded`` for a merged chain."""
    plan: str
    """32 hex digits that every payload repeats as its plan digest."""
    tensors: tuple[TensorRow, ...]
    """In name order: every tensor of base and target."""
    files: tuple[FileRow, ...]
    """The target's files in name order."""
    payloads: tuple[PayloadRow, ...]
    """By ascending slices; stored in this order, from the end of the head."""
    blobs: tuple[BlobRow, ...]
    """Stored after the payloads, in this order."""

    def base_states(self) -> dict[str, TensorState]:
        return {row.name: row.base for row in self.tensors if row.base is not None}

    def target_states(self) -> dict[str, TensorState]:
        return {row.name: row.target for row in self.tensors if row.target is not None}

    def sections(self) -> list[tuple[int, str]]:
        """Bytes and digest of every payload and blob, in the order in which they are stored."""
        return [(row.nbytes, row.digest) for row in self.payloads] + [(row.nbytes, row.digest) for row in self.blobs]


def identity_of(states: Mapping[str, TensorState]) -> str:
    """Names a checkpoint by its tensors: 32 hex digits over names, dtypes, shapes and digests; files do not matter."""
    lines = (
        f"{name}\0{state.dtype}\0{','.join(map(str, state.shape))}\0{state.digest}\n" for name, state in sorted(states.items())
    )
    return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()


def policy_digest_of(states: Mapping[str, TensorState]) -> str:
    """The digest that a run reports for a policy with these tensors (``canonical.digest_of_digests``)."""
    return digest_of_digests({name: TensorDigest.from_hex(state.digest) for name, state in states.items()})


def first_difference(expected: Mapping[str, TensorState], got: Mapping[str, TensorState]) -> str | None:
    """The first tensor, by name, on which two checkpoints differ, and how. None if they are the same."""
    for name in sorted(expected.keys() | got.keys()):
        left, right = expected.get(name), got.get(name)
        if left is None:
            return f"tensor {name}: expected none of this name, got {right}"
        if right is None:
            return f"tensor {name}: expected {left}, got none of this name"
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return f"tensor {name}: expected {left}, got {right}"
        if left.digest != right.digest:
            return f"tensor {name} {left}: expected digest {left.digest}, got {right.digest}"
    return None


def check(manifest: Manifest, where: str) -> Manifest:
    """Refuse a manifest that contradicts itself.

    Raises:
        PayloadInvalidError: the first contradiction found.
    """
    try:
        _check_tensors(manifest)
        _check_files(manifest)
        _check_sections(manifest)
    except (RejectedError, ValueError) as error:
        raise PayloadInvalidError(f"{where}: its manifest is invalid: {error}; nothing was applied") from error
    return manifest


def _check_tensors(manifest: Manifest) -> None:
    names = [row.name for row in manifest.tensors]
    if names != sorted(set(names)):
        raise ValueError("tensors are not in strictly ascending name order")
    for row in manifest.tensors:
        if not row.name or (row.base is None and row.target is None) or row.num_sent < 0:
            raise ValueError(f"tensor {row.name!r} is on neither side, has no name or a negative count")
        for state in (row.base, row.target):
            if state is not None:
                _check_state(row.name, state)
        if row.is_carried and (row.base is None or row.target is None or row.base.dtype != row.target.dtype):
            raise ValueError(f"tensor {row.name} is carried, but base and target do not both hold it in one dtype")
        if row.is_carried and row.base and row.target and row.base.word_nbytes != row.target.word_nbytes:
            raise ValueError(f"tensor {row.name} is carried between words of different width")
        if row.target is not None and row.num_sent > row.target.num_words:
            raise ValueError(f"tensor {row.name} sends {row.num_sent} of {row.target.num_words} words")
    for label, identity, states in (
        ("base", manifest.base, manifest.base_states()),
        ("target", manifest.target, manifest.target_states()),
    ):
        if identity != identity_of(states):
            raise ValueError(f"{label} is {identity}, its tensors give {identity_of(states)}")


def _check_state(name: str, state: TensorState) -> None:
    if not 0 < len(state.dtype) <= 32 or any(length < 0 for length in state.shape) or math.prod(state.shape) > 2**62:
        raise ValueError(f"tensor {name}: no such dtype or shape: {state.dtype[:80]!r}, {state.shape}")
    _check_hex(state.digest, f"tensor {name}")
    check_nbytes(state.dtype, state.shape, state.nbytes, f"tensor {name}")


def _check_hex(text: str, where: str) -> None:
    if not _HEX_DIGEST.fullmatch(text):
        raise ValueError(f"{where}: digest {text[:80]!r} is not 32 hex digits")


def _check_files(manifest: Manifest) -> None:
    names = [row.name for row in manifest.files]
    if names != sorted(set(names)):
        raise ValueError("files are not in strictly ascending name order")
    if manifest.layout == "file" and len(names) != 1:
        raise ValueError(f"a single file, but {len(names)} are listed")
    if not any(row.holds_tensors for row in manifest.files):
        raise ValueError("no file holds tensors")
    used = []
    for row in manifest.files:
        check_file_name(row.name, "files")
        _check_hex(row.digest, f"file {row.name}")
        if row.nbytes < 0 or (row.holds_tensors and row.blob is None):
            raise ValueError(f"file {row.name}: negative size, or no header")
        if row.blob is not None:
            used.append(row.blob)
        limit = MAX_HEADER_NBYTES if row.holds_tensors else MAX_COMPANION_NBYTES
        if row.blob is not None and not 0 <= row.blob < len(manifest.blobs):
            raise ValueError(f"file {row.name}: blob {row.blob} of {len(manifest.blobs)}")
        if row.blob is not None and not 0 <= manifest.blobs[row.blob].content_nbytes <= limit:
            raise ValueError(f"file {row.name}: {manifest.blobs[row.blob].content_nbytes} bytes, at most {limit} are allowed")
    if sorted(used) != list(range(len(manifest.blobs))):
        raise ValueError("blobs and files are not one to one")


def _check_sections(manifest: Manifest) -> None:
    _check_hex(manifest.plan, "plan")
    num_slices = len(Grid(manifest.target_states()))
    end = 0
    for row in manifest.payloads:
        if not end <= row.first_slice < row.end_slice <= num_slices:
            raise ValueError(
                f"payload for slices {row.first_slice} to {row.end_slice}, after {end} and within {num_slices} expected"
            )
        end = row.end_slice
    for nbytes, digest in manifest.sections():
        _check_hex(digest, "section")
        if nbytes < 1:
            raise ValueError(f"section of {nbytes} bytes")
