"""What the processes of one rollout node share through its memory: one download per payload, and the node's relay.

All of them derive the same directory from the run's URL, usually under ``/dev/shm``; a small file in it names the node, so that
the coordinator knows which receivers a relay serves. A node without such a directory works as well: its engines download for
themselves. Each process holds a lock on the directory while it uses it, which the kernel drops when the process dies; the last
one to leave removes the directory, unless payloads wait in it for a relay to come back.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from deltarefit.errors import RejectedError
from deltarefit.ids import AttemptId, OwnerId, PayloadId, ReceiverId
from deltarefit.protocol import ReceptionSettings
from deltarefit.runtime.clock import Clock, IdSource, Pace
from deltarefit.runtime.delivery import DeliveryLimits
from deltarefit.runtime.events import EventLog
from deltarefit.runtime.feeds import Feed, ManifestFeed, RelayFeed
from deltarefit.runtime.settings import ReceiverAgentSettings
from deltarefit.transport import (
    MailboxSettings,
    NodeCache,
    ObjectStoreSource,
    PayloadSource,
    RunStore,
    shared_directory,
    shared_path,
)
from deltarefit.transport.relay import RelaySource

__all__ = [
    "NodeShare",
    "ReceiverFeeds",
    "busy_pace",
    "delivery_limits",
    "idle_pace",
    "open_node_share",
    "receiver_feeds",
    "reception_settings",
    "relay_pace",
]

_LOG = logging.getLogger(__name__)
_NODE_NAME_NBYTES = 64
_OPENINGS = 20  # more than once only where somebody else left in the same moment


class _GoneError(Exception):
    """The directory was removed while it was being opened."""


class NodeShare:
    """One node's directory for one run, until ``close``."""

    def __init__(self, directory: Path, ids: IdSource) -> None:
        """Find or make the node's name in ``directory``.

        Raises:
            RejectedError: the directory cannot be used.
        """
        self.directory = directory
        self._users = self._enter()
        self._leave = weakref.finalize(self, os.close, self._users)
        self.payloads = directory / "payloads"
        """Of ``NodeCache``."""
        self.relay = directory / "relay"
        """The relay's shelf."""
        try:
            self.payloads.mkdir(mode=0o700, exist_ok=True)
            self.relay.mkdir(mode=0o700, exist_ok=True)
            self.node = self._name(ids)
        except OSError as error:
            self._leave()
            raise RejectedError(f"shared directory {directory}: {error}; name another with shared_directory") from error

    def _enter(self) -> int:
        """Be one of the directory's users: nobody removes it until the returned file descriptor is closed.

        Raises:
            RejectedError: the directory cannot be used.
        """
        path = self.directory / "users"
        try:
            users = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(users, fcntl.LOCK_SH)  # waits for no longer than somebody removes the directory
                if os.path.samestat(os.fstat(users), path.stat()):
                    return users
            except OSError:
                os.close(users)
                raise
            os.close(users)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise RejectedError(f"shared directory {self.directory}: {error}; name another with shared_directory") from error
        raise _GoneError(f"shared directory {self.directory}: others keep removing it")

    def close(self) -> None:
        """Leave the directory. The last one removes it, unless a relay's payloads lie there. May be called again."""
        if not self._leave.alive:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while others are in it
            if not any(path.is_file() and path.parent != self.relay / "readers" for path in self.relay.rglob("*")):
                gone = self.directory.with_name(f"{self.directory.name}.{self.node}")
                self.directory.rename(gone)  # in one step, so that nobody enters what is being removed
                shutil.rmtree(gone, ignore_errors=True)
        self._leave()

    def lock_relay(self) -> IO[bytes]:
        """Be this node's one relay until the returned file is closed, or this process ends.

        Raises:
            RejectedError: another process is.
        """
        file = (self.directory / "relay.lock").open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise RejectedError(f"shared directory {self.directory}: another relay serves this node and run already") from error
        return file

    def _name(self, ids: IdSource) -> str:
        """Whoever links first names the node for all."""
        path = self.directory / "node"
        own = self.directory / f"node.{os.getpid()}-{ids.nonce()}"
        own.write_text(f"n{ids.nonce()}{ids.nonce()}", encoding="ascii")
        try:
            with contextlib.suppress(FileExistsError):
                os.link(own, path)
        finally:
            own.unlink(missing_ok=True)
        with path.open("rb") as file:
            return file.read(_NODE_NAME_NBYTES).decode("ascii", "replace")


def open_node_share(root: str, run_url: str, ids: IdSource, *, makes: bool = False) -> NodeShare | None:
    """The node's share for that run; None if ``root`` is empty, or cannot be used, which is logged.

    A run in files on this machine needs none, so there it is only found, unless the caller ``makes`` it, as a relay does.
    """
    is_local = run_url.startswith(("file:", "memory:")) and not makes
    if not root or (is_local and not shared_path(run_url, Path(root)).exists()):
        return None
    try:
        why = ""
        for _ in range(_OPENINGS):
            try:
                return NodeShare(_directory(run_url, Path(root)), ids)
            except _GoneError as error:
                why = str(error)
        raise RejectedError(why)
    except RejectedError as error:
        _LOG.warning("nothing is shared with other engines of this node: %s", error)
        return None


def _directory(run_url: str, root: Path) -> Path:
    try:
        return shared_directory(run_url, root=root)
    except RejectedError as error:
        if isinstance(error.__cause__, FileNotFoundError | FileExistsError) and root.is_dir():
            raise _GoneError(str(error)) from error
        raise


class _Downloads:
    """Records each download; what another engine of the node downloaded passes by."""

    def __init__(self, inner: PayloadSource, log: EventLog) -> None:
        self._inner = inner
        self._log = log

    def fetch(self, payload_id: PayloadId, *, nbytes: int, digest: str) -> bytes:
        with self._log.stage("fetch", payload_id.attempt, nbytes=nbytes, payload=str(payload_id)):
            return self._inner.fetch(payload_id, nbytes=nbytes, digest=digest)


class ReceiverFeeds:
    """Where one receiver gets its payloads from, attempt by attempt. Used by one thread."""

    def __init__(
        self,
        receiver: ReceiverId,
        *,
        store: RunStore,
        share: NodeShare | None,
        log: EventLog,
        clock: Clock,
        max_shared_nbytes: int,
    ) -> None:
        self._receiver = receiver
        self._store = store
        self._share = share
        self._clock = clock
        self._source: PayloadSource = _Downloads(ObjectStoreSource(store), log)
        self._cache: NodeCache | None = None
        # Files of a run on a local disk are in this node's memory already.
        if share is not None and max_shared_nbytes and store.directory is None and not store.url.startswith("memory:"):
            self._cache = NodeCache(self._source, share.payloads, clock=clock, max_nbytes=max_shared_nbytes)
            self._source = self._cache
        self._relay: RelaySource | None = None

    @property
    def node(self) -> str:
        """Names the node; empty if nothing is shared on it."""
        return "" if self._share is None else self._share.node

    @property
    def source(self) -> PayloadSource:
        """Fetches payloads from the run's store, once for all engines of a node."""
        return self._source

    def feed(self, attempt: AttemptId, owners: Sequence[OwnerId], transport: str) -> Feed:
        """Follow an attempt whose payloads travel that way.

        Raises:
            RejectedError: they come by relay, and this node shares no directory with one.
        """
        if transport != "relay":
            return ManifestFeed(self._store, self._source, attempt)
        if self._share is None:
            raise RejectedError(
                f"receiver {self._receiver}: {attempt} comes by relay, but this receiver shares no directory with its node's "
                "relay; set shared_directory, the same for both"
            )
        if self._relay is None:
            self._relay = RelaySource(self._share.relay, str(self._receiver), clock=self._clock)
        return RelayFeed(self._relay, attempt, owners)

    def forget(self, attempt: AttemptId) -> None:
        """The attempt has ended: free what this node keeps of it."""
        if self._cache is not None:
            self._cache.forget(attempt)

    def close(self) -> None:
        """Let the node's relay forget this engine, and leave what the node shares."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None
        if self._share is not None:
            self._share.close()


def receiver_feeds(
    receiver: ReceiverId, store: RunStore, settings: ReceiverAgentSettings, *, log: EventLog, clock: Clock, ids: IdSource
) -> ReceiverFeeds:
    """What a receiver's settings say about where payloads come from."""
    share = open_node_share(settings.shared_directory, store.url, ids)
    return ReceiverFeeds(receiver, store=store, share=share, log=log, clock=clock, max_shared_nbytes=settings.shared_nbytes)


def reception_settings(settings: ReceiverAgentSettings) -> ReceptionSettings:
    return ReceptionSettings(queue_slots=settings.queue_slots, staging_limit_nbytes=settings.staging_nbytes)


def delivery_limits(settings: ReceiverAgentSettings) -> DeliveryLimits:
    return DeliveryLimits(
        ahead_nbytes=settings.ahead_nbytes,
        fetch_threads=settings.fetch_threads,
        decode_threads=settings.decode_threads or min(4, len(os.sched_getaffinity(0))),
        decode_ahead=settings.decode_ahead,
        decoded_nbytes=settings.decoded_nbytes,
        spill_directory=settings.spill_directory,
    )


def busy_pace(store: RunStore, clock: Clock) -> Pace:
    """How often to look into the store while an attempt is under way: ten times as often as between attempts."""
    polling = MailboxSettings.for_store(store)
    return Pace(clock, first_s=polling.first_poll_s, most_s=polling.max_poll_s / 10)


def relay_pace(clock: Clock) -> Pace:
    """How often to look into the directory that is shared with the node's relay."""
    polling = MailboxSettings()
    return Pace(clock, first_s=polling.first_poll_s, most_s=polling.max_poll_s / 5)


def idle_pace(store: RunStore, clock: Clock) -> Pace:
    """How often to look for mail between attempts: soon after some came, ever more rarely without."""
    polling = MailboxSettings.for_store(store)
    return Pace(clock, first_s=polling.first_poll_s, most_s=polling.max_poll_s)
