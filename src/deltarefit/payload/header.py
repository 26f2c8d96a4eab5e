"""The fixed header: who sent this payload, for which attempt, onto which policy version, and how much follows."""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from deltarefit.errors import PayloadInvalidError, RejectedError
from deltarefit.ids import AttemptId, OwnerId, PayloadId, PolicyVersion
from deltarefit.payload.layout import (
    ATTEMPT_NBYTES,
    DIGEST_NBYTES,
    DIGEST_OFFSET,
    DIGEST_PERSON,
    FLAG_KEYED,
    FORMAT_VERSION,
    HEADER,
    MAGIC,
)

__all__ = ["PayloadHeader", "check_digest", "digest_parts", "pack_header", "parse_header", "read_header", "refuse"]

_ATTEMPT = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NO_DIGEST = bytes(DIGEST_NBYTES)


@dataclass(frozen=True, slots=True)
class PayloadHeader:
    """What the first bytes of a payload say. Trust it only as part of a decoded ``Payload``."""

    attempt: AttemptId
    owner: OwnerId
    sequence: int
    """0-based position within its owner's payloads."""
    base_version: PolicyVersion
    """The policy version that differences and masks need to be resident."""
    target_version: PolicyVersion
    plan_digest: str
    """32 hex digits: ``RefitPlan.digest``."""
    num_items: int
    num_changed: int
    """Elements in all items together."""
    num_planes: int
    table_nbytes: int
    """Bytes of the item table, decompressed."""
    table_frame_nbytes: int
    """Bytes of the item table as it travels."""
    payload_nbytes: int
    """Bytes of the whole payload, this header included."""
    is_keyed: bool
    digest: str
    """32 hex digits over header and body. Until ``decode`` has compared it, a claim."""

    @property
    def payload_id(self) -> PayloadId:
        return PayloadId(self.attempt, self.sequence, self.owner)


def refuse(where: object, what: str) -> NoReturn:
    """Raise the one error of this room: payload, what is wrong, and that no harm was done."""
    raise PayloadInvalidError(f"payload {where}: {what}; nothing of it was applied")


def digest_parts(parts: Iterable[bytes | memoryview], key: bytes | None) -> bytes:
    """BLAKE2b-128 over the parts in order, keyed if there is a key."""
    state = hashlib.blake2b(digest_size=DIGEST_NBYTES, key=key or b"", person=DIGEST_PERSON)
    for part in parts:
        state.update(part)
    return state.digest()


def check_digest(header: PayloadHeader, view: memoryview, key: bytes | None) -> None:
    """Compare the digest with the bytes, its own field taken as zero.

    Raises:
        PayloadInvalidError: they differ, or only one of payload and caller has a key.
    """
    if header.is_keyed and key is None:
        refuse(header.payload_id, "it is signed with a run key and this side has none; give this side the run's key")
    if key is not None and not header.is_keyed:
        refuse(header.payload_id, "it is not signed although this run has a key; give its sender the run's key")
    end = DIGEST_OFFSET + DIGEST_NBYTES
    found = digest_parts((view[:DIGEST_OFFSET], _NO_DIGEST, view[end:]), key)
    if not hmac.compare_digest(found, view[DIGEST_OFFSET:end]):
        hint = ", or the two sides have different run keys" if key is not None else ""
        refuse(header.payload_id, f"digest {header.digest} stated, {found.hex()} found: its bytes were altered{hint}")


def pack_header(header: PayloadHeader) -> bytes:
    """The header's bytes, its digest as it stands in ``header``.

    Raises:
        RejectedError: a field does not fit the format.
    """
    attempt = header.attempt.encode("ascii", "replace")
    if not _ATTEMPT.fullmatch(attempt):
        raise RejectedError(f"payload attempt {header.attempt!r}: expected an id made by deltarefit.ids.attempt_id")
    if not 0 <= header.base_version <= header.target_version:
        raise RejectedError(
            f"payload of base version {header.base_version} onto {header.target_version}: expected 0 <= base <= target"
        )
    try:
        plan_digest = bytes.fromhex(header.plan_digest)
        if len(plan_digest) != DIGEST_NBYTES:
            raise ValueError("length")
        return HEADER.pack(
            MAGIC,
            FORMAT_VERSION,
            FLAG_KEYED if header.is_keyed else 0,
            header.num_planes,
            bytes.fromhex(header.digest),
            plan_digest,
            attempt,
            header.owner,
            header.sequence,
            header.base_version,
            header.target_version,
            header.payload_nbytes,
            header.num_changed,
            header.num_items,
            header.table_nbytes,
            header.table_frame_nbytes,
        )
    except (struct.error, ValueError) as error:
        raise RejectedError(
            f"payload {header.payload_id}: a header field does not fit ({error}); expected owner, sequence and table "
            f"below 2^32, versions below 2^64 and a plan digest of 32 hex digits, got plan digest {header.plan_digest!r}"
        ) from error


def parse_header(view: memoryview) -> PayloadHeader:
    """Read and check the header by itself; ``view`` is the payload's bytes, as many as there are."""
    if view.nbytes < HEADER.size:
        refuse("of unknown origin", f"{view.nbytes} bytes, expected at least the {HEADER.size} of a header")
    (magic, format_version, flags, num_planes, digest, plan_digest, attempt, owner, sequence, base_version, target_version,
     payload_nbytes, num_changed, num_items, table_nbytes, table_frame_nbytes) = HEADER.unpack_from(view)  # fmt: skip
    if magic != MAGIC:
        refuse("of unknown origin", f"starts with {magic.hex()}, expected {MAGIC.hex()}: this is no payload")
    if format_version != FORMAT_VERSION:
        refuse(
            "of unknown origin", f"format version {format_version}, this build reads {FORMAT_VERSION}; upgrade the older side"
        )
    if flags & ~FLAG_KEYED:
        refuse("of unknown origin", f"flags {flags:#06x}, expected none but {FLAG_KEYED:#06x}")
    attempt_text = attempt.rstrip(b"\0")
    if not _ATTEMPT.fullmatch(attempt_text):
        refuse("of unknown origin", f"attempt {attempt_text!r}, expected an attempt id of at most {ATTEMPT_NBYTES} characters")
    if base_version > target_version:
        refuse("of unknown origin", f"base version {base_version} is above target version {target_version}")
    return PayloadHeader(
        attempt=AttemptId(attempt_text.decode("ascii")),
        owner=OwnerId(owner),
        sequence=sequence,
        base_version=PolicyVersion(base_version),
        target_version=PolicyVersion(target_version),
        plan_digest=plan_digest.hex(),
        num_items=num_items,
        num_changed=num_changed,
        num_planes=num_planes,
        table_nbytes=table_nbytes,
        table_frame_nbytes=table_frame_nbytes,
        payload_nbytes=payload_nbytes,
        is_keyed=bool(flags & FLAG_KEYED),
        digest=digest.hex(),
    )


def read_header(data: bytes | bytearray | memoryview) -> PayloadHeader:
    """Read the header alone: cheap, for logs and listings. Nothing in it has been compared with the digest.

    ``data`` may be cut after the header.

    Raises:
        PayloadInvalidError: these bytes do not start with a header that this build reads.
    """
    return parse_header(memoryview(data).cast("B"))
