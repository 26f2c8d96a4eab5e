"""Where a run's control record is kept: beside its payloads, or in an etcd that an object beside them names.

One URL still names a run. The trainer that makes the run decides (``PublisherSettings.control``); everybody else finds out from
``control/place``, which is written once and never changed: two places for one record would be two coordinators.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

from deltarefit.control import (
    ABSENT,
    EtcdRecordStore,
    MemoryRecordStore,
    ObjectRecordStore,
    RecordStore,
    SqliteRecordStore,
    Tag,
    probe_conditional_writes,
)
from deltarefit.errors import PayloadInvalidError, PayloadMissingError, RejectedError, TransportError
from deltarefit.runtime.clock import IdSource
from deltarefit.transport import RunStore, keys

__all__ = ["PLACE", "etcd_store", "is_placed_elsewhere", "place_record", "probe_record_store", "record_store"]

PLACE = keys.control("place")
_MAX_PLACE_NBYTES = 4096
_EXPECTED = "expected etcd://host:2379/key, with TLS etcds://host:2379/key; several hosts are separated by commas"
_MEMORY: dict[str, MemoryRecordStore] = {}
"""Of memory:// runs, by URL: all participants live in this process."""


class _PlacedRecordStore:
    """The run's record, wherever it is. Until the run exists it may still be placed, so that is looked up anew."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._found: RecordStore | None = None

    @property
    def place(self) -> str:
        """As far as known: errors name it, also those that say that the store did not answer."""
        return (self._found or _beside(self._store)).place

    def read(self) -> tuple[bytes | None, Tag]:
        """See ``RecordStore``."""
        chosen = self._chosen()
        data, tag = chosen.read()
        if data is not None:
            self._found = chosen
        return data, tag

    def swap(self, tag: Tag, new: bytes) -> bool:
        """See ``RecordStore``."""
        chosen = self._chosen()
        done = chosen.swap(tag, new)
        if done and tag == ABSENT and not isinstance(chosen, EtcdRecordStore) and (url := _placed(self._store)):
            # Whoever places a run looks here after it did, so of two trainers that make it at once, at least one notices.
            raise RejectedError(f"{self._store.url}: another trainer placed its control record at {url}; name a new run")
        return done

    def _chosen(self) -> RecordStore:
        if self._found is None and (url := _placed(self._store)):
            self._found = etcd_store(url)
        return self._found or _beside(self._store)


def record_store(store: RunStore) -> RecordStore:
    """The run's control record. Sends no request; its methods also raise what reading ``control/place`` raises."""
    return _PlacedRecordStore(store)


def is_placed_elsewhere(store: RunStore) -> bool:
    """Whether the record lies in an etcd."""
    return bool(_placed(store))


def place_record(store: RunStore, control: str) -> None:
    """A trainer opens the run: fix where its record is, or see that it is where the trainer wants it.

    Args:
        store: the run's.
        control: ``etcd://host:2379/key``; empty: wherever the run has it, beside its payloads for a new one.

    Raises:
        RejectedError: the run has it elsewhere, or the URL is none.
    """
    if not control:
        return
    etcd_store(control)
    is_ours = False
    placed = _placed(store)
    if not placed and _beside(store).read()[0] is None:
        is_ours = store.put_if_absent(PLACE, control.encode())
        placed = control if is_ours else _placed(store)
    # Looked at after the place was written or found: of two trainers that make a run at once, one then sees the other.
    if placed in ("", control) and _beside(store).read()[0] is not None:
        if is_ours:
            store.delete([PLACE])
        placed = f"{store.url} itself"
    if placed != control:
        raise RejectedError(
            f"control {control}: the control record of {store.url} is at {placed} and stays there; leave control empty, or "
            "name a new run"
        )


def probe_record_store(store: RunStore, ids: IdSource) -> None:
    """Before a run is taken: see that two coordinators could not both win.

    Raises:
        RejectedError: the object store ignores conditions.
    """
    if store.directory is None and not store.url.startswith("memory:") and not is_placed_elsewhere(store):
        probe_conditional_writes(store.backend, keys.control(f"probe-{ids.nonce()}"))


def etcd_store(url: str, environment: Mapping[str, str] | None = None) -> EtcdRecordStore:
    """The record at ``etcd://host:port[,host:port...]/key``, or ``etcds://`` for TLS.

    User, password and certificates come from the variables that ``etcdctl`` reads: ``ETCDCTL_USER`` (``name:password``),
    ``ETCDCTL_CACERT``, ``ETCDCTL_CERT`` and ``ETCDCTL_KEY``.

    Raises:
        RejectedError: it is no such URL, or a certificate cannot be read.
    """
    parts = urlsplit(url)
    key = parts.path.strip("/")
    if parts.scheme not in ("etcd", "etcds") or not parts.netloc or not key or "@" in parts.netloc or parts.query:
        raise RejectedError(f"control URL of scheme {parts.scheme!r}: {_EXPECTED}, and user and password in ETCDCTL_USER")
    variables = os.environ if environment is None else environment
    is_secure = parts.scheme == "etcds"
    user, _, password = variables.get("ETCDCTL_USER", "").partition(":")
    endpoints = [f"{'https' if is_secure else 'http'}://{host}" for host in parts.netloc.split(",")]
    return EtcdRecordStore(endpoints, key, user=user, password=password, tls=_context(variables) if is_secure else None)


def _context(variables: Mapping[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=variables.get("ETCDCTL_CACERT") or None)
        if certificate := variables.get("ETCDCTL_CERT"):
            context.load_cert_chain(certificate, variables.get("ETCDCTL_KEY") or None)
    except (OSError, ssl.SSLError) as error:
        raise RejectedError(f"etcd: ETCDCTL_CACERT, ETCDCTL_CERT or ETCDCTL_KEY cannot be used: {error}") from error
    return context


def _placed(store: RunStore) -> str:
    """The URL that the run's store names; empty if the record lies beside the payloads."""

    def whole(data: bytes) -> str:
        # The beginning of a URL is a URL too, of another place: two places would be two coordinators.
        info = store.head(PLACE)
        if info is not None and info.nbytes != len(data):
            raise TransportError(f"{store.url}/{PLACE}: expected {info.nbytes} bytes, the store sent {len(data)}")
        return data.decode(errors="replace")

    try:
        return store.get_as(PLACE, whole, max_nbytes=_MAX_PLACE_NBYTES)
    except (PayloadMissingError, PayloadInvalidError):
        return ""


def _beside(store: RunStore) -> RecordStore:
    """A SQLite file for ``file://``, else an object under conditional writes."""
    if store.directory is not None:
        return SqliteRecordStore(store.directory / "control" / "record.sqlite")
    if store.url.startswith("memory:"):
        return _MEMORY.setdefault(store.url, MemoryRecordStore(store.url))
    return ObjectRecordStore(store.backend, keys.control("record"), place=f"{store.url}/{keys.control('record')}")
