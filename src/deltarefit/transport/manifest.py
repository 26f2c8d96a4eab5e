"""The list of payloads that an attempt is expected to deliver (paper B.1)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from deltarefit.errors import PayloadInvalidError
from deltarefit.ids import AttemptId
from deltarefit.transport.base import Digest, Ordinal, PayloadEntry

__all__ = ["MAX_MANIFEST_NBYTES", "Manifest", "OwnerEnd"]

MAX_MANIFEST_NBYTES = 16 << 20
"""About 300,000 entries; the paper's largest refit has 482 payloads (App. C)."""


class OwnerEnd(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """Says that an owner has sent its last payload of the attempt."""

    owner: Ordinal
    count: Ordinal
    """How many payloads it sent; 0 when nothing of its share changed."""
    digest: Digest
    """Over the digests of its payloads, in sequence order."""

    @classmethod
    def of(cls, owner: int, entries: Iterable[PayloadEntry]) -> OwnerEnd:
        """Close an owner's list. ``entries`` are all its payloads, in any order."""
        ordered = sorted(entries)
        lines = "".join(f"{entry.sequence} {entry.nbytes} {entry.digest}\n" for entry in ordered)
        return cls(owner, len(ordered), hashlib.blake2b(lines.encode(), digest_size=16).hexdigest())


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Payloads announced so far, and the owners that have ended. Entries are in the declared order."""

    attempt: str
    entries: tuple[PayloadEntry, ...] = ()
    ended: tuple[OwnerEnd, ...] = ()

    def __post_init__(self) -> None:
        places = [(entry.sequence, entry.owner) for entry in self.entries]
        if places != sorted(set(places)):
            raise ValueError("entries must be in (sequence, owner) order, each once")
        owners = [end.owner for end in self.ended]
        if owners != sorted(set(owners)):
            raise ValueError("ended owners must be in order, each once")
        by_owner: dict[int, list[PayloadEntry]] = {}
        for entry in self.entries:
            by_owner.setdefault(entry.owner, []).append(entry)
        for end in self.ended:
            mine = by_owner.get(end.owner, [])
            sequences = [entry.sequence for entry in mine]
            if sequences != list(range(end.count)) or OwnerEnd.of(end.owner, mine) != end:
                raise ValueError(f"owner {end.owner} ended with {end.count} payloads, but {len(mine)} others are listed")

    def encode(self) -> bytes:
        """The bytes of this manifest (MessagePack)."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes, *, attempt: AttemptId) -> Manifest:
        """Read a manifest of that attempt.

        Raises:
            PayloadInvalidError: too long, malformed, inconsistent in itself, or of another attempt.
        """
        where = f"manifest of attempt {attempt}"
        if len(data) > MAX_MANIFEST_NBYTES:
            raise PayloadInvalidError(f"{where}: expected at most {MAX_MANIFEST_NBYTES} bytes, got {len(data)}")
        try:
            manifest = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, ValueError) as error:
            raise PayloadInvalidError(f"{where}: {error}") from error
        if manifest.attempt != attempt:
            raise PayloadInvalidError(f"{where}: the object there is of attempt {manifest.attempt[:80]!r}")
        return manifest

    @classmethod
    def merge(cls, attempt: AttemptId, parts: Iterable[Manifest]) -> Manifest:
        """Join the owners' parts. Parts of one owner must not be given twice."""
        listed = list(parts)
        entries = sorted(entry for part in listed for entry in part.entries)
        ended = sorted(end for part in listed for end in part.ended)
        try:
            return cls(attempt, tuple(entries), tuple(ended))
        except ValueError as error:
            raise PayloadInvalidError(f"manifest of attempt {attempt}: {error}") from error

    def lacks(self, num_owners: int) -> tuple[int, ...]:
        """Owners below ``num_owners`` that have not ended; empty means that the list is final."""
        ended = {end.owner for end in self.ended}
        return tuple(owner for owner in range(num_owners) if owner not in ended)
