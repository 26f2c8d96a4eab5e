"""Transport: opaque payload bytes and small messages, carried under ids (paper 7.1, B.1, App. C).

It never decodes a payload and knows no tensor, no protocol state and no clock of its own. May import the leaves ``errors``
and ``ids`` only, plus obstore and msgspec. Bytes lie or travel by object store, relay tree or memory; what cuts across them
(retries, limits, logs) wraps a sender. ``base.py`` states the contract, ``deltarefit.testing`` ships the suite that checks it.
"""

from deltarefit.transport.base import (
    MAX_PAYLOAD_NBYTES,
    BoundedSource,
    Clock,
    PayloadEntry,
    PayloadSender,
    PayloadSource,
    check_payload,
    payload_digest,
)
from deltarefit.transport.beacon import Beacon, BeaconReading, BeaconWatch, Sighting, read_beacon, read_beacons
from deltarefit.transport.mailbox import Mail, Mailbox, MailboxSettings
from deltarefit.transport.manifest import Manifest, OwnerEnd
from deltarefit.transport.memory import MemoryTransport
from deltarefit.transport.node_cache import NodeCache, shared_directory, shared_path
from deltarefit.transport.object_store import (
    ManifestWriter,
    ObjectStoreSender,
    ObjectStoreSource,
    is_staged,
    read_manifest,
    sweep_attempts,
    sweep_staged,
)
from deltarefit.transport.retry import RetryPolicy, retry
from deltarefit.transport.stores import ObjectInfo, RunStore, StoreSettings
from deltarefit.transport.urls import open_run
from deltarefit.transport.wrappers import LimitedSender, LoggingSender, RetryingSender

__all__ = [
    "MAX_PAYLOAD_NBYTES",
    "Beacon",
    "BeaconReading",
    "BeaconWatch",
    "BoundedSource",
    "Clock",
    "LimitedSender",
    "LoggingSender",
    "Mail",
    "Mailbox",
    "MailboxSettings",
    "Manifest",
    "ManifestWriter",
    "MemoryTransport",
    "NodeCache",
    "ObjectInfo",
    "ObjectStoreSender",
    "ObjectStoreSource",
    "OwnerEnd",
    "PayloadEntry",
    "PayloadSender",
    "PayloadSource",
    "RetryPolicy",
    "RetryingSender",
    "RunStore",
    "Sighting",
    "StoreSettings",
    "check_payload",
    "is_staged",
    "open_run",
    "payload_digest",
    "read_beacon",
    "read_beacons",
    "read_manifest",
    "retry",
    "shared_directory",
    "shared_path",
    "sweep_attempts",
    "sweep_staged",
]
