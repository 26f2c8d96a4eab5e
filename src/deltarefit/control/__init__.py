"""The control plane: one small record per run that changes only by compare-and-set.

A backend only reads and swaps one blob (``RecordStore``); every rule is in ``protocol.commit``; ``ControlPlane`` joins the two.
May import the leaves, ``protocol``, and the clients of the backends (sqlite3, obstore, http.client). Knows no tensor, no
payload and no clock.
"""

from deltarefit.control.etcd import EtcdRecordStore
from deltarefit.control.memory import MemoryRecordStore
from deltarefit.control.object_store import ObjectRecordStore, probe_conditional_writes
from deltarefit.control.plane import ControlPlane, ControlSettings
from deltarefit.control.sqlite import SqliteRecordStore
from deltarefit.control.store import ABSENT, RecordStore, SwapUncertainError, Tag

__all__ = [
    "ABSENT",
    "ControlPlane",
    "ControlSettings",
    "EtcdRecordStore",
    "MemoryRecordStore",
    "ObjectRecordStore",
    "RecordStore",
    "SqliteRecordStore",
    "SwapUncertainError",
    "Tag",
    "probe_conditional_writes",
]
