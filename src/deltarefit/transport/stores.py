"""One run's objects, wherever they lie: a small facade over obstore that speaks our errors.

obstore is called here and nowhere else in this room, so its errors are translated in one place (``_translated``).
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore import exceptions as foreign

from deltarefit.errors import PayloadInvalidError, PayloadMissingError, RefitError, RejectedError, TransportError
from deltarefit.transport.base import Clock
from deltarefit.transport.retry import RetryPolicy, retry

__all__ = ["ObjectInfo", "RunStore", "StoreSettings"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_READS = 3
"""Of an object that makes no sense, before it is believed to be damaged where it lies."""
_DELETE_BATCH = 1000
"""S3's limit for one bulk deletion."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How a store is spoken to."""

    part_nbytes: int = 8 << 20
    """Part of a multipart upload and range of a large download. S3 wants at least 5 MiB and at most 10,000 parts."""
    concurrency: int = 4
    """Parts of one object on the way at the same time, each way; bounds memory to this many parts beyond the object."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """For whole operations; beneath it the client repeats single requests ``request_retries`` times."""
    request_retries: int = 2
    request_timeout_s: float = 120.0
    """For one request, body included: ``part_nbytes`` in this time is the slowest link that works (70 kB/s)."""
    read_timeout_s: float = 20.0
    """A response that brings no byte for this long is given up and the request repeated."""
    connect_timeout_s: float = 5.0
    max_listed: int = 200_000
    """A listing with more objects is refused: something else lives under the run's URL."""

    def __post_init__(self) -> None:
        if not 5 << 20 <= self.part_nbytes <= 1 << 30:
            raise RejectedError(f"part_nbytes {self.part_nbytes}: expected 5 MiB to 1 GiB (S3's limits for a part)")
        if self.concurrency < 1 or self.request_retries < 0:
            raise RejectedError("concurrency: expected at least 1; request_retries: expected at least 0")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing."""

    key: str
    nbytes: int
    modified_s: float
    """The store's clock, seconds since 1970; never compare it with ours."""


class RunStore:
    """Objects under a run's URL. Every method may be called from any thread, several at once.

    Raises, in every method: ``TransportError`` when the store cannot be reached or fails (after the policy's tries),
    ``RejectedError`` when it refuses us (credentials, permissions, no such bucket).
    """

    def __init__(
        self,
        url: str,
        backend: Any,
        *,
        clock: Clock,
        settings: StoreSettings | None = None,
        directory: Path | None = None,
    ) -> None:
        """``backend``: an obstore store that already carries the run's prefix. ``open_run`` is the usual way here."""
        self.url = url
        self.backend = backend
        """For the control plane, which needs conditional writes."""
        self.directory = directory
        """Where the objects lie as files, for ``file://`` runs; else None."""
        self.settings = settings if settings is not None else StoreSettings()
        self._clock = clock

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object, replacing one that is there. Atomic: readers see the old bytes or all the new ones.

        More than ``part_nbytes`` goes up in parts, ``concurrency`` at a time; a failed upload leaves nothing visible.
        """
        settings = self.settings
        if self.url.startswith("memory:"):
            data = bytes(data)  # obstore's memory store keeps the caller's buffer itself
        self._repeat(
            f"write {key}",
            lambda: obstore.put(
                self.backend,
                key,
                data,
                use_multipart=memoryview(data).nbytes > settings.part_nbytes,
                chunk_size=settings.part_nbytes,
                max_concurrency=settings.concurrency,
            ),
        )

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless one is there. Returns whether the object that is now there is ours.

        A lost reply makes the store say "exists" about our own object, so that is settled by comparing bytes: put something
        that names the writer into them where it matters who was first.
        """
        if self._repeat(f"create {key}", lambda: self._create_once(key, data)):
            return True
        return any(self.find(key, max_nbytes=len(data)) == data for _ in range(_READS))

    def get(self, key: str, *, max_nbytes: int) -> bytes:
        """Read a whole object.

        Raises:
            PayloadMissingError: there is none.
            PayloadInvalidError: it has more than ``max_nbytes``; refused before its body is read.
        """
        return self._repeat(f"read {key}", lambda: self._get_once(key, max_nbytes))

    def get_as(self, key: str, parse: Callable[[bytes], _T], *, max_nbytes: int) -> _T:
        """What ``parse`` makes of a whole object; one that it refuses is read again before that is believed.

        Stores and proxies have been seen to end a body early without an error, and only another read tells damage on the way
        from a damaged object. Raises what ``get`` and ``parse`` raise.
        """
        for _ in range(_READS - 1):
            data = self.get(key, max_nbytes=max_nbytes)
            try:
                return parse(data)
            except RefitError as error:
                _LOG.info("%s: %s; reading it again", key, error)
        return parse(self.get(key, max_nbytes=max_nbytes))

    def find(self, key: str, *, max_nbytes: int) -> bytes | None:
        """As ``get``; None if there is no such object, or if it is larger."""
        try:
            return self.get(key, max_nbytes=max_nbytes)
        except (PayloadMissingError, PayloadInvalidError):
            return None

    def get_range(self, key: str, start: int, nbytes: int) -> bytes:
        """Read ``nbytes`` bytes (at least 1) from byte ``start``.

        Raises:
            PayloadMissingError: there is no such object.
            TransportError: the store gave other than ``nbytes`` bytes, e.g. because the object ends before.
        """
        return self._repeat(f"read {key} at byte {start}", lambda: self._get_range_once(key, start, nbytes))

    def head(self, key: str) -> ObjectInfo | None:
        """What is known of an object without reading it; None if there is none."""
        try:
            return _info(self._repeat(f"look at {key}", lambda: obstore.head(self.backend, key)))
        except PayloadMissingError:
            return None

    def listing(self, prefix: str) -> list[ObjectInfo]:
        """All objects under ``prefix/``, sorted by key; empty if there are none."""
        return self._repeat(f"list {prefix}/", lambda: self._list_once(prefix))

    def children(self, prefix: str) -> list[str]:
        """What lies directly under ``prefix/``, sorted: keys of objects, and prefixes of others, which end in a slash."""
        return self._repeat(f"list {prefix}/", lambda: self._children_once(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there are fine."""
        listed = list(keys)
        for first in range(0, len(listed), _DELETE_BATCH):
            batch = listed[first : first + _DELETE_BATCH]
            self._repeat(f"delete {batch[0]} and {len(batch) - 1} more", partial(self._delete_once, batch))

    def delete_prefix(self, prefix: str) -> int:
        """Remove everything under ``prefix/``, also what killed writers left half-written. Returns how many objects."""
        found = [info.key for info in self.listing(prefix)]
        self.delete(found)
        if self.directory is not None:
            with _translated(f"delete {prefix}/"):
                shutil.rmtree(self.directory / prefix, ignore_errors=True)
        return len(found)

    def _repeat(self, what: str, call: Callable[[], _T]) -> _T:
        def translated() -> _T:
            with _translated(f"{what} in {self.url}"):
                return call()

        return retry(what, translated, policy=self.settings.retry, clock=self._clock)

    def _create_once(self, key: str, data: bytes) -> bool:
        """Whether it was created; False if an object is there."""
        try:
            with _translated(f"create {key} in {self.url}"):
                obstore.put(self.backend, key, data, mode="create", use_multipart=False)
        except _ExistsError as error:
            # That is also how a conflict with a write in flight shows (409): nobody has won then, and nothing may be there.
            if self.head(key) is None:
                raise TransportError(f"{error}: another write of it was under way, and nothing is there") from error
            return False
        return True

    def _get_once(self, key: str, max_nbytes: int) -> bytes:
        response = obstore.get(self.backend, key)
        nbytes = int(response.meta["size"])
        if nbytes > max_nbytes:
            raise PayloadInvalidError(f"{key}: expected at most {max_nbytes} bytes, the object has {nbytes}")
        data = bytes(response.bytes())
        if len(data) != nbytes:
            raise TransportError(f"{key}: expected {nbytes} bytes, the store sent {len(data)}")
        return data

    def _get_range_once(self, key: str, start: int, nbytes: int) -> bytes:
        data = bytes(obstore.get_range(self.backend, key, start=start, length=nbytes))
        if len(data) != nbytes:
            raise TransportError(f"{key}: expected {nbytes} bytes from byte {start}, the store sent {len(data)}")
        return data

    def _list_once(self, prefix: str) -> list[ObjectInfo]:
        found: list[ObjectInfo] = []
        for batch in obstore.list(self.backend, prefix):
            found.extend(map(_info, batch))
            if len(found) > self.settings.max_listed:
                raise RejectedError(
                    f"{self.url}: more than {self.settings.max_listed} objects under {prefix}/; "
                    "is something else kept under this URL? Give each run a URL of its own"
                )
        return sorted(found, key=lambda info: info.key)

    def _children_once(self, prefix: str) -> list[str]:
        found = obstore.list_with_delimiter(self.backend, prefix)
        return sorted([*(f"{one}/" for one in found["common_prefixes"]), *(meta["path"] for meta in found["objects"])])

    def _delete_once(self, batch: list[str]) -> None:
        with contextlib.suppress(foreign.NotFoundError, FileNotFoundError):
            obstore.delete(self.backend, batch)
            return
        # LocalStore stops at the first key that is gone, so the others go one by one.
        for key in batch:
            with contextlib.suppress(foreign.NotFoundError, FileNotFoundError):
                obstore.delete(self.backend, key)


class _ExistsError(Exception):
    """A conditional create found an object there."""


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(meta["path"], int(meta["size"]), meta["last_modified"].timestamp())


_REFUSED = (
    *("NoSuchBucket", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "169.254.169.254"),
    *("(os error 13)", "(os error 30)"),
)
"""Words in a store's answer that no repetition will change. 169.254.169.254 is the address asked when no credentials are set;
error 13 is a directory of another user, 30 a file system mounted for reading only."""


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn obstore's and the file system's errors into ours."""
    try:
        yield
    except foreign.AlreadyExistsError as error:
        raise _ExistsError(what) from error
    except (foreign.PermissionDeniedError, foreign.UnauthenticatedError, PermissionError) as error:
        raise RejectedError(f"{what}: the store refused us; check its credentials and permissions: {_short(error)}") from error
    except (foreign.NotFoundError, FileNotFoundError) as error:
        if "NoSuchBucket" in str(error):
            raise RejectedError(f"{what}: there is no such bucket; create it first: {_short(error)}") from error
        raise PayloadMissingError(f"{what}: there is no such object") from error
    except (foreign.InvalidPathError, foreign.UnknownConfigurationKeyError, foreign.NotSupportedError) as error:
        raise RejectedError(f"{what}: {_short(error)}") from error
    except (foreign.BaseError, OSError) as error:
        if any(word in str(error) for word in _REFUSED):
            raise RejectedError(
                f"{what}: the store refused us; check URL, credentials and permissions: {_short(error)}"
            ) from error
        raise TransportError(f"{what}: {_short(error)}") from error


def _short(error: Exception) -> str:
    """The first lines of obstore's error, which goes on with a debug dump of every field."""
    text = str(error).split("\n\nDebug source:", 1)[0]
    return " ".join(text.split())[:500]
