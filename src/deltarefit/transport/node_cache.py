"""One download per node: the engines of a node share payloads through shared memory (paper 7.1).

A directory, usually on ``/dev/shm``, holds the payloads of the attempt that is under way. Whoever needs a payload first holds
its lock and downloads it; the others wait and read the same pages. The kernel drops a lock when its holder dies, so a killed
engine stops nobody. Whatever goes wrong here (no room, no lock in time, a damaged file), the engine downloads for itself:
sharing saves bytes and is never needed for correctness.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from deltarefit.errors import PayloadInvalidError, RejectedError
from deltarefit.ids import AttemptId, PayloadId
from deltarefit.transport import keys
from deltarefit.transport.base import Clock, PayloadSource, check_payload

__all__ = ["NodeCache", "shared_directory", "shared_path"]

_LOG = logging.getLogger(__name__)
_FIRST_POLL_S = 0.002
_MAX_POLL_S = 0.05


def shared_path(run_url: str, root: Path) -> Path:
    """Where this user's directory for that run is, or would be."""
    name = hashlib.blake2b(run_url.encode(), digest_size=8).hexdigest()
    return root / f"deltarefit-{os.getuid()}-{name}"


def shared_directory(run_url: str, *, root: Path = Path("/dev/shm")) -> Path:
    """Make, or find, this user's directory for that run.

    Raises:
        RejectedError: it cannot be made, or someone else made it.
    """
    path = shared_path(run_url, root)
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise RejectedError(
            f"shared memory directory {path}: {error}; choose another with the shared_directory setting"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RejectedError(
            f"shared memory directory {path}: expected a directory of user {os.getuid()} that nobody else may enter; remove it"
        )
    return path


class NodeCache:
    """A ``PayloadSource`` around another that downloads each payload once per node."""

    def __init__(
        self, inner: PayloadSource, directory: Path, *, clock: Clock, max_nbytes: int = 8 << 30, wait_s: float = 300.0
    ) -> None:
        """Share through ``directory``, which all engines of the node name alike and which holds nothing else.

        Args:
            inner: where payloads come from.
            directory: on a file system in memory, for choice; see ``shared_directory``.
            clock: bounds the wait for another engine's download.
            max_nbytes: most bytes kept; the oldest payloads go first. A payload that went is downloaded again.
            wait_s: longest wait for another engine's download before this one downloads for itself.
        """
        if max_nbytes < 0 or wait_s < 0:
            raise RejectedError(f"node cache: max_nbytes {max_nbytes} and wait_s {wait_s}: expected at least 0")
        self._inner = inner
        self._directory = directory
        self._clock = clock
        self._max_nbytes = max_nbytes
        self._wait_s = wait_s
        self._counting = threading.Lock()
        self._downloaded = 0
        self._shared = 0

    @property
    def downloaded(self) -> int:
        """Payloads that this process downloaded."""
        return self._downloaded

    @property
    def shared(self) -> int:
        """Payloads that this process took from another's download."""
        return self._shared

    def fetch(self, payload_id: PayloadId, *, nbytes: int, digest: str) -> bytes:
        """See ``PayloadSource``."""
        path = self._directory / Path(keys.payload(payload_id)).relative_to(keys.ATTEMPTS)
        if (data := self._read(path, payload_id, nbytes, digest)) is not None:
            return data
        with self._locked(path, payload_id):
            if (data := self._read(path, payload_id, nbytes, digest)) is not None:
                return data
            data = self._inner.fetch(payload_id, nbytes=nbytes, digest=digest)
            with self._counting:
                self._downloaded += 1
            self._keep(path, payload_id, data)
            return data

    def forget(self, attempt: AttemptId) -> None:
        """Free the attempt's payloads on this node. Any engine may call it once the attempt has ended; again is fine."""
        shutil.rmtree(self._folder(attempt), ignore_errors=True)

    def _folder(self, attempt: AttemptId) -> Path:
        return self._directory / Path(keys.attempt_prefix(attempt)).relative_to(keys.ATTEMPTS)

    def _read(self, path: Path, payload_id: PayloadId, nbytes: int, digest: str) -> bytes | None:
        try:
            if path.stat().st_size != nbytes:
                raise PayloadInvalidError(f"{path} has another length than {nbytes} bytes")
            data = path.read_bytes()
            check_payload(payload_id, data, nbytes=nbytes, digest=digest)
        except FileNotFoundError:
            return None
        except (OSError, PayloadInvalidError) as error:
            _LOG.warning("%s: what lies in shared memory is not used: %s", payload_id, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with self._counting:
            self._shared += 1
        return data

    @contextlib.contextmanager
    def _locked(self, path: Path, payload_id: PayloadId) -> Iterator[None]:
        """Hold the payload's lock; go on without it if it cannot be had in time."""
        try:
            self._begin(payload_id.attempt, path)
            descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            _LOG.warning("%s: not shared with other engines of this node: %s", payload_id, error)
            yield
            return
        try:
            self._wait_for_lock(descriptor, payload_id)
            yield
        finally:
            os.close(descriptor)

    def _begin(self, attempt: AttemptId, path: Path) -> None:
        """Make room for an attempt; the run has one at a time, so what other ones left is garbage."""
        if path.parent.exists():
            return
        for other in self._directory.iterdir():
            if other.name != attempt:
                shutil.rmtree(other, ignore_errors=True)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _wait_for_lock(self, descriptor: int, payload_id: PayloadId) -> None:
        end_s = self._clock.monotonic_s() + self._wait_s
        poll_s = _FIRST_POLL_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._clock.monotonic_s() >= end_s:
                    _LOG.warning("%s: another engine's download takes more than %g s", payload_id, self._wait_s)
                    return
                self._clock.sleep(poll_s)
                poll_s = min(2 * poll_s, _MAX_POLL_S)
            else:
                return

    def _keep(self, path: Path, payload_id: PayloadId, data: bytes) -> None:
        half_written = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
        try:
            if not self._make_room(len(data)):
                return
            half_written.write_bytes(data)
            half_written.replace(path)
        except OSError as error:
            _LOG.warning("%s: not kept for other engines of this node: %s", payload_id, error)
            with contextlib.suppress(OSError):
                half_written.unlink()

    def _make_room(self, nbytes: int) -> bool:
        """Remove the oldest payloads until that many bytes fit the limit; False if they never will."""
        if nbytes > self._max_nbytes:
            return False
        kept: list[tuple[int, int, Path]] = []
        for found in self._directory.glob("*/payloads/*"):
            if found.suffix == "":
                with contextlib.suppress(FileNotFoundError):
                    status = found.stat()
                    kept.append((status.st_mtime_ns, status.st_size, found))
        total = nbytes + sum(size for _, size, _ in kept)
        for _, size, found in sorted(kept):
            if total <= self._max_nbytes:
                break
            found.unlink(missing_ok=True)
            total -= size
        return True
