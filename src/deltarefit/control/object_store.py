"""The control record as one object under conditional writes: create with If-None-Match, replace with If-Match.

Needs nothing but the run's own bucket. Facts that shape it (measured):

* ``obstore`` retries by itself. A write that took effect but whose reply was lost is refused when it is sent again (412). So
  *no* from the store is not a defeat; ``ControlPlane`` looks for its own nonce in what it reads.
* AWS may answer 409 to conditional writes that overlap, and a client may report it like 412. Also *no*: the record is read
  again.
* Some servers ignore conditions and let every racer win (rclone, nanio, SeaweedFS before 4.17): ``probe_conditional_writes``
  tells.
* The local file store of obstore has no conditional update: ``file://`` runs take SQLite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import obstore
from obstore import exceptions as ox

from deltarefit.control.store import ABSENT, SwapUncertainError, Tag, check_nbytes
from deltarefit.errors import RejectedError, TransportError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["ObjectRecordStore", "probe_conditional_writes"]

_REFUSED = (ox.AlreadyExistsError, ox.PreconditionError, ox.NotModifiedError)
_DENIED = (ox.PermissionDeniedError, ox.UnauthenticatedError, ox.InvalidPathError)
_UNABLE = (ox.NotSupportedError, NotImplementedError)


class ObjectRecordStore:
    """One object that is only ever replaced conditionally."""

    def __init__(self, store: ObjectStore, key: str, *, place: str = "") -> None:
        """Store the arguments; nothing is contacted.

        Args:
            store: an obstore store; its own retry and time limits apply.
            key: the object's key, without a leading slash.
            place: how to name the object in error texts; the key if empty.
        """
        self._store = store
        self._key = key
        self._place = place or key

    @property
    def place(self) -> str:
        return self._place

    def read(self) -> tuple[bytes | None, Tag]:
        try:
            result = obstore.get(self._store, self._key)
            meta = result.meta
            check_nbytes(self.place, meta["size"])
            data = bytes(result.bytes())
        except (FileNotFoundError, ox.NotFoundError):
            return None, ABSENT
        except _DENIED as error:
            raise RejectedError(f"{self.place}: reading is not allowed: {_first_line(error)}") from error
        except ox.BaseError as error:
            raise TransportError(f"{self.place}: cannot be read: {_first_line(error)}") from error
        tag = Tag(meta.get("e_tag"), meta.get("version"))
        if tag == ABSENT:
            raise RejectedError(
                f"{self.place}: the store gives objects neither an ETag nor a version, so nothing can be compared"
            )
        return data, tag

    def swap(self, tag: Tag, new: bytes) -> bool:
        check_nbytes(self.place, len(new))
        try:
            obstore.put(self._store, self._key, new, mode=_mode(tag), use_multipart=False)
        except _REFUSED:
            return False
        except (FileNotFoundError, ox.NotFoundError):
            return False  # If-Match on an object that is gone; some stores say 404 (moto), others 412
        except _DENIED as error:
            raise RejectedError(f"{self.place}: writing is not allowed: {_first_line(error)}") from error
        except _UNABLE as error:
            raise RejectedError(
                f"{self.place}: this store has no conditional writes ({_first_line(error)}); use an S3, GCS or Azure store "
                "that has them, or a file:// run"
            ) from error
        except ox.BaseError as error:
            raise SwapUncertainError(f"{self.place}: no clear reply to a conditional write: {_first_line(error)}") from error
        return True


def probe_conditional_writes(store: ObjectStore, key: str) -> None:
    """Find out whether the store honours conditions, on a scratch object that is removed again.

    Args:
        store: the store to be probed.
        key: a key that nobody else uses; put a nonce in it.

    Raises:
        RejectedError: the store ignores or lacks conditional writes; the text says which.
        TransportError: the store could not be reached.
    """
    probe = ObjectRecordStore(store, key)
    try:
        if not probe.swap(ABSENT, b"1"):
            raise RejectedError(f"{key}: the store refused to create a new object; is the key {key!r} in use?")
        first = _tag_of(probe)
        if probe.swap(ABSENT, b"2"):
            raise RejectedError(_ignores(key, "If-None-Match: * (create only if absent)"))
        if not probe.swap(first, b"3"):
            raise RejectedError(f"{key}: the store refused a conditional write with the right ETag; is something else writing?")
        if probe.swap(first, b"4"):
            raise RejectedError(_ignores(key, "If-Match with an old ETag"))
        if probe.read()[0] != b"3":
            raise RejectedError(f"{key}: a conditional write was refused and yet took effect; the store cannot hold the record")
    finally:
        _remove(store, key)


def _tag_of(probe: ObjectRecordStore) -> Tag:
    data, tag = probe.read()
    if data is None:
        raise RejectedError(f"{probe.place}: an object that was just written is not there; the store is not consistent")
    return tag


def _ignores(key: str, what: str) -> str:
    return (
        f"{key}: the store ignores {what}: two coordinators could both commit. Use a store with conditional writes "
        "(SeaweedFS 4.48 or newer, AWS S3, GCS, Azure), or a file:// run"
    )


def _remove(store: ObjectStore, key: str) -> None:
    try:
        obstore.delete(store, key)
    except (FileNotFoundError, ox.BaseError):
        return  # a scratch object that stays is swept with the run; the probe's own answer matters more


def _mode(tag: Tag) -> Any:
    if tag == ABSENT:
        return "create"
    # A None among the values is refused by obstore 0.12.1, so only what the store gave goes back.
    return {name: value for name, value in (("e_tag", tag.etag), ("version", tag.generation)) if value is not None}


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
