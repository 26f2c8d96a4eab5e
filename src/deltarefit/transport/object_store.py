"""Payloads as objects: each owner uploads once, every rollout node downloads (paper 7.1, B.1)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from deltarefit.errors import PayloadInvalidError
from deltarefit.ids import AttemptId, OwnerId, PayloadId
from deltarefit.transport import keys
from deltarefit.transport.base import PayloadEntry, check_payload
from deltarefit.transport.guard import STOP_TIMEOUT_S, SendGuard
from deltarefit.transport.manifest import MAX_MANIFEST_NBYTES, Manifest, OwnerEnd
from deltarefit.transport.stores import RunStore

__all__ = [
    "ManifestWriter",
    "ObjectStoreSender",
    "ObjectStoreSource",
    "is_staged",
    "read_manifest",
    "sweep_attempts",
    "sweep_staged",
]

_STAGED = re.compile(r"#\d+$")
"""How obstore ends the names of files that it will rename when they are whole."""


class ObjectStoreSender:
    """A ``PayloadSender`` that uploads each payload as one object under the attempt's prefix."""

    def __init__(self, store: RunStore, *, stop_timeout_s: float = STOP_TIMEOUT_S) -> None:
        self._store = store
        self._guard = SendGuard(stop_timeout_s)

    def send(self, payload_id: PayloadId, data: bytes | memoryview) -> None:
        """Upload; large payloads go up in parts. On return the object is durable as the store is."""
        with self._guard.sending(payload_id):
            self._store.put(keys.payload(payload_id), data)

    def stop_and_wait(self, attempt: AttemptId) -> None:
        """See ``PayloadSender``."""
        self._guard.stop_and_wait(attempt)

    def cleanup(self, attempt: AttemptId) -> None:
        """Remove payloads and manifest of the attempt."""
        self._guard.stop_and_wait(attempt)
        self._store.delete_prefix(keys.attempt_prefix(attempt))


class ObjectStoreSource:
    """A ``PayloadSource`` that downloads; a large payload in ranges, several at a time, each repeated by itself."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def fetch(self, payload_id: PayloadId, *, nbytes: int, digest: str) -> bytes:
        """See ``PayloadSource``."""
        try:
            return self._read_checked(payload_id, nbytes, digest)
        except PayloadInvalidError:
            # Proxies have been seen to cut bodies short or mix them up: only a second read tells damage on the way
            # from a damaged object.
            return self._read_checked(payload_id, nbytes, digest)

    def _read_checked(self, payload_id: PayloadId, nbytes: int, digest: str) -> bytes:
        data = self._read(payload_id, nbytes)
        check_payload(payload_id, data, nbytes=nbytes, digest=digest)
        return data

    def _read(self, payload_id: PayloadId, nbytes: int) -> bytes:
        key = keys.payload(payload_id)
        part_nbytes = self._store.settings.part_nbytes
        if nbytes <= part_nbytes:
            return self._store.get(key, max_nbytes=nbytes)
        info = self._store.head(key)
        if info is not None and info.nbytes != nbytes:
            raise PayloadInvalidError(f"{payload_id}: expected {nbytes} bytes, the object has {info.nbytes}")
        data = bytearray(nbytes)

        def read_part(start: int) -> None:
            length = min(part_nbytes, nbytes - start)
            data[start : start + length] = self._store.get_range(key, start, length)

        with ThreadPoolExecutor(self._store.settings.concurrency, thread_name_prefix="fetch") as pool:
            for done in [pool.submit(read_part, start) for start in range(0, nbytes, part_nbytes)]:
                done.result()
        return bytes(data)


class ManifestWriter:
    """One owner's part of an attempt's manifest, rewritten after every payload: receivers then need no call from the owner.

    Used by one thread. A restarted owner never continues an attempt, so it never reads its part back.
    """

    def __init__(self, store: RunStore, attempt: AttemptId, owner: OwnerId) -> None:
        self._store = store
        self._attempt = attempt
        self._owner = owner
        self._entries: list[PayloadEntry] = []

    def add(self, entry: PayloadEntry) -> None:
        """List a payload, after its ``send`` returned. Durable on return."""
        self._entries.append(entry)
        self._write(())

    def end(self) -> OwnerEnd:
        """Close the list. Durable on return."""
        end = OwnerEnd.of(int(self._owner), self._entries)
        self._write((end,))
        return end

    def _write(self, ended: tuple[OwnerEnd, ...]) -> None:
        part = Manifest(self._attempt, tuple(sorted(self._entries)), ended)
        self._store.put(keys.manifest_part(self._attempt, int(self._owner)), part.encode())


def read_manifest(store: RunStore, attempt: AttemptId) -> Manifest:
    """What owners have listed so far; empty if nothing yet.

    Raises:
        PayloadInvalidError: a part is damaged, or lists another owner's payloads.
    """
    parts: list[Manifest] = []
    for info in store.listing(keys.manifest_prefix(attempt)):
        part = store.get_as(info.key, partial(Manifest.decode, attempt=attempt), max_nbytes=MAX_MANIFEST_NBYTES)
        owners = {entry.owner for entry in part.entries} | {end.owner for end in part.ended}
        if any(keys.manifest_part(attempt, owner) != info.key for owner in owners):
            raise PayloadInvalidError(f"{info.key}: it lists payloads of owners {sorted(owners)}, not only its own")
        parts.append(part)
    return Manifest.merge(attempt, parts)


def sweep_attempts(store: RunStore, *, keep: Callable[[], Sequence[AttemptId]]) -> int:
    """Remove every attempt's objects but those to keep: what killed owners left behind, and old links.

    ``keep`` is asked after the listing, so that what others begin or commit meanwhile is not touched: whatever was not there
    when the attempts were listed stays. Of the last one to keep, what only mattered while it was under way is removed. Returns
    how many attempts were removed. What it leaves when it fails on the way, the next call removes.
    """
    found = {attempt for key in store.children(keys.ATTEMPTS) if (attempt := keys.attempt_of(key)) is not None}
    kept = keep()
    removed = sorted(found - set(kept))
    for attempt in removed:
        store.delete_prefix(keys.attempt_prefix(attempt))
    for attempt in kept[-1:]:
        strays = [key for key in store.children(keys.attempt_prefix(attempt)) if not keys.is_link(key)]
        store.delete(key for key in strays if not key.endswith("/"))
        for prefix in (key for key in strays if key.endswith("/")):
            store.delete_prefix(prefix.removesuffix("/"))
    return len(removed)


def is_staged(name: str) -> bool:
    """Whether a file of a ``file://`` run is an object that is being written, or whose writer was killed. Listings hide it."""
    return _STAGED.search(name) is not None


def sweep_staged(store: RunStore, *, before_s: float) -> int:
    """Remove what killed writers left of objects in a directory and nobody wrote to since then; how many files.

    The time is one that the directory itself gave. Other stores show nothing of an object that was not written to its end.
    """
    removed = 0
    for path in store.directory.rglob("*") if store.directory is not None else ():
        with contextlib.suppress(OSError):  # somebody else was faster
            if is_staged(path.name) and path.stat().st_mtime < before_s:
                path.unlink()
                removed += 1
    return removed
